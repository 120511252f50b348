"""Effective sample size, and the step size that follows it (paper: "VCPO", effective-sample-size step scaling)."""

import math
from collections import deque
from typing import Any

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


def step_size_multiplier(ratio: float, rule: StepSizeRule, base_ratio: float, floor: float) -> float:
    """Return the factor of the learning rate at one optimizer step: a number in [floor, 1].

    Args:
        ratio: the ESS ratio rho of the mini-batch.
        rule: `sqrt` for Adam-style optimizers, `linear` for SGD, `none` for 1.
        base_ratio: rho_base, the ratio from which on the learning rate is not reduced.
        floor: the smallest multiplier.
    """
    if rule is StepSizeRule.NONE:
        return 1.0
    fraction = min(1.0, ratio / base_ratio)
    return max(floor, math.sqrt(fraction) if rule is StepSizeRule.SQRT else fraction)


class FreshestEssRatio:
    """rho_base measured while training: the ESS ratio of the freshest data (`base_ess_ratio=auto`).

    The mean of rho over the last `WINDOW` mini-batches among those with the smallest lag seen so far. Sampler and
    trainer compute the same policy in different arithmetic, so even on-policy data has rho below 1; that loss comes
    from numerics, not staleness, so it should not shrink the learning rate. In a lag-k run the freshest data is the
    first mini-batch (lag 0); with k = 0 it is the first mini-batch of every batch, since earlier updates of the same
    batch have moved the policy: the caller leaves later ones out. Stale data is left out: its low rho would lower
    rho_base, and thereby raise the step size on the stale data that should make the step smaller.
    """

    WINDOW = 16

    def __init__(self) -> None:
        self._lag = math.inf
        self._ratios: deque[float] = deque(maxlen=self.WINDOW)

    @property
    def value(self) -> float | None:
        """rho_base as measured so far, in (0, 1]; None before the first mini-batch."""
        return sum(self._ratios) / len(self._ratios) if self._ratios else None

    def update(self, ratio: float, lag: float) -> None:
        """Take in the ESS ratio of a mini-batch; ignore a ratio of 0, that of a mini-batch without usable weights.

        Args:
            ratio: rho of the mini-batch.
            lag: the largest lag among its trajectories, in policy versions.
        """
        if ratio <= 0 or lag > self._lag:
            return
        if lag < self._lag:
            self._ratios.clear()
            self._lag = lag
        self._ratios.append(ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON: a resumed run has no fresh data to measure again."""
        return {"lag": self._lag if self._ratios else None, "ratios": list(self._ratios)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._lag = math.inf if state["lag"] is None else state["lag"]
        self._ratios = deque(state["ratios"], maxlen=self.WINDOW)
