"""What a method makes of a mini-batch: one gradient and one step size.

VCPO's update comes from `vcpo.estimate`; every other method is an advantage estimator and a policy loss of verl's
registries, called as verl's trainer calls them, among them those of `vcpo.stabilizers`.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from recipe.lag_simulator.batch import Batch
from recipe.lag_simulator.norms import output_gradients, squared_norms, weighted_gradients
from recipe.lag_simulator.policy import ParameterTap, Policy
from vcpo import Estimate, FreshestEssRatio, VCPOConfig, estimate
from vcpo.diagnostics import kl_k3
from vcpo.ess import ess_ratio
from vcpo.importance import sequence_log_weights


@dataclass(frozen=True)
class Update:
    """One optimizer step, before clipping."""

    gradients: dict[str, Tensor] | None
    """Of the loss, by parameter name; None where no sequence is usable: no step."""
    lr_multiplier: float
    log_prob: Tensor
    """[B, T] of the sampled tokens, before the step."""
    ess_ratio: float
    baseline: float
    """Mean over the batch; NaN where the method has none per sequence."""
    kl: float
    """k3 estimate of KL(rollout || policy) per token, nats."""
    squared_norm: Tensor | None = None
    """[B] ||g_i||^2, where they were needed."""
    estimate: Estimate | None = None


def sampled_log_probs(policy: Policy, batch: Batch, taps: list[ParameterTap] | None = None) -> Tensor:
    """[B, T] log-probabilities of the sampled tokens."""
    every = policy.log_probs(batch.prompt, batch.prompt_mask, batch.response, taps)
    return every.gather(2, batch.response[..., None])[..., 0]


def kl(log_prob: Tensor, batch: Batch) -> float:
    """k3 estimate of KL(rollout || policy) per token, nats."""
    return (kl_k3(log_prob, batch.rollout_log_prob, batch.mask).sum() / batch.mask.sum()).item()


def token_rewards(batch: Batch) -> Tensor:
    """[B, T] the rewards on the last tokens, 0 elsewhere."""
    rewards = torch.zeros_like(batch.rollout_log_prob)
    return rewards.scatter_(1, batch.mask.sum(dim=-1, keepdim=True) - 1, batch.reward.float()[:, None])


class VCPOMethod:
    """As the patched Megatron actor does it: measure, estimate, step."""

    def __init__(self, vcpo: VCPOConfig, actor: Any) -> None:
        self._vcpo = vcpo
        self._mode, self._factor = actor.loss_agg_mode, actor.loss_scale_factor
        self._freshest = FreshestEssRatio()

    def prepare(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        """Nothing is needed of the batch as a whole."""
        return {}

    def update(self, policy: Policy, batch: Batch, fields: dict[str, Tensor], lag: int) -> Update:
        from verl_vcpo.workers.utils.losses import aggregated

        taps: list[ParameterTap] = []
        log_prob = sampled_log_probs(policy, batch, taps)
        score = aggregated(log_prob, batch.mask, self._mode, self._factor)
        gradients = output_gradients(score, taps)
        log_prob = log_prob.detach()
        norm = squared_norms(gradients, taps) if self._vcpo.needs_gradient_norms else None
        step = estimate(
            self._vcpo,
            sequence_log_weights(log_prob, batch.rollout_log_prob, batch.mask),
            batch.reward,
            batch.group,
            squared_norm=norm,
            length=batch.mask.sum(dim=-1),
            base_ess_ratio=self._freshest.value,
        )
        self._freshest.update(step.ess_ratio, lag)
        usable = step.usable.any()
        return Update(
            gradients=weighted_gradients(-step.coefficient, gradients, taps) if usable else None,
            lr_multiplier=step.step_size_multiplier,
            log_prob=log_prob,
            ess_ratio=step.ess_ratio,
            baseline=step.baseline[step.usable].mean().item() if usable else math.nan,
            kl=kl(log_prob, batch),
            squared_norm=norm,
            estimate=step,
        )


class LossMethod:
    """verl's advantage estimator and policy loss.

    Args:
        actor: verl's ActorConfig.
        algorithm: the `algorithm` settings.
    """

    def __init__(self, actor: Any, algorithm: DictConfig) -> None:
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

        import verl_vcpo.workers.utils.policy_losses  # noqa: F401  # registers ours

        self._actor, self._algorithm = actor, algorithm
        self._loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
        self._advantages = get_adv_estimator_fn(algorithm.adv_estimator)

    def prepare(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        """What verl's trainer computes before the mini-batches: `old_log_probs`, `advantages`, maybe weights."""
        correction = self._algorithm.rollout_correction
        fields = {"old_log_probs": batch.rollout_log_prob, "response_mask": batch.mask}
        extra: dict[str, Tensor | None] = {}
        if not correction.bypass_mode:
            with torch.no_grad():
                every = policy.log_probs(batch.prompt, batch.prompt_mask, batch.response)
            fields["old_log_probs"] = every.gather(2, batch.response[..., None])[..., 0]
            fields |= self._correct(fields["old_log_probs"], batch)
            if self._actor.calculate_sum_pi_squared:
                extra["sum_pi_squared"] = (2 * every).exp().sum(dim=-1)  # [B, T]
                extra["rollout_is_weights"] = fields.get("rollout_is_weights")
        fields["advantages"] = self._advantages(
            token_level_rewards=token_rewards(batch),
            response_mask=batch.mask.float(),
            index=np.array([str(group) for group in batch.group.tolist()]),
            **self._estimator_arguments(fields["old_log_probs"], extra),
        )[0].float()
        return fields

    def _estimator_arguments(self, old_log_prob: Tensor, extra: dict[str, Tensor | None]) -> dict[str, Any]:
        if self._algorithm.adv_estimator == "grpo":
            return {"norm_adv_by_std_in_grpo": self._algorithm.norm_adv_by_std_in_grpo}
        return {"old_log_probs": old_log_prob, **extra} if extra else {}

    def _correct(self, old_log_prob: Tensor, batch: Batch) -> dict[str, Tensor]:
        """verl's correction between sampler and `old_log_prob` (its decoupled mode)."""
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

        settings = OmegaConf.to_container(self._algorithm.rollout_correction, resolve=True)
        names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
        weights, mask, _ = compute_rollout_correction_and_rejection_mask(
            old_log_prob=old_log_prob,
            rollout_log_prob=batch.rollout_log_prob,
            response_mask=batch.mask,
            rollout_rs=settings["rollout_rs"],
            rollout_rs_threshold=settings["rollout_rs_threshold"],
            **{name: settings[name] for name in names},
        )
        corrected = {"response_mask": mask.bool()}
        return corrected if weights is None else corrected | {"rollout_is_weights": weights.batch["rollout_is_weights"]}

    def update(self, policy: Policy, batch: Batch, fields: dict[str, Tensor], lag: int) -> Update:
        log_prob = sampled_log_probs(policy, batch)
        self._actor.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=batch.mask.sum().item(),
            global_batch_size=len(batch),
            loss_scale_factor=self._actor.loss_scale_factor,
        )
        loss, _ = self._loss(
            old_log_prob=fields["old_log_probs"],
            log_prob=log_prob,
            advantages=fields["advantages"],
            response_mask=fields["response_mask"],
            loss_agg_mode=self._actor.loss_agg_mode,
            config=self._actor,
            rollout_is_weights=fields.get("rollout_is_weights"),
        )
        names = list(policy.parameters)
        gradients = torch.autograd.grad(loss, list(policy.parameters.values()), allow_unused=True)
        log_prob = log_prob.detach()
        return Update(
            gradients={
                name: torch.zeros_like(policy.parameters[name]) if gradient is None else gradient
                for name, gradient in zip(names, gradients, strict=True)
            },
            lr_multiplier=1.0,
            log_prob=log_prob,
            ess_ratio=ess_ratio(sequence_log_weights(log_prob, batch.rollout_log_prob, batch.mask)),
            baseline=math.nan,
            kl=kl(log_prob, batch),
        )
