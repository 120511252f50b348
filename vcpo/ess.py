"""Effective sample size, and the step size that follows it."""

import math

import torch
from torch import Tensor

from vcpo.config import StepSizeRule


def ess_ratio(log_weight: Tensor) -> float:
    """rho = (sum w)^2 / (B sum w^2), in log space and without an epsilon.

    Args:
        log_weight: [B] log-weights of the *global* mini-batch: every data-parallel rank's sequences.

    Returns:
        A number in [1/B, 1]: 1 when all weights are equal, 1/B when one sequence has all of it. 0 for a batch
        that has no finite weight at all, so that such a batch slows the step down and never speeds it up.
    """
    if log_weight.numel() == 0:
        return 0.0
    log_weight = log_weight.double()
    top = log_weight.max()
    if not torch.isfinite(top):
        return 0.0
    weight = (log_weight - top).exp()  # the largest is 1: neither sum over- or underflows
    batch = log_weight.numel()
    ratio = (weight.sum().square() / weight.square().sum() / batch).item()
    return min(1.0, max(1.0 / batch, ratio))


def step_size_multiplier(ratio: float, rule: StepSizeRule, base_ratio: float, floor: float) -> float:
    """What the learning rate is multiplied by at this optimizer step: a number in [floor, 1].

    Args:
        ratio: the ESS ratio rho of the mini-batch.
        rule: `sqrt` for Adam-style optimizers, `linear` for SGD, `none` for 1.
        base_ratio: rho_base, the ratio that earns the full learning rate.
        floor: the smallest multiplier.
    """
    if rule is StepSizeRule.NONE:
        return 1.0
    fraction = min(1.0, ratio / base_ratio)
    return max(floor, math.sqrt(fraction) if rule is StepSizeRule.SQRT else fraction)
