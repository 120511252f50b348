"""Megatron's linear layers, embedding and norms, whose parameter gradients a `Collector` computes.

While a collector is set, a module computes with a detached weight, so that autograd forms no weight gradient, and gives
inputs and output gradients to the collector when the backward reaches the module. Without a collector a module behaves
as Megatron's.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

if TYPE_CHECKING:
    from verl_vcpo.actor.taps.collector import Collector
    from verl_vcpo.actor.taps.routing import ExpertRows


class Tap:
    """The state that all tapped modules of a model share."""

    collector: "Collector | None" = None
    """The collector that takes gradients now; None outside of a packed update."""
    layers: str = "Megatron's own layers"
    """The kind of the model's layers, for the console."""
    untapped: str | None = None
    """A parameter whose per-sequence gradients cannot be collected, and why; None if all can be collected."""


class Tapped:
    """A mixin of modules that give gradients to a collector."""

    tap: Tap = Tap()  # replaced by `tapping.plug_in`

    @property
    def collector(self) -> "Collector | None":
        """The current collector, in a forward that a backward follows."""
        return self.tap.collector if torch.is_grad_enabled() else None


def on_gradient(output: Tensor, inputs: Tensor, take: Callable[[Any, Tensor], None]) -> None:
    """Call take(inputs, gradient of output) in the backward, and drop the reference to the inputs."""
    held = [inputs]
    if not output.requires_grad:  # no parameter before this layer is trained
        output.requires_grad_()
    output.register_hook(lambda gradient: take(held.pop(), gradient))


class TappedLinear(Tapped):
    is_head = False
    rows_of_experts: "Callable[[], ExpertRows] | None" = None
    """The rows of the running forward, in an expert's layer; known when the backward has begun."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **settings: Any) -> Tensor:
        collector = self.collector
        if collector is None or not weight.requires_grad:
            return super()._forward_impl(input=input, weight=weight, bias=bias, **settings)  # type: ignore[misc]
        fixed = None if bias is None else bias.detach()
        output = layers.linear_with_frozen_weight(input=input, weight=weight.detach(), bias=fixed, **settings)
        gather = settings["tp_group"] if settings["sequence_parallel"] else None
        rows = self.rows_of_experts

        def take(x: Tensor, dy: Tensor) -> None:
            if rows is None:
                collector.linear(weight, bias, x, dy, gather=gather, head=self.is_head)
            else:
                collector.experts(x, dy, rows())

        on_gradient(output, input.detach(), take)
        return output


class ColumnParallelLinear(TappedLinear, layers.ColumnParallelLinear):
    """Megatron's class with per-sequence gradients."""


class RowParallelLinear(TappedLinear, layers.RowParallelLinear):
    """Megatron's class with per-sequence gradients."""


def adds_bias_elsewhere(layer: torch.nn.Module) -> bool:
    """Return True for a linear layer whose bias is not added with its product. No supported model has such a layer."""
    if not isinstance(layer, layers.ColumnParallelLinear | layers.RowParallelLinear) or layer.bias is None:
        return False
    return isinstance(layer, layers.RowParallelLinear) or layer.skip_bias_add


class VocabParallelEmbedding(Tapped, layers.VocabParallelEmbedding):
    """Megatron's class with per-sequence gradients."""

    def forward(self, input_: Tensor) -> Tensor:
        collector = self.collector
        if collector is None or not self.weight.requires_grad:
            return super().forward(input_)
        token = input_ - self.vocab_start_index  # [B, S]
        elsewhere = (token < 0) | (input_ >= self.vocab_end_index)
        rows = F.embedding(token.masked_fill(elsewhere, 0), self.weight.detach()).masked_fill(elsewhere[..., None], 0.0)
        token = token.masked_fill(elsewhere, -1)
        on_gradient(rows, token, lambda ids, dy: collector.embedding(self.weight, ids, dy))
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)


def is_norm_of_heads(name: str) -> bool:
    """Return True for a norm of queries or keys: every tensor-parallel rank has some of the heads."""
    return name.endswith(("q_layernorm", "k_layernorm"))


class TappedNorm(Tapped):
    """A mixin for torch.nn.RMSNorm over the last dimension."""

    heads = False
    """True for a norm of queries or keys."""

    def forward(self, x: Tensor) -> Tensor:
        collector, weight = self.collector, self.weight  # type: ignore[attr-defined]
        if collector is None or not weight.requires_grad:
            return super().forward(x)  # type: ignore[misc]
        shape, eps = self.normalized_shape, self.eps  # type: ignore[attr-defined]
        output = F.rms_norm(x, shape, weight.detach(), eps)
        partial = self.heads or getattr(weight, "sequence_parallel", False)

        def take(x: Tensor, dy: Tensor) -> None:
            collector.vector(weight, dy * F.rms_norm(x, shape, eps=eps), summed_over_tp=partial)

        on_gradient(output, x.detach(), take)
        return output
