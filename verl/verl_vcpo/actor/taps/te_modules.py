"""Transformer Engine's layers, whose parameter gradients a `Collector` computes.

The backward of a linear layer asks `wgrad_store.delay_wgrad_compute()`. Where the answer is yes, the backward forms no
gradient of weight and bias, but hands the layer's inputs and output gradients to `wgrad_store.put`, gathered over
tensor-parallel ranks as the layer needs them. `Store` takes the place of each layer's `wgrad_store`: its answer is yes
while a collector is set. No setting of Transformer Engine or Megatron is changed for that.

Where a norm is fused with the linear layer after it, the same backward calls `rmsnorm_bwd` of the compiled extension
after `put`, with all that the gradient of the norm's weight depends on. `Extension` takes the place of the extension in
layernorm_linear.py of Transformer Engine. Norms that stand alone are subclassed. No model that the trainer builds has
another norm than RMSNorm.

Without a collector all layers behave as Transformer Engine's.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor
from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear, RMSNorm
from transformer_engine.pytorch.module import layernorm_linear

from verl_vcpo.actor.taps.modules import Tap, Tapped, is_norm_of_heads

if TYPE_CHECKING:
    from verl_vcpo.actor.taps.collector import Collector
    from verl_vcpo.actor.taps.routing import ExpertRows


class Store(Tapped):
    """A stand-in for a linear layer's `WeightGradStore`, which gives gradients to a collector.

    Args:
        rows: in a layer of experts, the function that returns the rows of a forward once its backward has begun.
    """

    def __init__(self, tap: Tap, layer: Any, rows: "Callable[[], ExpertRows] | None" = None) -> None:
        self.tap, self.layer, self.rows = tap, layer, rows

    def of_experts(self, rows: "Callable[[], ExpertRows] | None") -> "Store":
        """Return the store of one forward, which Transformer Engine gives to the backward."""
        return Store(self.tap, self.layer, rows)

    def delay_wgrad_compute(self) -> bool:
        """Return True where the layer's backward calls `put`, and forms no gradients of weight and bias."""
        return self.tap.collector is not None

    def put(self, tensors: list[Any], form: Callable[..., Any]) -> None:
        """Give a layer's inputs and output gradients to the collector.

        Args:
            tensors: both, [S n, in] and [S n, out]; from a GroupedLinear lists of both with an entry for each expert,
                and the list of tensors in which the layer would form gradients, and which it returns to autograd.
            form: the function that would compute the gradient of the weight from both; not used.
        """
        layer, collector = self.layer, self.tap.collector
        assert collector is not None, "delay_wgrad_compute is false without a collector"
        if isinstance(layer, GroupedLinear):
            *tensors, gradients = tensors
            gradients[:] = [None] * len(gradients)  # autograd would add uninitialized numbers
            x, dy = map(torch.cat, tensors)
        else:
            x, dy = tensors
        if self.rows is not None:
            collector.experts(x, dy, self.rows())
            return
        x, dy = (collector.current().activation(rows) for rows in (x, dy))
        bias = layer.bias if layer.apply_bias and layer.bias.requires_grad else None
        collector.linear(layer.weight, bias, x, dy)
        if isinstance(layer, LayerNormLinear):
            extension().norm_follows(self)


