"""The actor's settings: verl's Megatron actor plus `vcpo`."""

from dataclasses import dataclass, field

from verl.workers.config import McoreActorConfig

from vcpo import VCPOConfig
from verl_vcpo.workers.utils.losses import LOSS_AGG_MODES, TOKEN_SUM_NORM


@dataclass
class VCPOActorConfig(McoreActorConfig):
    """verl's McoreActorConfig with the VCPO update's settings.

    Raises:
        ValueError: with VCPO enabled, a loss aggregation without a score per sequence, or a term that its update lacks.
    """

    vcpo: VCPOConfig = field(default_factory=VCPOConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.vcpo.enable:
            return
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(
                f"actor_rollout_ref.actor.loss_agg_mode={self.loss_agg_mode!r}: with vcpo.enable=true choose one of "
                f"{', '.join(LOSS_AGG_MODES)}"
            )
        if self.loss_agg_mode == TOKEN_SUM_NORM and not self.loss_scale_factor:
            raise ValueError(
                f"actor_rollout_ref.actor.loss_scale_factor={self.loss_scale_factor}: loss_agg_mode={TOKEN_SUM_NORM} "
                "divides by it; set it to a constant, such as data.max_response_length"
            )
        if self.shuffle:
            raise ValueError(
                "actor_rollout_ref.actor.shuffle=true: it would split the samples of a prompt between mini-batches, "
                "and baselines compare them; set it to false"
            )
        for name, absent in (("use_kl_loss", False), ("entropy_coeff", 0)):
            if getattr(self, name) != absent:
                raise ValueError(
                    f"actor_rollout_ref.actor.{name}={getattr(self, name)}: VCPO's update has no such term; set "
                    f"{name}={absent}, or vcpo.enable=false"
                )
