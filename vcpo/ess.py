"""Effective sample size, and the step size that follows it (paper: "VCPO", effective-sample-size step scaling)."""

import math

import torch
from torch import Tensor

from vcpo.config import StepSizeRule


def ess_ratio(log_weight: Tensor) -> float:
    """Return rho = (sum w)^2 / (B sum w^2), computed in log space and without an epsilon.

    Args:
        log_weight: [B] log-weights of the *global* mini-batch: every data-parallel rank's sequences.

    Returns:
        A number in [1/B, 1]: 1 when all weights are equal, 1/B when one sequence has all the weight. 0 for a batch
        without any finite weight, so that such a batch makes the step smaller, never larger.
    """
    if log_weight.numel() == 0:
        return 0.0
    log_weight = log_weight.double()
    top = log_weight.max()
    if not torch.isfinite(top):
        return 0.0
    weight = (log_weight - top).exp()  # the largest weight is 1, so no sum overflows or underflows
    batch = log_weight.numel()
    ratio = (weight.sum().square() / weight.square().sum() / batch).item()
    return min(1.0, max(1.0 / batch, ratio))


def step_size_multiplier(ratio: float, rule: StepSizeRule, base_ratio: float) -> float:
    """Return the factor of the learning rate at one optimizer step: a number in [0, 1].

    Args:
        ratio: the ESS ratio rho of the mini-batch.
        rule: `sqrt` for Adam-style optimizers, `linear` for SGD, `none` for 1.
        base_ratio: rho_base, the ratio from which on the learning rate is not reduced.
    """
    if rule is StepSizeRule.NONE:
        return 1.0
    fraction = min(1.0, ratio / base_ratio)
    return math.sqrt(fraction) if rule is StepSizeRule.SQRT else fraction
