"""Mixtures of experts: the sequence of each row of an expert, and the router's weight.

Megatron sends each token to its experts, which may be on other ranks, and sorts the rows there. Before each such
dispatch the numbers of the tokens' sequences take the same way, through the same methods of the dispatcher: so the
collector knows the sequence of each row. Nothing is left of the first dispatch when the second begins.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl_vcpo.actor.norms_settings import against_packing_experts
from verl_vcpo.actor.taps.modules import Tapped, TappedLinear, on_gradient
from verl_vcpo.actor.taps.routing import ExpertRows, Routing

_AUXILIARY_LOSSES = {"aux_loss", "seq_aux_loss", "global_aux_loss"}
_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TappedMoELayer(Tapped, MoELayer):
    """Megatron's class; each forward tells the experts' layers the sequence of each row."""

    _routing: Routing | None = None
    """The routing of the running forward."""

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Dispatch the tokens' sequence numbers, then run upstream's method."""
        if self.collector is not None:
            self._routing = self._dispatch_numbers(hidden_states, probs, routing_map)
        return super().preprocess(hidden_states, probs, routing_map)

    @torch.no_grad()
    def _dispatch_numbers(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Routing:
        collector, dispatcher = self.tap.collector, self.token_dispatcher
        assert collector is not None and dispatcher is not None
        micro_batch = collector.current()
        # The dispatcher takes numbers with a fraction; float32 is exact up to 2^24.
        number = micro_batch.rows[micro_batch.sequence_of(hidden_states)].float()
        rows, weights = dispatcher.dispatch_preprocess(
            number.view(*hidden_states.shape[:-1], 1), routing_map, probs.detach()
        )
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, per_expert, _ = dispatcher.dispatch_postprocess(rows, weights)
        return Routing(rows[:, 0].round().long(), per_expert, collector.size)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run upstream's method while the experts' layers know the sequence of each row."""
        routing, self._routing = self._routing, None
        if routing is None:
            return super().routed_experts_compute(hidden_states, probs)
        layers = linear_layers(self.experts)
        for expert, layer in layers:
            _tell(layer, partial(_rows, routing, expert))
        try:
            return super().routed_experts_compute(hidden_states, probs)
        finally:
            for _, layer in layers:
                _tell(layer, None)


def linear_layers(experts: torch.nn.Module) -> list[tuple[int | None, Any]]:
    """Return (number of the expert on this rank, or None for a layer of all experts; linear layer) pairs."""
    if isinstance(experts, SequentialMLP):
        mlps = list(enumerate(experts.local_experts))
        return [(i, layer) for i, mlp in mlps for layer in (mlp.linear_fc1, mlp.linear_fc2)]
    if isinstance(experts, TEGroupedMLP):
        return [(None, experts.linear_fc1), (None, experts.linear_fc2)]
    return []


def _rows(routing: Routing, expert: int | None) -> ExpertRows:
    return routing.rows if expert is None else routing.rows.experts[expert]


def _tell(layer: Any, rows: Callable[[], ExpertRows] | None) -> None:
    if isinstance(layer, TappedLinear):
        layer.rows_of_experts = rows
    else:  # Transformer Engine's: its forward gives the store to its backward
        layer.wgrad_store = layer.wgrad_store.of_experts(rows)


class TappedRouter(TopKRouter, Tapped):  # in this order: Python could not exchange the classes in the other
    """Megatron's class with per-sequence gradients."""

    def gating(self, input: Tensor) -> Tensor:
        """Return upstream's logits, and tap the gradient of the router's weight."""
        collector = self.collector
        if collector is None or not self.weight.requires_grad:
            return super().gating(input)
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
        logits = router_gating_linear(input, self.weight.detach(), None, dtype)
        gather = self.tp_group if self.config.sequence_parallel else None
        on_gradient(logits, input.detach(), lambda x, dy: collector.router(self.weight, x, dy, gather=gather))
        return logits


TAPPED: dict[type, type] = {
    MoELayer: TappedMoELayer,
    TopKRouter: TappedRouter,
}


def layers_of_experts(chunks: list[torch.nn.Module]) -> list[Any]:
    """Return the linear layers of all experts on this rank."""
    mixtures = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    return [layer for mixture in mixtures for _, layer in linear_layers(mixture.experts)]


def obstacle(config: TransformerConfig) -> str | None:
    """Return the setting with which experts' gradients are not collected, or are no sequence's own; None if none is."""
    if unsupported := against_packing_experts(partial(getattr, config)):
        return unsupported
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if not isinstance(kinds, list):
        kinds, coefficients = [kinds], [coefficients]
    for kind, coefficient in zip(kinds, coefficients, strict=True):
        if kind in _AUXILIARY_LOSSES and coefficient:
            return f"moe_aux_loss_coeff={coefficient} with {kind}: the loss is no sequence's own"
    if config.moe_token_dispatcher_type != "alltoall":
        return f"moe_token_dispatcher_type={config.moe_token_dispatcher_type}: only alltoall is supported"
    return _copies()


def _copies() -> str | None:
    """Return why squares of an expert's gradients do not add up (copies share a sequence); None where they add up."""
    copies, sequence = (
        set(dist.get_process_group_ranks(group))
        for group in (mpu.get_expert_data_parallel_group(), mpu.get_tensor_and_context_parallel_group())
    )
    if len(copies & sequence) == 1:
        return None
    experts = mpu.get_expert_model_parallel_world_size() * mpu.get_expert_tensor_parallel_world_size()
    return (
        f"expert_model_parallel_size x expert_tensor_parallel_size={experts}: less than context_parallel_size x "
        f"tensor_model_parallel_size={len(sequence)}, so that copies of an expert have parts of the same sequence"
    )
