"""What one rank of several gives to the collector and takes from other ranks, without other processes."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vcpo.gradnorm import Segments
from verl_vcpo.actor.norms import collector, modules, tapping
from verl_vcpo.actor.norms.collector import Collector
from verl_vcpo.actor.norms.experts import TappedRouter
from verl_vcpo.actor.norms.modules import Tap, Tapped, TappedLinear, TappedNorm, VocabParallelEmbedding


class Taken:
    """A collector that notes what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def _take(self, *args: Any, **settings: Any) -> None:
        self.given.append((args, settings))

    embedding = linear = router = vector = _take


def tap() -> tuple[Tap, Taken]:
    made, taken = Tap(), Taken()
    made.collector = taken  # type: ignore[assignment]
    return made, taken


@pytest.mark.parametrize("scattered", [False, True])
def test_an_embedding_gives_the_rows_of_this_ranks_part_of_the_vocabulary(
    scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank of three has the tokens 4 to 7; the rows of other tokens are 0, and are given as -1."""
    layer = object.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.arange(1.0, 9.0).view(4, 2))
    layer.vocab_start_index, layer.vocab_end_index = 4, 8
    layer.reduce_scatter_embeddings, layer.tp_group = scattered, "ranks"
    layer.tap, taken = tap()

    def summed(rows: Tensor, group: str) -> Tensor:
        assert group == "ranks"
        return 10 * rows

    monkeypatch.setattr(modules, "reduce_from_tensor_model_parallel_region", summed)
    monkeypatch.setattr(modules, "reduce_scatter_to_sequence_parallel_region", summed)
    output = layer(torch.tensor([[3, 4, 8], [7, 0, 11]]))
    expected = torch.tensor([[[0.0, 0], [10, 20], [0, 0]], [[70, 80], [0, 0], [0, 0]]])
    assert output.equal(expected.transpose(0, 1) if scattered else expected)
    gradient = torch.arange(12.0).view(2, 3, 2)
    output.backward(gradient.transpose(0, 1) if scattered else gradient)
    [((weight, token, dy), settings)] = taken.given
    assert weight is layer.weight and weight.grad is None and not settings
    assert token.tolist() == [[-1, 0, -1], [3, -1, -1]]
    assert dy.equal(10 * gradient)


class Linear:
    """Megatron's layer without a collector."""

    def _forward_impl(self, **settings: Any) -> str:
        return "Megatron's"


class OneLinear(TappedLinear, Linear):
    pass


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_layer_says_over_which_ranks_the_rows_of_its_inputs_are_spread(
    spread: bool, trained_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the output is given also where no parameter before the layer is trained."""
    calls: list[dict[str, Any]] = []

    def product(input: Tensor, weight: Tensor, bias: Tensor, **settings: Any) -> Tensor:
        assert not weight.requires_grad and not bias.requires_grad
        calls.append(settings)
        return input @ weight.T + bias

    monkeypatch.setattr(modules.layers, "linear_with_frozen_weight", product)
    layer, weight, bias = OneLinear(), torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3))
    layer.tap, taken = tap()
    settings = {"sequence_parallel": spread, "tp_group": "ranks"}
    x = torch.arange(4.0).view(2, 2).requires_grad_(trained_before)
    output = layer._forward_impl(x, weight, bias, **settings)
    output.sum().backward()
    [((given, of_bias, inputs, dy), rest)] = taken.given
    assert given is weight and of_bias is bias and inputs.equal(x) and dy.equal(torch.ones(2, 3))
    assert rest == {"gather": "ranks" if spread else None, "head": False} and calls == [settings]
    assert layer._forward_impl(x, weight.detach(), None, **settings) == "Megatron's", "a frozen weight"
    with torch.no_grad():
        assert layer._forward_impl(x, weight, None, **settings) == "Megatron's", "no backward follows"
    layer.tap.collector = None
    assert layer._forward_impl(x, weight, None, **settings) == "Megatron's"


def test_the_last_stage_sends_its_part_of_the_cross_terms_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 <dE_i, dH_i> of a tied weight, in two micro-batches, which the last stage ends in the order of their start."""
    sent: list[tuple[Tensor, int]] = []
    here: dict[str, Any] = {"rank": 7, "in group": True}

    def receive(rows: Tensor, source: int) -> None:
        assert source == 7 and rows.dtype == torch.float32
        rows.copy_(sent.pop(0)[0])

    monkeypatch.setattr(collector.mpu, "get_pipeline_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(collector.mpu, "is_rank_in_embedding_group", lambda: here["in group"])
    monkeypatch.setattr(collector.mpu, "get_embedding_group", lambda: None)
    monkeypatch.setattr(collector.dist, "get_process_group_ranks", lambda group: [4, 7])
    monkeypatch.setattr(collector.dist, "get_rank", lambda: here["rank"])
    monkeypatch.setattr(collector.dist, "send", lambda rows, to: sent.append((rows, to)))
    monkeypatch.setattr(collector.dist, "recv", receive)
    batches = [SimpleNamespace(whole=Segments.of_lengths([1, 2], "cpu"), rows=torch.arange(2)) for _ in range(2)]
    head = [torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([[1.0, 0], [0, 1], [1, 1]])]
    embedding = [torch.ones(3, 2, dtype=torch.bfloat16), 2 * torch.ones(3, 2, dtype=torch.bfloat16)]
    norms = [torch.zeros(2) for _ in batches]

    def stage(**cross: list[Tensor]) -> Any:
        parts = {name: list(zip(batches, rows, strict=True)) if rows else [] for name, rows in cross.items()}
        of_batch = dict(zip(map(id, batches), norms, strict=True))
        return SimpleNamespace(_cross=parts, _norms_of=lambda batch: of_batch[id(batch)])

    Collector._add_cross_terms(stage(head=head, embedding=[]))
    assert [to for _, to in sent] == [4, 4]
    here["rank"] = 4
    Collector._add_cross_terms(stage(head=[], embedding=embedding))
    wanted = [[6.0, 36.0], [4.0, 12.0]]
    assert [each.tolist() for each in norms] == wanted and not sent
    here["in group"] = False
    Collector._add_cross_terms(stage(head=[], embedding=[]))
    monkeypatch.setattr(collector.mpu, "get_pipeline_model_parallel_world_size", lambda: 1)
    Collector._add_cross_terms(stage(head=head, embedding=embedding))
    assert [each.tolist() for each in norms] == [[2 * value for value in values] for values in wanted], "one stage"


def test_layers_know_whether_they_are_the_head_or_a_norm_of_heads(make_engine: Callable[..., Any]) -> None:
    named = [each for chunk in make_engine("qk_norms").module for each in chunk.named_modules()]
    heads = {name.split(".")[-1] for name, layer in named if isinstance(layer, TappedLinear) and layer.is_head}
    norms = {name.split(".")[-1]: layer.heads for name, layer in named if isinstance(layer, TappedNorm)}
    assert heads == {"output_layer"} and {name for name in norms if norms[name]} == {"q_layernorm", "k_layernorm"}
    assert {"input_layernorm", "final_layernorm"} < set(norms)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_router_says_over_which_ranks_its_rows_are_spread_and_computes_in_its_format(
    spread: bool, trained_before: bool
) -> None:
    router: Any = object.__new__(TappedRouter)
    torch.nn.Module.__init__(router)
    router.weight = torch.nn.Parameter(torch.tensor([[1.0, 2], [3, 4]], dtype=torch.bfloat16))
    router.config = SimpleNamespace(moe_router_dtype="fp32", sequence_parallel=spread)
    router.tp_group = "ranks"
    router.tap, taken = tap()
    x = torch.tensor([[1.0, 1]], dtype=torch.bfloat16, requires_grad=trained_before)
    logits = router.gating(x)
    assert logits.dtype == torch.float32 and logits.tolist() == [[3, 7]]
    logits.sum().backward()
    [((weight, inputs, dy), settings)] = taken.given
    assert weight is router.weight and weight.grad is None and inputs.equal(x) and dy.tolist() == [[1, 1]]
    assert settings == {"gather": "ranks" if spread else None}


class Norm(TappedNorm, torch.nn.RMSNorm):
    pass


@pytest.mark.parametrize(
    ("heads", "spread", "summed"), [(False, False, False), (True, False, True), (False, True, True)]
)
@pytest.mark.parametrize("trained_before", [False, True])
def test_which_norms_have_the_gradient_of_some_heads_or_tokens_alone(
    heads: bool, spread: bool, summed: bool, trained_before: bool
) -> None:
    norm = Norm(2)
    norm.heads, norm.weight.sequence_parallel = heads, spread  # type: ignore[attr-defined]
    norm.tap, taken = tap()
    norm(torch.tensor([[1.0, 7.0]], requires_grad=trained_before)).sum().backward()
    [((weight, per_token), settings)] = taken.given
    assert weight is norm.weight and weight.grad is None and settings == {"summed_over_tp": summed}
    assert per_token.tolist() == [pytest.approx([0.2, 1.4])]


def test_a_parameter_below_a_tapped_layer_is_tapped_only_by_a_layer_of_its_own() -> None:
    """A mixture of experts is tapped, and its experts are layers below it."""
    mixture = type("Mixture", (Tapped, torch.nn.Module), {})()
    mixture.weight = torch.nn.Parameter(torch.ones(1))
    chunk = torch.nn.ModuleDict({"mixture": mixture})
    assert tapping._left_over([chunk]) is None
    mixture.expert = torch.nn.Linear(1, 1, bias=False)
    assert tapping._left_over([chunk]) == "mixture.expert.weight belongs to a torch.nn.modules.linear.Linear"
    mixture.expert.weight.requires_grad = False
    assert tapping._left_over([chunk]) is None


def embedding_norms(tied: bool, context_rank: int) -> tuple[Tensor, list[Any]]:
    """The norms of two sequences of 2 and 1 tokens, and what is kept for the cross terms."""
    norms = torch.zeros(2)
    one = SimpleNamespace(whole=Segments.of_lengths([2, 1], "cpu"), gathered=lambda rows: rows)
    ours: Any = SimpleNamespace(current=lambda: one, _sums=None, _cp_rank=context_rank, tied=tied)
    ours._norms_of, ours._cross = lambda batch: norms, {"embedding": []}
    dy = torch.tensor([[[1.0, 2], [3, 4], [5, 6]]])
    Collector.embedding(ours, torch.zeros(4, 2), torch.tensor([[-1, 0, 3]]), dy)
    return norms, ours._cross["embedding"]


def test_an_embeddings_gradient_is_that_of_this_ranks_rows() -> None:
    """The first context-parallel rank squares it; all ranks keep it for the cross terms of a tied weight."""
    norms, kept = embedding_norms(tied=False, context_rank=0)
    assert norms.tolist() == [25.0, 61.0] and not kept
    norms, kept = embedding_norms(tied=True, context_rank=1)
    assert norms.tolist() == [0.0, 0.0] and kept[0][1].tolist() == [[0, 0], [3, 4], [5, 6]]


def test_a_layer_is_no_output_layer_unless_it_says_so_and_its_bias_is_this_ranks_part() -> None:
    asked: list[Any] = []
    one: Any = SimpleNamespace(flat=lambda rows: rows, gathered=lambda rows: rows, sums=lambda rows, dy: rows.sum(0))
    ours: Any = SimpleNamespace(current=lambda: one, tied=True, _cp_rank=0, _cp=1, _weight=lambda *args: None)
    ours._tied_head, ours._vectors = lambda *args: asked.append(args), []
    ours.vector = partial(Collector.vector, ours)
    weight, bias, x, dy = torch.ones(2, 3), torch.ones(2), torch.ones(4, 1, 3), torch.ones(4, 1, 2)
    Collector.linear(ours, weight, None, x, dy)
    assert not asked and not ours._vectors
    Collector.linear(ours, weight, bias, x, dy, head=True)
    assert len(asked) == 1
    [vector] = ours._vectors
    assert vector.parameter is bias and vector.sharded and not vector.summed_over_tp
    assert vector.sums.tolist() == [4.0, 4.0]


def test_megatrons_own_layers_are_tapped_beside_an_installed_transformer_engine(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tapping, "HAVE_TE", True)
    made = tapping.plug_in(make_engine().module)
    assert made.layers == "Megatron's own layers" and made.untapped is None


def test_attention_of_transformer_engine_makes_no_layers_of_it() -> None:
    """Megatron's own layers take it too; it has no parameters."""
    kind = type("Attention", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch.attention"})
    attention, layer = kind(), kind()
    layer.weight = torch.nn.Parameter(torch.ones(1))
    assert not tapping._is_of_te(attention) and tapping._is_of_te(layer)
    assert not tapping._is_of_te(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("tensor_rank", "context_rank", "context", "wanted"),
    [(0, 0, 1, [50.0, 238.0]), (1, 0, 1, [16.0, 100.0]), (0, 0, 2, [200.0, 952.0]), (0, 1, 2, [0.0, 0.0])],
)
def test_one_of_the_ranks_with_the_same_vectors_squares_them(
    tensor_rank: int, context_rank: int, context: int, wanted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vector that all tensor-parallel ranks have alike, two of which each has a part, one to be summed over them.

    The other rank's numbers are the same here, so a sum over two ranks is twice a rank's.
    """
    monkeypatch.setattr(collector.mpu, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    for name in ("tensor_model", "context"):
        monkeypatch.setattr(collector.mpu, f"get_{name}_parallel_group", lambda name=name: name)
    groups: list[str] = []

    def summed(tensors: list[Tensor], group: str) -> list[Tensor]:
        groups.append(group)
        return [2 * tensor for tensor in tensors]

    monkeypatch.setattr(collector, "_summed", summed)
    norms = torch.zeros(2)
    ours: Any = SimpleNamespace(_tp=2, _cp=context, _cp_rank=context_rank, _norms_of=lambda micro_batch: norms)
    ours._vectors = [
        collector._Vector(torch.ones(1), one, torch.tensor(values)[:, None], summed_over_tp, sharded)
        for one in [SimpleNamespace()]
        for values, summed_over_tp, sharded in (
            ([3.0, 7.0], False, False),
            ([4.0, 8.0], False, True),
            ([0.0, 6.0], False, True),
            ([2.5, math.sqrt(89) / 2], True, False),
        )
    ]
    Collector._square_vectors(ours)
    assert norms.tolist() == pytest.approx(wanted)
    assert groups.count("tensor_model") == 1, "for the vectors summed over these ranks alone"


def test_a_backward_outside_the_packed_update_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="outside the packed update"):
        Collector.current(SimpleNamespace(micro_batch=None))  # type: ignore[arg-type]
