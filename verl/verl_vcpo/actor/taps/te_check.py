"""A check that the installed Transformer Engine's layers give a collector the data of their own gradients.

`te_modules` depends on calls inside Transformer Engine's backwards, which no release promises. So an engine runs one
small layer of each kind before it first measures norms, with its own gradients and tapped: milliseconds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear, RMSNorm
from verl.utils.device import get_device_id

from vcpo.gradnorm import Segments
from verl_vcpo.actor.taps import te_modules
from verl_vcpo.actor.taps.layout import MicroBatch
from verl_vcpo.actor.taps.modules import Tap

_TOKENS, _INPUTS, _OUTPUTS = 16, 32, 48  # multiples of 16, as kernels may demand
_OF_EXPERTS = [_TOKENS // 2, _TOKENS // 2]
_LIMIT = 1e-2
"""The accepted error, relative to a gradient's largest entry: a GPU may use 10 bits of the mantissas of float32."""


class _Sums:
    """A stand-in for a collector: the gradient of each parameter over all tokens."""

    def __init__(self, layout: MicroBatch) -> None:
        self._layout = layout
        self.gradient: dict[Tensor, Tensor] = {}

    def current(self) -> MicroBatch:
        return self._layout

    def linear(self, weight: Tensor, bias: Tensor | None, x: Tensor, dy: Tensor) -> None:
        self.gradient[weight] = self._layout.flat(dy).T @ self._layout.flat(x)
        if bias is not None:
            self.vector(bias, dy)

    def experts(self, x: Tensor, dy: Tensor, weights: Sequence[Tensor]) -> None:
        for weight, a, b in zip(weights, x.split(_OF_EXPERTS), dy.split(_OF_EXPERTS), strict=True):
            self.gradient[weight] = b.T @ a

    def vector(self, parameter: Tensor, dy: Tensor, *, summed_over_tp: bool = False) -> None:
        self.gradient[parameter] = dy.flatten(0, -2).sum(0)


def what_is_wrong(grouped: bool = False) -> str | None:
    """Return a kind of layer whose tapped gradients are not the layer's own, in words; None if there is none.

    Args:
        grouped: whether the model has layers of experts.

    Raises:
        Exception: of any kind, by a version of Transformer Engine whose layers cannot be built or tapped like this.
    """
    device = get_device_id()
    sizes = (_INPUTS, _OUTPUTS)
    of_linear = dict(bias=True, device=device, params_dtype=torch.float32, init_method=_fill)
    layers = {
        "Linear": Linear(*sizes, **of_linear),
        "LayerNormLinear": LayerNormLinear(*sizes, normalization="RMSNorm", **of_linear),
        "RMSNorm": RMSNorm(_INPUTS, device=device, dtype=torch.float32),
    }
    if grouped:
        layers["GroupedLinear"] = GroupedLinear(len(_OF_EXPERTS), *sizes, **{**of_linear, "bias": False})
    with torch.enable_grad():
        wrong = {kind: _of_layer(layer, device) for kind, layer in layers.items()}
    return next((f"{kind}, {what}" for kind, what in wrong.items() if what), None)


def _of_layer(layer: torch.nn.Module, device: Any) -> str | None:
    own = _backward(layer, device)
    segments = Segments.of_lengths([_TOKENS], device)
    sums = _Sums(
        MicroBatch(
            numbers=(0,),
            segments=segments,
            whole=segments,
            by_sequence=None,
            sequence=segments.sequence[:, None],
            token=torch.zeros(_TOKENS, dtype=torch.long, device=device),
        )
    )
    tap = Tap()
    te_modules.plug_in_layer(layer, tap)
    if isinstance(layer, GroupedLinear):
        layer.wgrad_store = layer.wgrad_store.of_experts(lambda: list(layer.parameters()))
    tap.collector = sums  # type: ignore[assignment]  # it has what layers call
    try:
        formed = _backward(layer, device)
    finally:
        tap.collector = None
    for name, parameter in layer.named_parameters():
        if formed[name] is not None:
            return f"{name}: its gradient is formed although it is collected"
        collected, expected = sums.gradient.get(parameter), own[name]
        if collected is None or expected is None:
            return f"{name}: no gradient"
        error = ((collected - expected).abs().max() / expected.abs().max()).item()
        if not error <= _LIMIT:  # NaN too
            return f"{name}: the gradient differs by {error:.1e}"
    return None


def _backward(layer: torch.nn.Module, device: Any) -> dict[str, Tensor | None]:
    """Return the gradient of each parameter, None where the backward left none; no random numbers are drawn."""
    x = _fill(torch.empty(_TOKENS, 1, _INPUTS, device=device)).requires_grad_()
    layer.zero_grad()
    output = layer(x, _OF_EXPERTS) if isinstance(layer, GroupedLinear) else layer(x)
    (output * _fill(torch.empty_like(output))).sum().backward()
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def _fill(tensor: Tensor) -> Tensor:
    """Fill a tensor with numbers between -1 and 1, each different from all others in its row and its column."""
    with torch.no_grad():
        return tensor.copy_(torch.arange(tensor.numel(), device=tensor.device).mul(1.3).sin().view_as(tensor))
