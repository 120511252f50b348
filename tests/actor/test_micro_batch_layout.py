"""The layout of a micro-batch on a rank of several, without other processes: each index by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from verl_vcpo.actor.taps import collector, layout
from verl_vcpo.actor.taps.collector import Collector, _share
from verl_vcpo.actor.taps.layout import MicroBatch, micro_batch

TOKENS = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_sizes(tensor: int, context: int, rank: int = 0) -> None:
        monkeypatch.setattr(layout.mpu, "get_tensor_model_parallel_world_size", lambda: tensor)
        monkeypatch.setattr(layout.mpu, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(layout.mpu, "get_context_parallel_world_size", lambda: context)

    return set_sizes


def laid_out(packed: bool, sequences: int = 2, **more: Any) -> MicroBatch:
    ids = torch.nested.as_nested_tensor([torch.tensor(row) for row in TOKENS[:sequences]], layout=torch.jagged)
    numbers = torch.tensor([5, 3])[:sequences]
    return micro_batch(tu.get_tensordict({"input_ids": ids, "vcpo_row": numbers}, more), packed, "cpu")


def test_one_rank_has_all_tokens_one_after_the_other(ranks: Any) -> None:
    ranks(tensor=1, context=1)
    made = laid_out(packed=True)
    assert made.numbers == (5, 3) and made.segments is made.whole and made.by_sequence is None
    assert made.segments.bounds == (0, 3, 9) and made.token.tolist() == [*range(1, 10)]
    assert made.sequence.tolist() == [[0]] * 3 + [[1]] * 6 and made.row.tolist() == [5] * 3 + [3] * 6


def test_a_context_parallel_rank_has_a_chunk_from_the_front_and_one_from_the_end(ranks: Any) -> None:
    """Padded to multiples of 4, the sequences have chunks of 1 and of 2 tokens."""
    ranks(tensor=1, context=2)
    made = laid_out(packed=True)
    assert made.segments.bounds == (0, 2, 6) and made.whole.bounds == (0, 4, 12)
    assert made.token.tolist() == [1, 0, 2, 3, 4, 5, 0, 0, 6, 7, 8, 9], "rank after rank, of each sequence"
    assert made.by_sequence is not None and made.by_sequence.tolist() == [0, 1, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11]
    assert made.sequence.tolist() == [[0]] * 2 + [[1]] * 4


def test_padded_sequences_are_as_long_as_the_longest(ranks: Any) -> None:
    """As verl asks, longer; and a multiple of the tensor-parallel ranks."""
    ranks(tensor=4, context=1)
    made = laid_out(packed=False)
    assert made.segments.bounds == (0, 8, 16) and made.sequence.tolist() == [[0, 1]] * 8
    assert made.token.tolist() == [1, 2, 3, 0, 0, 0, 0, 0, 4, 5, 6, 7, 8, 9, 0, 0]
    assert laid_out(packed=False, forced_max_seqlen=9).segments.bounds == (0, 12, 24)
    assert laid_out(packed=False, sequences=1).sequence.tolist() == [[0]] * 4
    ranks(tensor=2, context=2)
    assert laid_out(packed=False).whole.bounds == (0, 8, 16), "of 2 tensor-parallel ranks and 4 chunks"
    assert laid_out(packed=False).sequence.tolist() == [[0, 1]] * 4


def test_a_tensor_parallel_rank_may_see_its_part_of_the_rows(ranks: Any) -> None:
    ranks(tensor=3, context=1, rank=1)
    made = laid_out(packed=True)
    assert made.sequence_of(torch.zeros(9, 1, 2)).tolist() == [0] * 3 + [1] * 6
    assert made.sequence_of(torch.zeros(3, 1, 2)).tolist() == [1] * 3
    with pytest.raises(RuntimeError, match="an activation of 4 rows, not 9 or 1/3 of it"):
        made.sequence_of(torch.zeros(4, 1, 2))
    ranks(tensor=1, context=1)
    flat = torch.arange(12.0).view(6, 2)
    assert laid_out(packed=False).activation(flat).shape == (3, 2, 2)
    assert laid_out(packed=False).flat(flat.view(3, 2, 2))[:, 0].tolist() == [0, 4, 8, 2, 6, 10], "sequence by sequence"


def test_ranks_divide_the_rows_of_a_weight() -> None:
    shares = [_share(10, part, 3) for part in range(3)]
    assert [(each.start, each.stop) for each in shares] == [(0, 3), (3, 6), (6, 10)]


@pytest.mark.parametrize(("rank", "rows"), [((0, 0), (0, 2)), ((0, 1), (2, 4)), ((1, 0), (4, 6)), ((1, 1), (6, 8))])
def test_context_and_tensor_parallel_ranks_divide_the_rows_of_a_router(
    rank: tuple[int, int], rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of each gather the same tokens of a router of 8 experts: each squares 2 rows."""
    taken: list[slice] = []
    router, group = object.__new__(Collector), SimpleNamespace(size=lambda: 2, rank=lambda: rank[1])
    router._cp_rank, router._cp = rank[0], 2
    router.micro_batch = SimpleNamespace(flat=lambda part: part, gathered=lambda part: part)  # type: ignore[assignment]
    monkeypatch.setattr(collector, "_gathered", lambda part, group: part)
    monkeypatch.setattr(router, "_weight", lambda weight, x, dy, mine: taken.append(mine))
    router.router(torch.zeros(8, 4), torch.zeros(3, 4), torch.zeros(3, 8), gather=group)
    assert [(each.start, each.stop) for each in taken] == [rows]


def test_sums_over_sequences_are_the_same_by_one_product(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one product on a GPU in half precision, whose factor is made once for each number of rows and format."""
    ranks(tensor=1, context=1)
    made, rows = laid_out(packed=True), torch.arange(18.0).reshape(9, 2)
    wanted = [[6.0, 9.0], [66.0, 72.0]]
    assert made.sums(rows, rows[:, None]).tolist() == wanted
    monkeypatch.setattr(layout, "batches", lambda value: True)
    for _ in range(2):
        assert made.sums(rows, rows[:, None]).tolist() == wanted
    half = made.sums(rows.bfloat16(), rows[:, None])
    assert half.dtype == torch.float32 and half.tolist() == wanted
    assert {key: member.dtype for key, member in made._members.items()} == {
        (9, torch.float32): torch.float32,
        (9, torch.bfloat16): torch.bfloat16,
    }


@pytest.mark.parametrize(("heads", "wanted"), [(1, [0.0, 1.0]), (2, [2.0, 4.0]), (3, [6.0, 9.0])])
def test_a_norm_of_heads_sums_over_heads_even_of_one_token(heads: int, wanted: list[float]) -> None:
    """One token [1, 1, heads, d], in a micro-batch of one sequence."""
    found: list[torch.Tensor] = []
    one = SimpleNamespace(sums=lambda rows, dy: found.append(rows))
    taker: Any = SimpleNamespace(current=lambda: one, _vectors=[])
    gradients = torch.arange(2.0 * heads).reshape(1, 1, heads, 2)
    Collector.vector(taker, torch.ones(2), gradients)
    assert found[0].tolist() == [wanted]
