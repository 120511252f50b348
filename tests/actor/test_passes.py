"""In which passes two sums form the gradient of a mini-batch, and where they cannot."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from tests.actor.conftest import ONE_PROCESS
from tests.actor.test_vcpo_engine import train
from tests.kit.layout_worker import GROUPS, make_batch
from verl_vcpo.actor.norms_settings import SECOND_BUFFERS_BYTES, NormsConfig, NormsHow
from verl_vcpo.actor.taps.modules import TappedLinear
from verl_vcpo.actor.taps.sums import SecondBuffers, make_room
from verl_vcpo.actor.update import packed, sequences
from verl_vcpo.actor.update.mini_batch import Facts
from verl_vcpo.actor.update.packed import PackedUpdate, Pass
from verl_vcpo.actor.update.passes import Passes, passes_of_sums
from verl_vcpo.actor.vcpo_settings import VCPOSettings

MANY = 50


def prompts(rank_of_row: list[int], group: list[int], length: int | list[int] = 10) -> Facts:
    """Sequences sorted by rank."""
    ones = torch.ones(len(group)).double()
    none = dict.fromkeys(("padding", "dropped", "truncated", "masked"), ~ones.bool())
    return Facts(
        **none,
        rank=torch.tensor(rank_of_row),
        group=torch.tensor(group),
        reward=ones,
        tokens=ones,
        length=torch.tensor(length if isinstance(length, list) else [length] * len(group)),
        recorded=ones.bool(),
        lag=ones,
        fresh_tokens=ones,
    )


def groups(number: int, size: int, shortest: int, longest: int, across: bool = False) -> Facts:
    """`number` prompts of `size` samples, on one rank or, one sample each, across two."""
    n, ranks = number * size, 2 if across else 1
    lengths = torch.randint(shortest, longest + 1, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    return prompts(
        [i // (n // ranks) for i in range(n)], [i % number if across else i // size for i in range(n)], lengths
    )


def passes(seen: Facts, tokens: int | None = 8192, buffers: int = MANY, **more: Any) -> Passes | None:
    pipeline = {name: more.pop(name, False) for name in ("staged", "interleaved")}
    return passes_of_sums(VCPOSettings(**more), seen, tokens, buffers, **pipeline)


def test_no_sums_where_a_baseline_is_not_one_pass_of_one_rank() -> None:
    whole, across = groups(16, 2, 256, 1024), groups(16, 2, 256, 1024, across=True)
    assert passes(whole) is not None
    assert passes(whole, norms=NormsConfig(how=NormsHow.TWO_BACKWARDS)) is None
    assert passes(whole, staged=True, interleaved=True) is None
    assert passes(across) is None
    assert passes(prompts([0] * 4 + [1] * 4, [0, 0, 1, 1, 2, 2, 2, 2])) is None, "ranks of two groups and of one"
    assert passes(across, opob_scope="minibatch", staged=True, interleaved=True) == [[list(range(16))] * 2]


def test_one_group_per_pass_where_ranks_have_whole_groups() -> None:
    seen = prompts([0] * 4 + [1] * 4, [0, 1, 0, 1, 2, 2, 3, 3])
    apart, together = [[[0, 2], [0, 1]], [[1, 3], [2, 3]]], [[[0, 2, 1, 3], [0, 1, 2, 3]]]
    assert passes(seen, None, buffers=1) == passes(seen, 30, buffers=1) == apart
    assert passes(seen, None, buffers=2) == passes(seen, 40, buffers=3) == together


def test_a_group_is_sorted_by_reward() -> None:
    seen = prompts([0] * 4, [0, 0, 0, 0])
    seen.reward[:] = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert passes(seen) == [[[1, 3, 0, 2]]]


def test_micro_batches_by_tokens_need_sequences_on_every_rank() -> None:
    # the first two groups of rank 0 have 50 tokens: with micro-batches of 40 rank 0 may need one for each sequence
    uneven = prompts([0] * 6 + [1] * 6, [0, 0, 0, 1, 1, 4, 2, 2, 3, 3, 5, 5])
    for micro_batch_tokens, expected in ((40, [3, 3]), (60, [5, 1])):
        planned = passes(uneven, micro_batch_tokens, buffers=2)
        assert planned is not None and [len(rows) for rows, _ in planned] == expected
    uneven = prompts([0] * 4 + [1] * 4, [0, 0, 0, 1, 2, 3, 3, 3])
    assert [passes(uneven, tokens) is None for tokens in (None, 30, 20)] == [False, False, True]
    # the second groups alone: one rank has three sequences of 10 tokens, the other has one
    second = prompts([0] * 7 + [1] * 7, [0] * 4 + [1] * 3 + [2] * 6 + [3], [1] * 4 + [10] * 3 + [1] * 6 + [10])
    assert [passes(second, tokens) is None for tokens in (30, 25)] == [False, True]


def test_a_pass_has_no_more_sequences_than_the_host_handles_fast() -> None:
    seen = groups(16, 8, 20, 40)

    def sizes(tokens: int | None = 8192, **pipeline: bool) -> list[int]:
        return [len(rows) for (rows,) in passes(seen, tokens, **pipeline) or []]

    assert sizes() == [64, 64]
    assert sizes(tokens=None) == [128], "micro-batches by sequences"
    assert sizes(staged=True) == [128], "a pipeline"
    long = groups(16, 8, 100, 120)
    assert [len(rows) for (rows,) in passes(long, staged=True) or []] == [128], "a pipeline, whatever a cache holds"
    group = [0] * 33 + [1] * 33 + [2] * 2 + [3] * 31 + [4] * 31 + [5] * 6  # two groups of one rank are too many
    uneven = passes(prompts([0] * 68 + [1] * 68, group)) or []
    assert [list(map(len, rows)) for rows in uneven] == [[33, 31], [35, 37]]


def test_passes_of_several_groups() -> None:
    """Catches passes of many tokens on a CPU, whose activations leave the cache, and too many second buffers."""
    seen = groups(16, 4, 64, 256)
    lengths = [sum(seen.length[rows].tolist()) for (rows,) in passes(seen) or []]
    assert 2048 < max(lengths) <= 4096
    assert max(len(rows) for (rows,) in passes(seen, buffers=3) or []) <= 3 * 4
    for length, expected in ((1024, 1), (1025, 2)):  # too many tokens of one rank alone
        seen = prompts([0] * 4 + [1] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [length] * 4 + [10] * 4)
        assert len(passes(seen) or []) == expected


@pytest.mark.parametrize(("rows", "size"), [(5, 1), (6, 3), (8, 4)])
def test_a_micro_batch_divides_the_pass_and_is_no_larger_than_its_setting(rows: int, size: int) -> None:
    update, batch = object.__new__(PackedUpdate), make_batch(ONE_PROCESS)
    tu.assign_non_tensor(batch, micro_batch_size_per_gpu=4)
    update.data, update.facts = batch, prompts([0] * len(batch), [0] * len(batch))
    update.sequences = SimpleNamespace(mine=slice(None))  # type: ignore[assignment]
    part = update._select(Pass([list(range(1, rows + 1))], rank=0, size=len(batch)))
    assert tu.get_non_tensor_data(part, key="micro_batch_size_per_gpu", default=None) == size
    assert part["vcpo_row"].tolist() == list(range(rows))
    lengths = batch["input_ids"].offsets().diff()
    assert part["input_ids"].offsets().diff().tolist() == lengths[1 : rows + 1].tolist()


def test_memory_bounds_the_second_buffers(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    trained = sum(p.numel() for chunk in engine.module for p in chunk.parameters())
    assert engine.packing.second_buffers.most == SECOND_BUFFERS_BYTES // (4 * trained) > 1


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        ("untied", {}, 0),
        ("untied", {"norms": {"how": "two_backwards"}}, 1),
        ("moe", {}, 1),
        ("moe", {"opob_scope": "minibatch"}, 1),
    ],
    ids=str,
)
def test_an_update_says_whether_it_took_a_second_backward(
    make_engine: Callable[..., Any], model: str, settings: dict[str, Any], expected: int
) -> None:
    engine = make_engine(model)
    assert train(engine, make_batch(ONE_PROCESS), VCPOSettings(**settings))["vcpo/second_backwards"] == [expected]
    assert bool(engine.packing.second_buffers) == (not expected), "what is not needed is not allocated"
    linear = [layer for chunk in engine.module for layer in chunk.modules() if isinstance(layer, TappedLinear)]
    assert not any(layer.rows_of_experts for layer in linear), "the rows' numbers would stay in memory"


def test_gradients_are_finalized_once_and_by_megatrons_function_again_afterwards() -> None:
    made: list[Any] = []
    modules: list[Any] = [
        SimpleNamespace(config=SimpleNamespace(finalize_model_grads_func=made.append)) for _ in range(2)
    ]
    with packed._finalized_once(modules):
        for number in range(3):
            modules[number % 2].config.finalize_model_grads_func(number)
    assert made == [2], "the last call alone, with its arguments"
    assert all(module.config.finalize_model_grads_func == made.append for module in modules)
    with pytest.raises(ZeroDivisionError), packed._finalized_once(modules):
        raise ZeroDivisionError
    assert all(module.config.finalize_model_grads_func == made.append for module in modules)


def test_of_equally_common_rewards_the_one_nearest_to_the_groups_mean_is_taken() -> None:
    """The distance to the baseline is what is lost by rounding."""
    group = torch.tensor([0] * 5 + [1] * 5 + [2] * 3)
    rewards = torch.tensor([0, 1, 0, 1, 0.1, 0, 1, 0, 1, 0.9, 2, 3, 3])
    assert packed._commonest(rewards, group).tolist() == [0.0] * 5 + [1.0] * 5 + [3.0] * 3


def test_a_masked_sequence_counts_in_b_and_has_no_gradient() -> None:
    sequences = replace(
        prompts([0] * 4, [0, 0, 0, 0]),
        reward=torch.tensor([1.0, 0, 0, 0]).double(),
        masked=torch.tensor([False, True, False, False]),
        recorded=torch.tensor([True, True, True, False]),
    )
    one = SimpleNamespace(facts=sequences, config=VCPOSettings(norm_by_std=False))
    reward, common, scale = PackedUpdate._rewards.func(one)  # type: ignore[attr-defined]
    assert reward.tolist() == [1, 0, 0, 0] and common.tolist() == [0, 0, 0, 0]
    assert scale.tolist() == [1 / 3, 0, 1 / 3, 0]


def test_ranks_of_a_pass_with_different_numbers_of_sequences() -> None:
    """A rank's sequences are numbered after as many numbers as the largest rank has, for each rank before."""
    one = Pass([[4], [0, 2, 5]], rank=1, size=6)
    assert one.size == 6 and one.numbers.tolist() == [0, 3, 4, 5] and one.my_numbers.tolist() == [3, 4, 5]
    assert one.at.tolist() == [4, 6, 8, 11]
    assert Pass([[4], [0, 2, 5]], rank=0, size=6).my_numbers.tolist() == [0]


