"""The actor's settings: verl's Megatron actor plus `vcpo` and `stabilizer`."""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import McoreActorConfig

from vcpo import OpobWeights
from verl_vcpo.actor import own_loss
from verl_vcpo.actor.policy_losses import check_settings
from verl_vcpo.actor.update.losses import LOSS_AGG_MODES, TOKEN_MEAN, TOKEN_SUM_NORM
from verl_vcpo.actor.vcpo_settings import VCPOSettings


@dataclass
class VCPOActorConfig(McoreActorConfig):
    """verl's McoreActorConfig with the VCPO update's settings.

    Raises:
        ValueError: a setting that the policy loss does not have, or a loss of the user's own that cannot be used; with
            VCPO enabled, such a loss, a loss aggregation without a score per sequence, or a term of the loss that the
            VCPO update does not have.
    """

    vcpo: VCPOSettings = field(default_factory=VCPOSettings)

    stabilizer: dict[str, Any] = field(default_factory=dict)
    """Settings of a policy loss from `vcpo.stabilizers`, or of the user's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.policy_loss.loss_mode, self.stabilizer)
        if not self.vcpo.enable:
            return
        self._check_loss()
        self._check_gradients()

    def _check_loss(self) -> None:
        if own_loss.is_own(self.policy_loss.loss_mode):
            raise ValueError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={self.policy_loss.loss_mode}: VCPO's update forms its "
                "gradient from each sequence's, and calls no loss; set vcpo.enable=false in the method's file"
            )
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(
                f"actor_rollout_ref.actor.loss_agg_mode={self.loss_agg_mode!r}: VCPO's update has one of "
                f"{', '.join(LOSS_AGG_MODES)}"
            )
        if self.vcpo.opob_weights is OpobWeights.PUBLISHED and self.loss_agg_mode != TOKEN_MEAN:
            raise ValueError(
                f"vcpo.opob_weights=published: the authors' weights are of loss_agg_mode={TOKEN_MEAN}, not of "
                f"{self.loss_agg_mode}; set actor_rollout_ref.actor.loss_agg_mode, or leave vcpo.opob_weights out"
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
                    f"{name}={absent}, or another method (method=none, ...)"
                )

    def _check_gradients(self) -> None:
        """Refuse regimes in which Megatron's gradients are not plain sums over the sequences of a rank."""
        if self.megatron.dynamic_context_parallel:
            raise ValueError(
                "actor_rollout_ref.actor.megatron.dynamic_context_parallel=true: a sequence's gradient would be spread "
                "over ranks that change from batch to batch; set it to false and use context_parallel_size"
            )
        if self.megatron.override_transformer_config.get("calculate_per_token_loss"):
            raise ValueError(
                "actor_rollout_ref.actor.megatron.override_transformer_config.calculate_per_token_loss=true: Megatron "
                "would divide gradients by a rounded number of tokens; leave it out"
            )
        if self.megatron.use_megatron_fsdp:
            raise ValueError(
                "actor_rollout_ref.actor.megatron.use_megatron_fsdp=true: it shards gradients before their norms are "
                "known; set it to false"
            )
