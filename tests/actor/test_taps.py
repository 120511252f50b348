"""What layers give to the collector where no layout shows it: test_layouts.py has several ranks."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_vcpo.actor.taps import tapping
from verl_vcpo.actor.taps.collector import Collector
from verl_vcpo.actor.taps.experts import TappedRouter
from verl_vcpo.actor.taps.modules import Tap, Tapped, TappedLinear, TappedNorm


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


class Linear:
    """Megatron's layer without a collector."""

    def _forward_impl(self, **settings: Any) -> str:
        return "Megatron's"


class OneLinear(TappedLinear, Linear):
    pass


def test_layers_know_whether_they_are_the_head_or_a_norm_of_heads(make_engine: Callable[..., Any]) -> None:
    engine = make_engine("qk_norms")
    assert engine.packing.unpackable is None
    named = [each for chunk in engine.module for each in chunk.named_modules()]
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


def test_a_backward_outside_the_packed_update_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="outside the packed update"):
        Collector.current(SimpleNamespace(micro_batch=None))  # type: ignore[arg-type]
