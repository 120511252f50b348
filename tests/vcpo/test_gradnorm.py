"""Norms and weighted sums of per-sequence gradients, against one autograd gradient per sequence."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from vcpo.gradnorm import (
    Segments,
    WeightedSums,
    add_rows,
    embedding_squared_norms,
    linear,
    sequence_sums,
    squared_norms,
    sums,
    tied_rows,
)

LENGTHS = [[1], [3, 1, 7], [5, 0, 2, 2, 9], [40, 41, 2, 90]]


def tokens(lengths: list[int], *sizes: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(lengths), size, generator=generator) for size in sizes]


def per_sequence_gradients(x: torch.Tensor, dy: torch.Tensor, segments: Segments) -> torch.Tensor:
    """[n, out, in] by autograd: gradients of sum(dy * linear(x)) over each sequence's tokens."""
    mine = F.one_hot(segments.sequence, len(segments)).T.to(x)  # [n, T]

    def of_sequence(weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (F.linear(x, weight) * dy * mask[:, None]).sum()

    return vmap(grad(of_sequence), in_dims=(None, 0))(torch.zeros(dy.shape[1], x.shape[1]), mine)


@pytest.mark.parametrize(("batched", "products"), [(False, 0), (True, 0), (True, 1)])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 12), (300, 200), (64, 5)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_linear(
    lengths: list[int], inputs: int, outputs: int, batched: bool, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a wrong norm or sum in each form; with `products` all sequences but the shortest have a product."""
    if products:
        monkeypatch.setattr(sums, "_OPERATIONS", 1e-6)
    segments = Segments.of_lengths(lengths)
    x, dy = tokens(lengths, inputs, outputs)
    each = per_sequence_gradients(x, dy, segments)
    norms = each.square().sum((1, 2))
    torch.testing.assert_close(squared_norms(x, dy, segments, batched=batched), norms, rtol=1e-5, atol=0)

    coefficient = torch.randn(2, len(lengths))
    start = torch.randn(2, outputs, inputs)
    expected = start + torch.einsum("kn,noi->koi", coefficient, each)
    buffers = [buffer.clone() for buffer in start]
    got = torch.zeros(len(lengths))
    WeightedSums(segments, coefficient.tolist()).add(x, dy, buffers, got, batched=batched)
    torch.testing.assert_close(got, norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.stack(buffers), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("batched", "products"), [(False, 0), (True, 0), (True, 1)])
def test_sums_in_bfloat16_keep_what_sequences_do_not_share(
    batched: bool, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches products and squares that are rounded to bfloat16: the sum is 0.02 of its parts."""
    if products:
        monkeypatch.setattr(sums, "_OPERATIONS", 1e-6)
    segments = Segments.of_lengths([6] * 4)
    x, dy = ((rows[:6].repeat(4, 1) + 0.02 * rows).bfloat16() for rows in tokens([6] * 4, 16, 300))
    each = torch.einsum("nto,nti->noi", *(rows.double().view(4, 6, -1) for rows in (dy, x)))
    into, norms = torch.zeros(300, 16), torch.zeros(4)
    WeightedSums(segments, [[1.0, -1.0, -1.0, 1.0]]).add(x, dy, [into], norms, batched=batched)
    expected = each[0] - each[1] - each[2] + each[3]
    assert (into - expected).norm() < 1e-5 * expected.norm() < 1e-6 * each.norm()
    gram = batched and not products
    torch.testing.assert_close(norms.double(), each.square().sum((1, 2)), rtol=5e-3 if gram else 1e-6, atol=0)


@pytest.mark.parametrize("memory", [1, 18, 130])
def test_a_weight_is_taken_in_blocks_of_rows(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 rows in blocks of 3, 3 and 2 of one sequence; in 130 bytes in blocks of 4 rows of two sequences."""
    monkeypatch.setattr(linear, "_FEWEST_ROWS", 3)
    monkeypatch.setattr(linear, "_CPU_BYTES", memory)
    lengths = [3, 5, 2]
    segments = Segments.of_lengths(lengths)
    x, dy = tokens(lengths, 4, 8)
    each, coefficient, into = per_sequence_gradients(x, dy, segments), torch.randn(1, 3), torch.zeros(1, 8, 4)
    norms = linear.add_weighted_per_sequence(x, dy, segments, coefficient, [into[0]], [(0, 3)])
    torch.testing.assert_close(norms, each.square().sum((1, 2)), rtol=1e-5, atol=0)
    torch.testing.assert_close(into, torch.einsum("kn,noi->koi", coefficient, each))


class Rows:
    """What tells where rows are."""

    def __init__(self, is_cuda: bool, size: int) -> None:
        self.is_cuda, self.element_size = is_cuda, lambda: size


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([Rows(True, 2), Rows(True, 2)], True),
        ([Rows(True, 2), Rows(True, 4)], False),
        ([Rows(True, 4), Rows(True, 2)], False),
        ([Rows(False, 2), Rows(False, 2)], False),
    ],
)
def test_the_kernel_takes_half_precision_on_a_gpu(
    rows: list[Rows], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows of float32, which it would multiply in fewer bits, and rows on a CPU."""
    monkeypatch.setattr(linear, "_with_triton", lambda: linear)
    assert (linear.kernel(*rows) is linear) is expected


def test_the_kernel_gets_each_choice_of_sequences_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches padded products beside the kernel, and tiles that every layer makes again."""
    made = []

    class Kernel:
        class Tiles:
            def __init__(self, segments: Segments, some: tuple[int, ...]) -> None:
                made.append(some)

            def add_norms(self, x: torch.Tensor, dy: torch.Tensor, norms: torch.Tensor) -> None:
                norms += x.sum() + dy.sum()

    monkeypatch.setattr(linear, "kernel", lambda *rows: Kernel)
    segments, norms = Segments.of_lengths([2, 1]), torch.zeros(2)
    for some in ((0, 1), (1,), (0, 1)):
        linear.add_gram_norms(torch.ones(3, 2), torch.ones(3, 4), segments, some, norms)
    assert made == [(0, 1), (1,)]
    assert norms.tolist() == [54.0, 54.0]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_rows_of_equal_numbers_add_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a row that takes the place of an earlier one, in index_put_ on a GPU and in index_add_ on a CPU."""

    class Into(torch.Tensor):
        def index_add_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            assert device == "cpu", "a GPU adds in another order in each run"
            return super().index_add_(*args, **kwargs)

    monkeypatch.setattr("vcpo.gradnorm.segments.batches", lambda into: device == "gpu")
    into = torch.ones(3, 2).as_subclass(Into)
    add_rows(into, torch.tensor([2, 0, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert into.tolist() == [[4.0, 5.0], [1.0, 1.0], [7.0, 9.0]]


@pytest.mark.parametrize("batched", [False, True])
def test_sequences_without_a_coefficient_are_left_out(batched: bool) -> None:
    """Catches a buffer that is given sequences that have no coefficient for it, or fewer than have one."""
    lengths = [5, 9, 2, 7, 4, 6, 3]
    segments = Segments.of_lengths(lengths)
    x, dy = tokens(lengths, 16, 24)
    each = per_sequence_gradients(x, dy, segments)
    coefficient = torch.zeros(5, len(lengths))
    spans = [(0, 7), (0, 3), (3, 7), (2, 6), (7, 0)]  # a block on a CPU has four sequences
    for row, (first, end) in zip(coefficient, spans, strict=True):
        row[first:end] = torch.rand(max(0, end - first))
    buffers = list(torch.zeros(5, 24, 16))
    norms = torch.zeros(len(segments))
    WeightedSums(segments, coefficient.tolist()).add(x, dy, buffers, norms, batched=batched)
    torch.testing.assert_close(norms, each.square().sum((1, 2)), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.stack(buffers), torch.einsum("kn,noi->koi", coefficient, each))


@pytest.mark.parametrize("batched", [False, True])
def test_wide_buffers_take_narrow_products(batched: bool) -> None:
    segments = Segments.of_lengths([30, 17])
    x, dy = (t.bfloat16() for t in tokens([30, 17], 16, 24))
    each = per_sequence_gradients(x.float(), dy.float(), segments)
    coefficient = torch.tensor([[0.5, -2.0]])
    expected = torch.einsum("n,noi->oi", coefficient[0], each)
    buffers = [torch.zeros(24, 16)]
    norms = torch.zeros(len(segments))
    WeightedSums(segments, coefficient.tolist()).add(x, dy, buffers, norms, batched=batched)
    torch.testing.assert_close(norms, each.square().sum((1, 2)), rtol=1e-2, atol=0)
    assert (buffers[0] - expected).abs().max() < 1e-2 * expected.abs().max()
    torch.testing.assert_close(
        squared_norms(x, dy, segments, batched=batched), each.square().sum((1, 2)), rtol=1e-2, atol=0
    )


def test_narrow_gradients_of_vectors_and_tables_add_up_in_float32() -> None:
    segments = Segments.of_lengths([300, 2])
    ones = torch.ones(302, 1, dtype=torch.bfloat16)  # which has no 257
    assert sequence_sums(ones, segments.sequence, 2).tolist() == [[300.0], [2.0]]
    assert embedding_squared_norms(torch.zeros(302, dtype=torch.long), ones, segments).tolist() == [90_000.0, 4.0]


@pytest.mark.parametrize("batched", [False, True])
def test_narrow_buffers_take_sums_with_wide_coefficients(batched: bool) -> None:
    segments, (x, dy) = Segments.of_lengths([30, 17]), tokens([30, 17], 16, 24)
    expected = torch.einsum("n,noi->oi", torch.tensor([0.5, -2.0]), per_sequence_gradients(x, dy, segments))
    buffer = torch.zeros(24, 16, dtype=torch.bfloat16)
    WeightedSums(segments, [[0.5, -2.0]]).add(x, dy, [buffer], torch.zeros(2), batched=batched)
    torch.testing.assert_close(buffer.float(), expected, rtol=1e-2, atol=0.1)


def test_vectors() -> None:
    lengths = [5, 0, 2, 9]
    segments = Segments.of_lengths(lengths)
    (value,) = tokens(lengths, 6)
    expected = torch.stack([part.sum(0) for part in value.split(lengths)])
    torch.testing.assert_close(sequence_sums(value, segments.sequence, 4), expected)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5), vocabulary=st.integers(1, 9), shards=st.integers(1, 2)
)
def test_embedding_and_head_that_share_a_table(lengths: list[int], vocabulary: int, shards: int) -> None:
    segments, vocabulary = Segments.of_lengths(lengths), vocabulary * shards
    e, x, dy = tokens(lengths, 4, 4, vocabulary)
    token = torch.randint(vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    head = per_sequence_gradients(x, dy, segments)  # [n, V, 4]
    embedding = torch.stack(
        [
            torch.zeros(vocabulary, 4).index_add_(0, t, v)
            for t, v in zip(token.split(lengths), e.split(lengths), strict=True)
        ]
    )
    torch.testing.assert_close(
        embedding_squared_norms(token, e, segments), embedding.square().sum((1, 2)), rtol=1e-5, atol=1e-6
    )
    cross, size = torch.zeros(len(lengths)), vocabulary // shards
    for shard in range(shards):
        local = torch.where((token >= shard * size) & (token < (shard + 1) * size), token - shard * size, -1)
        rows = tied_rows(local, x, dy[:, shard * size : (shard + 1) * size], segments)
        cross += sequence_sums((rows * e).sum(1, keepdim=True), segments.sequence, len(lengths))[:, 0]
    torch.testing.assert_close(cross, (head * embedding).sum((1, 2)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batched", [False, True])
def test_two_sums_of_narrow_products_cancel_as_their_coefficients_do(batched: bool) -> None:
    lengths = [30, 17]
    segments = Segments.of_lengths(lengths)
    x, dy = tokens(lengths, 16, 24)
    dy[:30] *= 1e4  # a dominating weight
    x, dy = x.bfloat16(), dy.bfloat16()
    coefficient = torch.tensor([[0.3, -0.7], [1.1, 1.1]])
    buffers = [torch.zeros(24, 16), torch.zeros(24, 16)]
    WeightedSums(segments, coefficient.tolist()).add(x, dy, buffers, torch.zeros(2), batched=batched)
    shift = coefficient[0, 0] / coefficient[1, 0]  # leaves nothing of the first sequence
    each = torch.stack([b.T @ a for a, b in zip(x.split(lengths), dy.split(lengths), strict=True)]).float()
    expected = (coefficient[0, 1] - shift * coefficient[1, 1]) * each[1]
    lost = 1e-6 * each[0].abs().max()
    assert (buffers[0] - shift * buffers[1].float() - expected).abs().max() <= lost


def test_equal_coefficients_share_a_product_and_long_sequences_have_their_own() -> None:
    """Catches a GPU's form that makes a product for each sequence, or one for each buffer."""
    lengths = [60, 3000, 50, 70, 40, 80]
    segments = Segments.of_lengths(lengths, "meta")
    x, dy = (torch.empty(sum(lengths), size, device="meta") for size in (640, 960))
    ones, rewards = [1.0] * 6, [1.0, 1.0, 0.0, 0.0, 1.0, 0.5]
    with FlopCounterMode(display=False) as counter:
        into = [torch.empty(960, 640, device="meta") for _ in range(2)]
        WeightedSums(segments, [rewards, ones]).add(x, dy, into, torch.empty(6, device="meta"))
    products = 2 * sum(lengths) * 640 * 960
    pairs = sum(n * longest**2 for n, longest in buckets_of(segments, [0, 2, 3, 4, 5]))
    assert counter.get_total_flops() == products + 2 * pairs * (640 + 960)


def test_a_product_of_its_own_pays_from_a_length_on() -> None:
    """2 n^2 (64 + 32) operations are more than 2,250 (64 * 32 + 6,000,000) from n = 8,387 on."""
    weighted = WeightedSums(Segments.of_lengths([8386, 8387], "meta"), [])
    x, dy, norms = (torch.empty(*size, device="meta") for size in ((8386 + 8387, 64), (8386 + 8387, 32), (2,)))
    weighted.add(x, dy, [], norms)
    assert list(weighted._shared) == [(1,)]


@pytest.mark.parametrize("batched", [False, True])
def test_sequences_of_equal_coefficients_need_not_stand_together(batched: bool) -> None:
    lengths = [3, 2, 4, 1, 5]
    segments = Segments.of_lengths(lengths)
    x, dy = tokens(lengths, 6, 4)
    coefficient, into = torch.tensor([[1.0, 0.5, 1.0, 0.5, 1.0]]), torch.zeros(1, 4, 6)
    WeightedSums(segments, coefficient.tolist()).add(x, dy, [into[0]], torch.zeros(5), batched=batched)
    expected = torch.einsum("kn,noi->koi", coefficient, per_sequence_gradients(x, dy, segments))
    torch.testing.assert_close(into, expected, rtol=1e-5, atol=1e-5)


def buckets_of(segments: Segments, some: list[int]) -> list[tuple[int, int]]:
    return [(len(bucket), bucket.longest) for bucket in segments.padded(tuple(some)).buckets]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10] * 5, [(5, 10)]),
        ([20] * 3 + [10] * 10 + [1] * 100, [(3, 20), (10, 10), (100, 1)]),
        ([9, 9, 8], [(3, 9)]),
    ],
)
def test_a_bucket_is_split_where_most_pairs_are_spared(lengths: list[int], expected: list[tuple[int, int]]) -> None:
    assert buckets_of(Segments.of_lengths(lengths), list(range(len(lengths)))) == expected


def test_a_single_sequence_is_a_slice_of_its_own_rows() -> None:
    assert Segments.of_lengths([2, 3, 4]).padded((1,)).tokens == slice(2, 5)


@given(lengths=st.lists(st.integers(0, 400), max_size=40))
def test_buckets_hold_every_sequence_once_and_pad_little(lengths: list[int]) -> None:
    segments = Segments.of_lengths(lengths)
    buckets = segments.padded(tuple(range(len(lengths)))).buckets
    held = [int(i) for bucket in buckets for i in bucket.sequences]
    assert sorted(held) == [i for i, length in enumerate(lengths) if length]
    assert len(buckets) <= 3
    for bucket in buckets:
        assert bucket.longest == max(lengths[i] for i in bucket.sequences)
    if 0 < len(buckets) < 3:
        for bucket in buckets:  # no split would spare a seventh of all pairs
            own = sorted((lengths[i] for i in bucket.sequences), reverse=True)
            best = max((len(own) - at) * (own[0] ** 2 - own[at] ** 2) for at in range(len(own)))
            assert best <= 0.14 * sum(n * longest**2 for n, longest in buckets_of(segments, list(range(len(lengths)))))
