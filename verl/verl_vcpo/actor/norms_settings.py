"""The settings `vcpo.norms.*`: how the engine measures each sequence's gradient norm (explanation/packed-norms.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vcpo.config import choice


class NormsHow(StrEnum):
    """The source of each sequence's gradient norm."""

    PACKED = "packed"
    """One backward over packed sequences gives norms and gradient, with a second gradient buffer (small models: several
    buffers). Mixtures of experts and groups that lie on several ranks get `two_backwards` instead; so do updates in
    which few sequences have almost all the weight. Some settings of mixtures of experts get `per_trajectory`, and the
    console says why."""
    TWO_BACKWARDS = "two_backwards"
    """One backward over packed sequences gives the norms, another the gradient: more time, no second buffer."""
    PER_TRAJECTORY = "per_trajectory"
    """One backward per sequence: exact on any model, slow, the reference."""


SECOND_BUFFERS_BYTES = 2 << 30
"""The memory of a rank for second buffers: a pass has one for each group, at least one."""


@dataclass(frozen=True)
class NormsConfig:
    """The settings `vcpo.norms.*`, read only where the update needs gradient norms. Enums may be given as strings.

    Raises:
        ValueError: naming the setting and what to set instead.
    """

    how: NormsHow = NormsHow.PACKED
    """The source of the norms."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "how", choice("norms.how", self.how, NormsHow))


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
    """Return the first setting of Megatron's TransformerConfig with which packed norms are not possible, or None."""
    return next((f"{name} is not supported" for name in NOT_PACKED if setting(name)), None)


def against_packing_experts(setting: Callable[[str], Any]) -> str | None:
    """Return the first setting with which packed norms of a mixture of experts are impossible, in words, or None."""
    frozen = {"moe_router_enable_expert_bias"} if setting("moe_router_bias_update_rate") == 0 else set()
    reasons = ((name, reason) for name, reason in NOT_PACKED_EXPERTS.items() if setting(name) and name not in frozen)
    return next((f"{name}={setting(name)}: {reason}" for name, reason in reasons), None)


def norms_in_words(how: NormsHow, layers: str, obstacle: str | None, experts: bool = False) -> str:
    """Return the line on the console that says how a run measures gradient norms.

    Args:
        how: the setting.
        layers: the kind of the trainer's layers.
        obstacle: why packed norms are not possible with these layers, or None.
        experts: the model is a mixture of experts.
    """
    if how is NormsHow.PER_TRAJECTORY:
        return f"Gradient norms: one backward per sequence (vcpo.norms.how={how.value}), on {layers}."
    if obstacle:
        return f"Gradient norms: one backward per sequence, slowly, on {layers}; not packed, because {obstacle}."
    if how is NormsHow.TWO_BACKWARDS or experts:
        reason = "a mixture of experts" if experts else f"vcpo.norms.how={how.value}"
        return f"Gradient norms: packed, on {layers}; a second backward forms the gradient ({reason})."
    return (
        f"Gradient norms: packed, on {layers}; a second backward forms the gradient where groups, ranks or weights "
        "demand one (actor/vcpo/second_backwards)."
    )