@pytest.mark.parametrize(
    ("settings", "most", "number"),
    [({"baseline": "mean"}, 0, 1), ({}, MANY, 1), ({}, 1, GROUPS), ({"enable": False}, 0, 1)],
)
def test_an_update_gathers_facts_once_and_what_each_pass_measures_once(
    settings: dict[str, Any], most: int, number: int, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives of ours; a method without norms taps no module."""
    engine, made = make_engine(), []
    for name in ("all_gather", "all_reduce"):
        of_torch = getattr(sequences.dist, name)
        counted = lambda *args, name=name, of_torch=of_torch, **more: (made.append(name), of_torch(*args, **more))  # noqa: E731
        monkeypatch.setattr(sequences, "dist", SimpleNamespace(**{**vars(sequences.dist), name: counted}))
    if most:
        engine.packing.second_buffers.most = most
    train(engine, make_batch(ONE_PROCESS), VCPOSettings(**settings))
    assert made == ["all_gather", *["all_reduce"] * number]
    assert any(isinstance(module, TappedLinear) for module in engine.module[0].modules()) == bool(most)


def test_a_pass_that_fails_leaves_no_collector(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine, "forward_backward_batch", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        train(engine, make_batch(ONE_PROCESS), VCPOSettings())
    assert engine.packing.tap.collector is None


@pytest.mark.parametrize(
    ("stages", "chunks", "given", "tokens"),
    [(1, None, {}, 60), (1, None, {"use_dynamic_bsz": False}, None), (2, 2, {"use_dynamic_bsz": True}, 60)],
)
def test_passes_are_planned_for_the_whole_of_a_context_parallel_micro_batch(
    stages: int, chunks: int | None, given: dict[str, bool], tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's default is micro-batches by tokens; of two context-parallel ranks each has half of the tokens."""
    planned: list[tuple[Any, ...]] = []
    monkeypatch.setattr(packed, "passes_of_sums", lambda *args, **pipeline: planned.append((*args, pipeline)))
    for size, value in (("context", 2), ("pipeline_model", stages), ("virtual_pipeline_model", chunks)):
        monkeypatch.setattr(packed.mpu, f"get_{size}_parallel_world_size", lambda value=value: value)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.main_grad = torch.zeros(1)  # type: ignore[attr-defined]
    frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    one: Any = SimpleNamespace(
        engine=SimpleNamespace(
            tf_config=SimpleNamespace(num_moe_experts=None),
            module=[torch.nn.ParameterList([frozen, parameter])],
        ),
        second=SecondBuffers(most=3),
        data=tu.get_tensordict({"row": torch.arange(2)}, {"max_token_len_per_gpu": 30, **given}),
        config="config",
        facts="facts",
    )
    PackedUpdate._passes_of_sums(one)
    assert planned == [("config", "facts", tokens, 3, {"staged": stages > 1, "interleaved": chunks is not None})]
    parameter.main_grad = torch.zeros(1, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    assert PackedUpdate._passes_of_sums(one) is None and len(planned) == 1, "sums need float32"


@pytest.mark.parametrize(("scope", "shifts"), [("group", [1.5, -2.0]), ("minibatch", [4.0])])
def test_a_rank_subtracts_the_baselines_of_its_own_groups(scope: str, shifts: list[float]) -> None:
    """Two ranks of two groups: the slots of rank 0's groups are also those of rank 1's, whose baselines are others.

    A sequence that is not usable has a baseline of no meaning, though it is first in its slot. At scope `minibatch` the
    usable sequence may be another rank's.
    """
    taken: list[list[float]] = []
    one: Any = object.__new__(PackedUpdate)
    one.config, one.sequences = VCPOSettings(opob_scope=scope), SimpleNamespace(rank=1)
    usable = torch.tensor([True, True, True, False, True, True])
    one.facts = replace(prompts([0] * 3 + [1] * 3, [0, 0, 1, 2, 2, 3]), recorded=usable)
    baseline = torch.tensor([5.0, 5, 9, 77, 2, -1])
    batch: Any = SimpleNamespace(
        estimate=lambda _: SimpleNamespace(baseline=baseline), usable=usable, rank=one.facts.rank
    )
    common = torch.tensor([1.0, 1, 1, 0, 0.5, 1])
    one.__dict__["_rewards"] = (torch.zeros(6), common, torch.zeros(6))
    rows = Pass([[0, 1, 2]] * 2, rank=1, size=3)
    slot = one._slot(rows)
    assert slot.tolist() == ([0, 0, 1] * 2 if scope == "group" else [0] * 6)
    one._combine(rows, batch, SimpleNamespace(slot=slot, slots=len(shifts), subtract=taken.append))
    assert taken == [shifts]
    one.passes = [Pass([[0], [0]], rank=1, size=3), rows]
    assert one._slots == len(shifts), "of the pass with the most groups"


def test_second_buffers_are_made_once_and_grow(make_engine: Callable[..., Any]) -> None:
    chunks = make_engine().module
    second = SecondBuffers()
    make_room(second, chunks, 2)
    trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    assert set(second) == set(trained)
    assert all(second[p].shape == (2, *p.shape) and second[p].dtype == torch.float32 for p in trained)
    before = dict(second)
    for slots in (1, 2):
        make_room(second, chunks, slots)
        assert all(second[p] is before[p] for p in trained)
    make_room(second, chunks, 3)
    assert all(len(second[p]) == 3 for p in trained)


@pytest.mark.parametrize(
    ("log_weight", "squared_norm", "usable", "raises"),
    [
        (0.0, 1.0, True, False),
        (math.nan, 1.0, True, True),
        (0.0, math.inf, True, True),
        (math.nan, 1.0, False, False),
        (0.0, math.inf, False, True),
    ],
)
def test_a_usable_sequence_has_a_weight_and_a_norm(
    log_weight: float, squared_norm: float, usable: bool, raises: bool
) -> None:
    """A norm that is not finite spoils the gradient of all sequences, whether its own is used or not."""
    of_second = {"usable": usable, "log_weight": log_weight, "squared_norm": squared_norm}
    batch: Any = SimpleNamespace(**{name: torch.tensor([type(x)(1), x]) for name, x in of_second.items()})
    with pytest.raises(packed.Unmeasured) if raises else contextlib.nullcontext():
        packed._check_finite(batch)
