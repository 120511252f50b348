"""The digits that two sums lose in float32: predicted from norms and coefficients, before the optimizer step.

`main - (b - m) second` is a difference of two sums. Sequence i has the norm |R_i - m| ||h_i|| / s in the first sum,
|b - m| ||h_i|| / s in the second, and |R_i - b| ||h_i|| / s in the difference. Where one sequence has almost all the
influence on b, R_i - b is almost 0 for that sequence, and rounding its two terms may outweigh all other sequences.
Where all weights of a baseline are tiny, float32 cannot hold the squares of h_i = a_i g_i, and so b is in doubt.
"""

import math

import torch
from torch import Tensor

from vcpo import Estimate, OpobScope
from vcpo.baseline import group_sum, weighted_mean
from vcpo.estimator import log_opob_weights, log_packed_weights
from verl_vcpo.actor.update.mini_batch import MiniBatch
from verl_vcpo.actor.vcpo_settings import VCPOSettings

LIMIT = 5e-5
"""The largest error of the gradient with which the two sums are used."""

_EPSILON = torch.finfo(torch.float32).eps / 2
# A CPU adds so many sequences to a sum at a time, and each addition rounds the sum (vcpo/gradnorm/linear.py).
_ADDED_AT_ONCE = 4
# The most that squaring and adding lose of ||h_i||^2: float32's smallest normal number, for each of 1e12 weights.
_LOST = 1e12 * torch.finfo(torch.float32).tiny


def predicted(
    config: VCPOSettings, batch: MiniBatch, step: Estimate, common: Tensor, scale: Tensor, baselines: int
) -> tuple[float, float]:
    """Predict the errors of two sums on one global mini-batch: on the host, the same on every rank.

    Errors are relative to the gradient's norm, the sequences' gradients taken as orthogonal.

    Args:
        config: VCPO's settings, with `baseline=opob`.
        batch: B sequences, with the norms of g_i.
        step: the estimate of `batch`.
        common: [B] m of each sequence, the commonest reward.
        scale: [B] 1 / (s B) of each sequence.
        baselines: the number of baselines whose sequences are in the first sum when the second is subtracted.

    Returns:
        The errors of the difference (cancellation) and of the baselines (underflow).
    """
    rows = step.usable
    if batch.squared_norm is None or not rows.any():
        return 0.0, 0.0
    log_used = log_packed_weights(config, batch.log_weight[rows])
    squared, reward, baseline = batch.squared_norm[rows], batch.reward[rows], step.baseline[rows]
    common, scale = common[rows], scale[rows]
    weighted = squared * (2 * log_used).exp()  # [B] ||h_i||^2
    left = (step.coefficient[rows] * squared.sqrt()).norm().item()
    log_a = log_opob_weights(config, batch.log_weight[rows], log_used, batch.tokens[rows])
    log_influence = 2 * (log_a - log_used) + (weighted + _LOST).log()
    group = torch.unique(batch.group[rows], return_inverse=True)[1]
    if config.opob_scope is OpobScope.MINIBATCH:
        group = torch.zeros_like(group)
        log_influence = log_influence + 2 * scale.log()

    size = scale * weighted.sqrt()  # [B] ||h_i|| / (s B)
    together = group_sum(torch.ones_like(size), group)  # [B] sequences of the same baseline
    roundings = [(n * together / _ADDED_AT_ONCE).clamp(min=1.0).sqrt() * _EPSILON for n in (baselines, 1)]
    error = (roundings[0] * (reward - common).abs() + roundings[1] * (baseline - common).abs()) * size
    unknown = _LOST / (weighted + _LOST)
    of_baseline = weighted_mean(unknown * (reward - baseline).abs(), log_influence, group)  # [B] the error of b
    lost = (of_baseline * scale * (weighted + _LOST).sqrt()).sum().item()
    return _ratio(error.norm().item(), left), _ratio(lost, left)


def _ratio(error: float, left: float) -> float:
    return error / left if left else math.inf * error if error else 0.0
