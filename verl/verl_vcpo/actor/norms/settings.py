"""How the engine measures each sequence's gradient norm: `vcpo.norms.*` (docs/explanation/packed-norms.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vcpo.config import choice


class NormsHow(StrEnum):
    """Where the gradient norm of each sequence comes from."""

    PACKED = "packed"
    """One backward over packed sequences. For models with parameters that packed norms do not support (adapters) and
    some settings of mixtures of experts `per_trajectory` is used instead, and the console says why."""
    PER_TRAJECTORY = "per_trajectory"
    """One backward per sequence. Exact on any model, slow: the reference."""


class NormsKeep(StrEnum):
    """What a packed backward keeps of its gradients until the baseline, which needs all norms, is known."""

    AUTO = "auto"
    """`gradients`; `activations` where a baseline's sequences are not one pass of one rank, and for a mixture of
    experts."""
    GRADIENTS = "gradients"
    """Two weighted sums of the gradients, in the gradient buffer and in a second buffer of the model's size, of which
    small models have several. Where their difference would lose its digits, because few sequences have almost all the
    weight, a second backward. Of a mixture of experts at the scope of a mini-batch this is what `auto` keeps."""
    ACTIVATIONS = "activations"
    """Every layer's inputs and output gradients, from which gradients are formed later. Memory grows with tokens."""


SECOND_BUFFERS_BYTES = 2 << 30
"""With `keep=gradients`: a pass has as many groups as have second buffers in this memory of a rank, at least one."""


@dataclass(frozen=True)
class NormsConfig:
    """The settings `vcpo.norms.*`; used where the update needs gradient norms only. Strings are accepted for the enums.

    Raises:
        ValueError: naming the setting and what to set instead.
    """

    how: NormsHow = NormsHow.PACKED
    """Where the norms come from."""

    keep: NormsKeep = NormsKeep.AUTO
    """With `how=packed`: what is kept of a backward until the baseline is known."""

    tokens: int = 16384
    """Where activations are kept: at most those of so many tokens of a rank at a time, but at least of one group."""

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
    "moe_use_legacy_grouped_gemm": "its gradients are not collected",
    "add_bias_linear": "biases of experts and routers are not collected",
}
"""Settings of Megatron's TransformerConfig that make packed norms of a mixture of experts impossible, and why."""


def against_packing(setting: Callable[[str], Any]) -> str | None:
    """The first setting with which packed norms are not possible, in words; None if there is none.

    Args:
        setting: name of a setting of Megatron's TransformerConfig -> its value.
    """
    return next((f"{name} is not supported" for name in NOT_PACKED if setting(name)), None)


def against_packing_experts(setting: Callable[[str], Any]) -> str | None:
    """As `against_packing`, of the settings that matter to a mixture of experts only."""
    reasons = NOT_PACKED_EXPERTS.items()
    return next((f"{name}={setting(name)}: {reason}" for name, reason in reasons if setting(name)), None)


def in_words(
    how: NormsHow,
    layers: str,
    obstacle: str | None,
    kept_with_experts: NormsKeep | None = None,
    keep: NormsKeep = NormsKeep.AUTO,
) -> str:
    """The line on the console that says how a run measures gradient norms.

    Args:
        how: what is set.
        layers: whose layers the trainer has.
        obstacle: why packed norms are not possible with them, or None.
        kept_with_experts: of a mixture of experts what a backward keeps, which `vcpo.norms.keep=auto` does not tell.
        keep: what is set; of a dense model `auto` chooses for each mini-batch.
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
