"""What a method makes of a mini-batch: one gradient and one step size.

VCPO's update comes from `vcpo.estimate`; every other method is an advantage estimator and a policy loss of verl's
registries, called as verl's trainer calls them, among them those of `vcpo.stabilizers`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lab.simulator.batch import Batch
from lab.simulator.norms import block_gradients, squared_norms, weighted_gradient
from lab.simulator.policy import Policy, Taps
from lab.simulator.tree import TokenTree
from vcpo import Estimate, Mismatch, VCPOConfig, estimate
from vcpo.baseline import group_std
from vcpo.diagnostics import kl_k3
from vcpo.ess import ess_ratio
from vcpo.importance import log_ratios, sequence_log_weights
from vcpo.mismatch import WeightParts, jumps, squared_log_ratios
from verl_vcpo.common.truncated import Truncated, parts_of_update


@dataclass(frozen=True)
class Update:
    """One optimizer step, before clipping."""

    gradient: Tensor | None
    """[1, D] of the loss with respect to the policy's `flat`; None where no sequence is usable: no step."""
    lr_multiplier: float
    log_prob: Tensor
    """[B, T] of the sampled tokens, before the step."""
    log_weight: Tensor
    """[B] of the sequences that were trained on."""
    ess_ratio: float
    baseline: float
    """Mean over the batch; NaN where the method has none per sequence."""
    kl: float
    """k3 estimate of KL(rollout || policy) per token, nats."""
    squared_norm: Tensor | None = None
    """[B] ||g_i||^2, where they were needed."""
    estimate: Estimate | None = None
    of_truncated: dict[str, float] = field(default_factory=dict)
    """Of truncated and of finished responses, under the names of metrics.jsonl."""
    parts: WeightParts | None = None
    """What lag and arithmetic make of the weights, with VCPO."""


_WORTH_A_PASS = 0.7
"""Where no more than this share of the sequences needs a gradient, the rest is read in a pass without gradients."""


def node_log_probs(policy: Policy, tree: TokenTree, taps: Taps | None = None) -> Tensor:
    """[M - C, V] log-probabilities of every token after the tree's nodes."""
    return policy.outputs(tree, taps).flatten(0, 1).log_softmax(dim=-1)


def of_tokens(log_probs: Tensor, tree: TokenTree, response: Tensor) -> Tensor:
    """[B, T] of the response's tokens, from those of all, [M - C, V]."""
    return log_probs.take(tree.parent[0] * log_probs.shape[1] + response)


def sampled_log_probs(policy: Policy, batch: Batch, taps: Taps | None = None) -> Tensor:
    """[B, T] log-probabilities of the sampled tokens; with `taps`, of the batch's tree that they name."""
    tree = taps.tree if taps else batch.tree
    return of_tokens(node_log_probs(policy, tree, taps), tree, batch.response)


def log_probs_of(policy: Policy, batch: Batch, rows: Tensor) -> Tensor:
    """[B, T] log-probabilities of the sampled tokens; a gradient is needed of `rows` [B] only."""
    if rows.double().mean() > _WORTH_A_PASS:
        return sampled_log_probs(policy, batch)
    log_prob = torch.empty_like(batch.rollout_log_prob)
    with torch.no_grad():
        log_prob[~rows] = sampled_log_probs(policy, batch.rows(~rows))
    if rows.any():
        log_prob[rows] = sampled_log_probs(policy, batch.rows(rows))
    return log_prob


def _gradient(loss: Tensor, policy: Policy) -> Tensor:
    """[1, D]; zeros where the loss depends on no sequence."""
    return torch.autograd.grad(loss, policy.flat)[0] if loss.requires_grad else torch.zeros_like(policy.flat)


def kl(log_prob: Tensor, batch: Batch) -> float:
    """k3 estimate of KL(rollout || policy) per token, nats."""
    return (kl_k3(log_ratios(log_prob, batch.rollout_log_prob, batch.mask)).sum() / batch.mask.sum()).item()


def token_rewards(batch: Batch) -> Tensor:
    """[B, T] the rewards on the last tokens, 0 elsewhere."""
    rewards = torch.zeros_like(batch.rollout_log_prob)
    return rewards.scatter_(1, batch.mask.sum(dim=-1, keepdim=True) - 1, batch.reward.float()[:, None])


_NO_MULTIPLES = ("oapl", "p3o", "r2vpo")
"""Losses that are no multiple of the advantage: their gradient is not 0 where the advantage is."""

