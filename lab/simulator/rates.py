"""What lab/stability/rivals.md compares the ESS rule with: a rate that follows the lag alone, and a dual variable."""

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from lab.simulator.batch import Batch
from lab.simulator.policy import Policy
from lab.simulator.update import LossMethod, Update, VCPOMethod
from vcpo.stabilizers.ratios import token_log_ratios
from verl_vcpo.actor.vcpo_settings import VCPOSettings

LAG_LAW, R2VPO_DUAL = "lag_law", "r2vpo_dual"
BASES = {LAG_LAW: "vcpo_ess", R2VPO_DUAL: "r2vpo"}
"""By name, the method that is changed."""
REFERENCE_LAG = 32
"""Up to this lag the rate is the run's; rivals.md says why."""
VARIANCE_BOUND, DUAL_STEP, LARGEST_EXCESS = 0.04, 0.1, 10.0


def lag_multiplier(lag: int) -> float:
    """Return the factor of the learning rate: (lag x rate) stays what it is at the reference lag (arXiv 2607.01083)."""
    return min(1.0, REFERENCE_LAG / max(lag, 1))


class LagLaw(VCPOMethod):
    """VCPO's update with a step size that knows the lag, and nothing of the weights."""

    def update(self, policy: Policy, batch: Batch, fields: dict[str, Tensor], lag: int) -> Update:
        return replace(super().update(policy, batch, fields, lag), lr_multiplier=lag_multiplier(lag))


class DualAscent(LossMethod):
    """R2VPO's loss, whose multiplier grows while the ratios' variance is above its bound, and falls below it."""

    def __init__(self, actor: Any, *given: Any) -> None:
        super().__init__(actor, *given)
        actor.stabilizer["multiplier"] = 0.0

    def update(self, policy: Policy, batch: Batch, fields: dict[str, Tensor], lag: int) -> Update:
        step, mask = super().update(policy, batch, fields, lag), fields["response_mask"].bool()
        ratio = token_log_ratios(step.log_prob, fields["old_log_probs"], mask).exp()
        settings = self._actor.stabilizer
        settings["multiplier"] = ascended(settings["multiplier"], (ratio - 1).square()[mask].mean().item())
        return step


def ascended(multiplier: float, variance: float) -> float:
    """Return the multiplier after a step of projected dual ascent.

    Args:
        multiplier: before the step.
        variance: the mean of (r - 1)^2 over a batch's tokens.
    """
    excess = min(variance / VARIANCE_BOUND - 1, LARGEST_EXCESS)
    return max(0.0, multiplier + DUAL_STEP * excess)


def changed(name: str, config: DictConfig) -> VCPOMethod | LossMethod:
    """Return the method of a name in `BASES`, from the configuration of the method that it changes."""
    from verl.utils.config import omega_conf_to_dataclass

    actor = config.actor_rollout_ref.actor
    if name == LAG_LAW:
        return LagLaw(VCPOSettings.of(config.vcpo), actor)
    return DualAscent(omega_conf_to_dataclass(actor), config.algorithm)