class Extension:
    """The module transformer_engine_torch, whose backward of a norm also gives gradients to a collector."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._announced: tuple[Store, Collector | None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def norm_follows(self, store: Store) -> None:
        """Announce that the next backward of a norm is that of the store's layer, a LayerNormLinear."""
        self._announced = store, store.tap.collector

    def rmsnorm_bwd(self, dy: Tensor, x: Tensor, rsigma: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
        """Return the compiled function's gradients of x and of the weight; None for a weight of the collector."""
        taken = self._take(dy, x, rsigma)
        dx, formed = self._compiled.rmsnorm_bwd(dy, x, rsigma, *rest)
        return dx, None if taken else formed

    def _take(self, dy: Tensor, x: Tensor, rsigma: Tensor) -> bool:
        announced, self._announced = self._announced, None
        if announced is None:
            return False
        store, collector = announced
        if collector is None or store.tap.collector is not collector:  # a backward that failed announced it
            return False
        layer = store.layer
        rows = collector.current().activation(dy)
        _take_norm(collector, layer.layer_norm_weight, rows, x, rsigma, summed_over_tp=layer.sequence_parallel)
        return True


def extension() -> Extension:
    """Return the extension that Transformer Engine's layernorm_linear.py calls; the first call replaces it by ours."""
    if not isinstance(layernorm_linear.tex, Extension):
        layernorm_linear.tex = Extension(layernorm_linear.tex)
    return layernorm_linear.tex


def _take_norm(
    collector: "Collector", weight: Tensor, dy: Tensor, x: Tensor, rsigma: Tensor, *, summed_over_tp: bool
) -> None:
    """Give the gradients of a norm's weight [d] to the collector, one for each row of dy [S, n, ..., d]."""
    if weight.requires_grad:
        collector.vector(weight, dy * _normalized(x, rsigma).view(dy.shape), summed_over_tp=summed_over_tp)


def _normalized(x: Tensor, rsigma: Tensor) -> Tensor:
    """Return [..., d] float32, the factor of the norm's weight; `rsigma` is one number per row of x."""
    return x.float() * rsigma[:, None]


class TappedRMSNorm(Tapped, RMSNorm):
    """Transformer Engine's class with per-sequence gradients."""

    heads = False
    """True for a norm of queries or keys."""

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return upstream's gradients of x and of the weight; None for a weight of the collector."""
        collector = self.tap.collector
        if collector is not None:
            x, rsigma = ctx.saved_tensors  # upstream frees them
            partial = self.heads or bool(getattr(self.weight, "sequence_parallel", False))
            _take_norm(collector, self.weight, grad_output, x, rsigma, summed_over_tp=partial)
        dx, formed = super().op_backward(ctx, grad_output)
        return dx, formed if collector is None else (None,) * len(formed)


_LINEAR = (Linear, LayerNormLinear, GroupedLinear)


def plug_in(chunks: list[torch.nn.Module], tap: Tap, of_experts: Collection[torch.nn.Module] = ()) -> str | None:
    """Tap Transformer Engine's linear layers and norms.

    Args:
        of_experts: linear layers of experts.

    Returns:
        The first layer with a gradient that cannot be collected, and why; None if there is no such layer.
    """
    for chunk in chunks:
        for name, module in chunk.named_modules():
            obstacle = _obstacle(module, module in of_experts) if isinstance(module, _LINEAR) else None
            if obstacle:
                return f"{name}: {obstacle}"
            plug_in_layer(module, tap)
            if isinstance(module, TappedRMSNorm):
                module.heads = is_norm_of_heads(name)
    return None


def plug_in_layer(module: Any, tap: Tap) -> None:
    """Tap a module, if it is a linear layer or a norm of Transformer Engine."""
    if isinstance(module, _LINEAR):
        module.wgrad_store = Store(tap, module)
    elif type(module) is RMSNorm:
        module.__class__ = TappedRMSNorm
        module.tap = tap


def _obstacle(layer: Any, of_experts: bool) -> str | None:
    """Return why autograd or Transformer Engine would form a linear layer's gradient all the same; None if not."""
    trained = [p for p in layer.parameters() if p.requires_grad]
    if not trained:
        return None
    grouped = isinstance(layer, GroupedLinear)
    weights = [getattr(layer, f"weight{i}") for i in range(layer.num_gemms)] if grouped else [layer.weight]
    if not all(weight.requires_grad for weight in weights):
        return "parameters are trained beside a weight that is not"
    if layer.use_bias and not layer.apply_bias:
        return "its bias is returned, and added by another module"
    if getattr(layer, "normalization", "RMSNorm") != "RMSNorm":
        return f"normalization={layer.normalization}"
    if layer.use_bias and of_experts:
        return "a bias of experts"
    if getattr(layer, "gemm_bias_unfused_add", False):
        return "its bias is added after a reduction over tensor-parallel ranks"
    if not of_experts and layer.parallel_mode is None and mpu.get_tensor_model_parallel_world_size() > 1:
        return "every tensor-parallel rank has the whole weight"
    if layer.wgrad_store.delay_wgrad_compute() and not isinstance(layer.wgrad_store, Store):
        return "delay_wgrad_compute=true"
    return None
