"""The settings `vcpo.norms.*`: how the engine measures each sequence's gradient norm (explanation/packed-norms.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vcpo.config import choice


class NormsHow(StrEnum):
    """The source of each sequence's gradient norm."""

    PACKED = "packed"
    """One backward over packed sequences. Adapters and some settings of mixtures of experts get `per_trajectory`
    instead, and the console says why."""
    PER_TRAJECTORY = "per_trajectory"
    """One backward per sequence: exact on any model, slow, the reference."""


class NormsKeep(StrEnum):
    """The part of its gradients that a packed backward keeps until the baseline, which needs all norms, is known."""

    AUTO = "auto"
    """`gradients`; `activations` for a mixture of experts, and where a baseline's sequences are not one pass of one
    rank."""
    GRADIENTS = "gradients"
    """Two weighted sums of the gradients, in the gradient buffer and in a second buffer of the model's size; small
    models have several second buffers. Where few sequences have almost all the weight, the difference of the sums would
    lose its digits, and a second backward runs. `auto` keeps gradients of mixtures of experts at scope `minibatch`."""
    ACTIVATIONS = "activations"
    """Every layer's inputs and output gradients, from which gradients are formed later. Memory grows with tokens."""


SECOND_BUFFERS_BYTES = 2 << 30
"""The memory of a rank for second buffers: with `keep=gradients` a pass has one for each group, at least one."""


@dataclass(frozen=True)
class NormsConfig:
    """The settings `vcpo.norms.*`, read only where the update needs gradient norms. Enums may be given as strings.

    Raises:
        ValueError: naming the setting and what to set instead.
    """

    how: NormsHow = NormsHow.PACKED
    """The source of the norms."""

    keep: NormsKeep = NormsKeep.AUTO
    """With `how=packed`: the part of a backward that is kept until the baseline is known."""

    tokens: int = 16384
    """The most tokens of a rank whose activations are kept at a time; one group is always kept whole."""

    def __post_init__(self) -> None:
        for name, enum in (("how", NormsHow), ("keep", NormsKeep)):
            object.__setattr__(self, name, choice(f"norms.{name}", getattr(self, name), enum))
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool) or self.tokens < 1:
            raise ValueError(f"vcpo.norms.tokens={self.tokens!r}: give a whole number of at least 1")


NOT_PACKED = ("fp8", "fp4", "tp_comm_overlap")
"""Settings of Megatron's TransformerConfig with which packed norms are not possible."""

NOT_PACKED_EXPERTS = {
    "moe_z_loss_coeff": "the loss is no sequence's own",
    "moe_expert_capacity_factor": "which tokens are dropped depends on other sequences",
    "moe_pad_expert_input_to_capacity": "padding is no sequence's",
    "moe_router_padding_for_quantization": "padding is no sequence's",
    "moe_router_enable_expert_bias": "a second forward would count a batch's tokens twice",
    "moe_shared_expert_overlap": "the shared experts' gradients are formed elsewhere",
    "overlap_moe_expert_parallel_comm": "the layers' gradients are formed elsewhere",
    "moe_latent_size": "every tensor-parallel rank has the projections whole",
    "add_bias_linear": "biases of experts and routers are not collected",
}
"""Settings of Megatron's TransformerConfig that make packed norms of a mixture of experts impossible, and why."""


def against_packing(setting: Callable[[str], Any]) -> str | None:
    """Return the first setting with which packed norms are not possible, in words; None if there is none.

    Args:
        setting: name of a setting of Megatron's TransformerConfig -> its value.
    """
    return next((f"{name} is not supported" for name in NOT_PACKED if setting(name)), None)


def against_packing_experts(setting: Callable[[str], Any]) -> str | None:
    """Return the first setting with which packed norms of a mixture of experts are impossible, in words, or None."""
    reasons = NOT_PACKED_EXPERTS.items()
    return next((f"{name}={setting(name)}: {reason}" for name, reason in reasons if setting(name)), None)


def in_words(
    how: NormsHow,
    layers: str,
    obstacle: str | None,
    kept_with_experts: NormsKeep | None = None,
    keep: NormsKeep = NormsKeep.AUTO,
) -> str:
    """Return the line on the console that says how a run measures gradient norms.

    Args:
        how: the setting.
        layers: the kind of the trainer's layers.
        obstacle: why packed norms are not possible with these layers, or None.
        kept_with_experts: what a backward keeps with a mixture of experts; None for a dense model.
        keep: the setting; for a dense model `auto` chooses in each mini-batch.
    """
    if how is NormsHow.PER_TRAJECTORY:
        return f"Gradient norms: one backward per sequence (vcpo.norms.how={how.value}), on {layers}."
    if obstacle:
        return f"Gradient norms: one backward per sequence, slowly, on {layers}; not packed, because {obstacle}."
    kept = f", vcpo.norms.keep={keep.value}"
    if keep is NormsKeep.AUTO:
        kept += ": gradients where groups and ranks allow it, else activations (actor/vcpo/activations_kept)"
    if kept_with_experts:
        kept = f", a mixture of experts: vcpo.norms.keep={kept_with_experts}"
    return f"Gradient norms: packed, on {layers}{kept}."
