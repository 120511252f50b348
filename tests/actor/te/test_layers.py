"""Single layers of Transformer Engine, tapped, against one backward per sequence."""

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch import Tensor

from tests.actor.te.oracle import TOKENS, Errors, errors, own_gradients
from vcpo.gradnorm import Segments
from verl_vcpo.actor.taps import te_modules
from verl_vcpo.actor.taps.layout import MicroBatch
from verl_vcpo.actor.taps.modules import Tap

TOLERANCE = 1e-5
INPUTS, OUTPUTS = 48, 80
KINDS: dict[str, dict[str, Any]] = {
    "linear": dict(bias=True),
    "linear, fused accumulation": dict(bias=False, fuse_wgrad_accumulation=True),
    "norm and linear": dict(normalization="RMSNorm", bias=True),
    "zero-centred norm and linear, fused accumulation": dict(
        normalization="RMSNorm", bias=False, zero_centered_gamma=True, fuse_wgrad_accumulation=True
    ),
}

pytestmark = pytest.mark.usefixtures("one_rank")


class Tapped(torch.nn.Module):
    """A layer as the model of which it is all, tapped, and inputs for it."""

    def __init__(self, layer: torch.nn.Module, shape: tuple[int, ...], name: str = "layer") -> None:
        super().__init__()
        self.add_module(name, layer)
        self._layer = name
        generator = torch.Generator().manual_seed(3)
        for p in layer.parameters():
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=generator))
        self.x = torch.randn(shape, generator=generator) * 3
        self.direction = torch.randn(80, generator=generator)
        self.tap = Tap()
        self.obstacle = te_modules.plug_in([self], self.tap)

    def backward(self, weight: Tensor) -> Tensor:
        """As `oracle.Backward`; `weight` sequence by sequence. A score is the output in a random direction."""
        self.x.grad = None
        output = self.get_submodule(self._layer)(self.x.requires_grad_())
        score = (output * output.tanh() * self.direction[: output.shape[-1]]).flatten(2).sum(2)  # [S, n]
        (score * weight.view(score.shape[::-1]).T).sum().backward()
        return score.detach()

    def errors(self, layout: MicroBatch | None = None) -> Errors:
        return errors(self, self.tap, self.backward, layout)


def build(kind: str) -> torch.nn.Module:
    layer = te.LayerNormLinear if "normalization" in KINDS[kind] else te.Linear
    return layer(INPUTS, OUTPUTS, device="cpu", **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers(kind: str) -> None:
    """Catches a weight, bias or fused norm's weight that is left out, counted twice or taken from another tensor."""
    tapped = Tapped(build(kind), (TOKENS, 1, INPUTS))
    assert tapped.errors().within(TOLERANCE)


@pytest.mark.parametrize("heads", [False, True])
def test_norms_that_stand_alone(heads: bool) -> None:
    """Catches a final norm, or a norm of queries of which a token has several, whose rows go to other sequences."""
    shape = (TOKENS, 1, 4, 16) if heads else (TOKENS, 1, 16)
    tapped = Tapped(te.RMSNorm(16, device="cpu"), shape, "q_layernorm" if heads else "layer")
    assert tapped.errors().within(TOLERANCE)


def test_padded_sequences() -> None:
    """Catches rows of [S, n, d] that are read as those of [n, S, d] after the layer has flattened them."""
    n, length = 3, 12
    segments = Segments.of_lengths([length] * n)
    layout = MicroBatch(
        numbers=tuple(range(n)),
        segments=segments,
        whole=segments,
        by_sequence=None,
        sequence=torch.arange(n).expand(length, -1),
        token=torch.zeros(n * length, dtype=torch.long),
    )
    assert Tapped(build("norm and linear"), (length, n, INPUTS)).errors(layout=layout).within(TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_collector_layers_are_transformer_engines(kind: str) -> None:
    """Catches a tap that changes a layer's own gradients, before or after a packed update."""
    tapped, other = Tapped(build(kind), (TOKENS, 1, INPUTS)), Tapped(build(kind), (TOKENS, 1, INPUTS))
    untapped = other.get_submodule("layer")
    untapped.wgrad_store = build(kind).wgrad_store
    weight = torch.rand(TOKENS, generator=torch.Generator().manual_seed(9))
    own = own_gradients(other, other.backward, weight)
    for _ in range(2):
        gradients = own_gradients(tapped, tapped.backward, weight)
        assert all(gradients[name].equal(gradient) for name, gradient in own.items())
        assert tapped.x.grad is not None and tapped.x.grad.equal(other.x.grad)
        tapped.errors()


@pytest.mark.parametrize("frozen", ["layer_norm_weight", "bias"])
def test_a_parameter_that_is_not_trained(frozen: str) -> None:
    """Catches norms that contain gradients of parameters that do not move."""
    tapped = Tapped(build("norm and linear"), (TOKENS, 1, INPUTS))
    tapped.get_parameter(f"layer.{frozen}").requires_grad_(False)
    assert tapped.errors().within(TOLERANCE)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(bias=True, return_bias=True), "returned"),
        (dict(bias=True, parallel_mode="row"), "after a reduction"),
        (dict(bias=True, delay_wgrad_compute=True), "delay_wgrad_compute"),
    ],
)
def test_what_cannot_be_collected_is_named(settings: dict[str, Any], reason: str) -> None:
    """Catches a bias that autograd adds outside the layer, which would be missing in the norms without a word."""
    obstacle = Tapped(te.Linear(INPUTS, OUTPUTS, device="cpu", **settings), (TOKENS, 1, INPUTS)).obstacle
    assert obstacle is not None and reason in obstacle and obstacle.startswith("layer:")


def test_a_frozen_weight_beside_a_trained_norm_is_named() -> None:
    """Catches a fused norm whose gradient the layer forms by itself, because nothing announces it."""
    layer = build("norm and linear")
    layer.weight.requires_grad_(False)
    obstacle = Tapped(layer, (TOKENS, 1, INPUTS)).obstacle
    assert obstacle is not None and "a weight that is not" in obstacle


def test_a_weight_that_every_rank_has_whole_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches MLA's linear layers, whose gradient would be counted once by every tensor-parallel rank."""
    monkeypatch.setattr(te_modules.mpu, "get_tensor_model_parallel_world_size", lambda: 2)
    obstacle = Tapped(build("linear"), (TOKENS, 1, INPUTS)).obstacle
    assert obstacle is not None and "every tensor-parallel rank" in obstacle


def test_experts_of_which_some_are_trained_are_named() -> None:
    """Catches experts for which Transformer Engine would call no store: it asks the first of them."""
    layer = te.GroupedLinear(2, INPUTS, OUTPUTS, device="cpu", bias=False)
    layer.weight0.requires_grad_(False)
    obstacle = te_modules._obstacle(layer, of_experts=True)
    assert obstacle is not None and "a weight that is not" in obstacle