Measured = tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]
"""[B, T] log-probabilities of the sampled tokens; [B] ||g_i||^2 where they are needed; what makes the [1, D] gradient
sum_i c_i g_i of [B] coefficients c."""


class VCPOMethod:
    """As the patched Megatron actor does it: measure, estimate, step."""

    def __init__(self, vcpo: VCPOConfig, actor: Any, treatment: Truncated = Truncated.TRAIN) -> None:
        self._vcpo, self._treatment = vcpo, treatment
        self._mode, self._factor = actor.loss_agg_mode, actor.loss_scale_factor
        self._mismatch = Mismatch()

    def prepare(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        """Nothing is needed of the batch as a whole."""
        return {}

    def update(self, policy: Policy, batch: Batch, fields: dict[str, Tensor], lag: int) -> Update:
        measure = self._with_norms if self._vcpo.needs_gradient_norms else self._without_norms
        log_prob, norm, weighted = measure(policy, batch)
        log_weight = sequence_log_weights(log_prob, batch.rollout_log_prob, batch.mask)
        dropped = batch.truncated & (self._treatment is Truncated.DROP)
        masked = batch.truncated & (self._treatment is Truncated.MASK)
        parts = self._parts(batch, log_prob, log_weight.masked_fill(dropped | masked, math.nan), lag)
        step = self._estimate(batch, log_weight.masked_fill(dropped, math.nan), norm, masked, parts)
        usable = step.usable.any()
        return Update(
            gradient=weighted(-step.coefficient) if (step.usable & ~masked).any() else None,
            lr_multiplier=step.step_size_multiplier,
            log_prob=log_prob,
            log_weight=log_weight,
            ess_ratio=step.ess_ratio,
            baseline=step.baseline[step.usable].mean().item() if usable else math.nan,
            kl=kl(log_prob, batch),
            squared_norm=norm,
            estimate=step,
            of_truncated=parts_of_update(step, batch.truncated, norm),
            parts=parts,
        )

    def _estimate(
        self, batch: Batch, log_weight: Tensor, norm: Tensor | None, masked: Tensor, parts: WeightParts | None
    ) -> Estimate:
        return estimate(
            self._vcpo,
            log_weight,
            batch.reward,
            batch.group,
            squared_norm=norm,
            length=batch.mask.sum(dim=-1),
            masked=masked,
            lag_ess_ratio=parts.lag if parts else None,
        )

    def _parts(self, batch: Batch, log_prob: Tensor, log_weight: Tensor, lag: int) -> WeightParts | None:
        """The parts of a batch that one version has drawn, `lag` updates ago."""
        log_ratio = log_ratios(log_prob, batch.rollout_log_prob, batch.mask)
        tokens, squares = batch.mask.sum(dim=-1), squared_log_ratios(log_ratio).sum(-1)
        fresh = torch.stack([tokens, squares], dim=1) * (lag == 0)
        return self._mismatch.update(log_weight, jumps(log_ratio), tokens, squares, fresh)

    def _without_norms(self, policy: Policy, batch: Batch) -> Measured:
        log_prob = log_probs_of(policy, batch, self._have_signal(batch))

        def weighted(coefficient: Tensor) -> Tensor:
            return _gradient((coefficient.float() * self._score(log_prob, batch)).sum(), policy)

        return log_prob.detach(), None, weighted

    def _with_norms(self, policy: Policy, batch: Batch) -> Measured:
        """Of the distinct sequences with a signal; the others only need their log-probs, their norms are 1."""
        rows = self._have_signal(batch)
        log_prob, norm = torch.empty_like(batch.rollout_log_prob), torch.ones(len(batch), dtype=torch.float64)
        if not rows.all():
            with torch.no_grad():
                log_prob[~rows] = sampled_log_probs(policy, batch.rows(~rows))
        if not rows.any():
            return log_prob, norm, lambda coefficient: torch.zeros_like(policy.flat)
        part = batch.rows(rows)
        first, which = part.distinct
        only = part.rows(first)
        taps = Taps(only.separate)
        own = sampled_log_probs(policy, only, taps)
        gradients = block_gradients(self._score(own, only), taps)
        log_prob[rows], norm[rows] = own.detach()[which], squared_norms(gradients)[which]

        def weighted(coefficient: Tensor) -> Tensor:
            total = coefficient.new_zeros(len(first)).index_add_(0, which, coefficient[rows])
            return weighted_gradient(total, gradients, policy)

        return log_prob, norm, weighted

    def _have_signal(self, batch: Batch) -> Tensor:
        """[B] false where coefficients are 0 whatever the norms: in a group of equal rewards, compared within it."""
        if not self._vcpo.compares_samples_of_a_prompt:
            return torch.ones(len(batch), dtype=torch.bool)
        group = batch.group.unique(return_inverse=True)[1]
        return group_std(batch.reward, group) > 0

    def _score(self, log_prob: Tensor, batch: Batch) -> Tensor:
        """[B] of which the score gradients g_i are."""
        from verl_vcpo.actor.update.losses import aggregated

        return aggregated(log_prob, batch.mask, self._mode, self._factor)


class LossMethod:
    """verl's advantage estimator and policy loss.

    Args:
        actor: verl's ActorConfig.
        algorithm: the `algorithm` settings.
        treatment: of truncated responses.
    """

    def __init__(self, actor: Any, algorithm: DictConfig, treatment: Truncated = Truncated.TRAIN) -> None:
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

        import verl_vcpo.actor.policy_losses  # noqa: F401  # registers ours

        self._actor, self._algorithm, self._treatment = actor, algorithm, treatment
        self._loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
        self._advantages = get_adv_estimator_fn(algorithm.adv_estimator)

    def prepare(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        """What verl's trainer computes before the mini-batches: `old_log_probs`, `advantages`, maybe weights."""
        correction = self._algorithm.rollout_correction
        left_out, compared = batch.left_out(self._treatment)
        mask = batch.mask & ~left_out[:, None]
        fields = {"old_log_probs": batch.rollout_log_prob, "response_mask": mask, "left_out": left_out}
        if not correction.bypass_mode:
            with torch.no_grad():
                every = node_log_probs(policy, batch.tree)
            fields["old_log_probs"] = of_tokens(every, batch.tree, batch.response)
            fields |= self._correct(fields["old_log_probs"], batch, mask)
        fields["advantages"] = self._advantages(
            token_level_rewards=token_rewards(batch),
            response_mask=mask.float(),
            index=np.array(compared),
            **self._estimator_arguments(),
        )[0].float()
        return fields

    def _estimator_arguments(self) -> dict[str, Any]:
        if self._algorithm.adv_estimator == "grpo":
            return {"norm_adv_by_std_in_grpo": self._algorithm.norm_adv_by_std_in_grpo}
        return {}

    def _correct(self, old_log_prob: Tensor, batch: Batch, response_mask: Tensor) -> dict[str, Tensor]:
        """verl's correction between sampler and `old_log_prob` (its decoupled mode)."""
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

        settings = OmegaConf.to_container(self._algorithm.rollout_correction, resolve=True)
        names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
        weights, mask, _ = compute_rollout_correction_and_rejection_mask(
            old_log_prob=old_log_prob,
            rollout_log_prob=batch.rollout_log_prob,
            response_mask=response_mask,
            rollout_rs=settings["rollout_rs"],
            rollout_rs_threshold=settings["rollout_rs_threshold"],
            **{name: settings[name] for name in names},
        )
        corrected = {"response_mask": mask.bool()}
        return corrected if weights is None else corrected | {"rollout_is_weights": weights.batch["rollout_is_weights"]}

    def update(self, policy: Policy, batch: Batch, fields: dict[str, Tensor], lag: int) -> Update:
        rows = torch.ones(len(batch), dtype=torch.bool)
        if self._actor.policy_loss.loss_mode not in _NO_MULTIPLES:
            rows = fields["advantages"].any(dim=-1)
        log_prob, trained = log_probs_of(policy, batch, rows), ~fields["left_out"]
        self._actor.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=batch.mask[trained].sum().item(),
            global_batch_size=len(batch),
            loss_scale_factor=self._actor.loss_scale_factor,
        )
        loss = torch.zeros(())
        if trained.any():  # verl's losses refuse a batch without a token
            loss, _ = self._loss(
                old_log_prob=fields["old_log_probs"],
                log_prob=log_prob,
                advantages=fields["advantages"],
                response_mask=fields["response_mask"],
                loss_agg_mode=self._actor.loss_agg_mode,
                config=self._actor,
                rollout_is_weights=fields.get("rollout_is_weights"),
            )
        gradient, log_prob = _gradient(loss, policy), log_prob.detach()
        log_weight = sequence_log_weights(log_prob, batch.rollout_log_prob, batch.mask)
        return Update(
            gradient=gradient,
            lr_multiplier=1.0,
            log_prob=log_prob,
            log_weight=log_weight,
            ess_ratio=ess_ratio(log_weight[trained]),
            baseline=math.nan,
            kl=kl(log_prob, batch),
        )
