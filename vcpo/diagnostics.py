"""Signs of a collapse of training, in numbers that change before accuracy falls."""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class Sign(StrEnum):
    """A sign that training is about to collapse."""

    LOW_ESS_RATIO = "low_ess_ratio"
    """The ESS ratio is low for several steps: the update consists of a few sequences."""
    VANISHED_GRADIENT = "vanished_gradient"
    """The gradient norm jumped, then fell to almost zero: a large update has put the policy where no gradient is."""
    KL_GROWTH = "kl_growth"
    """KL(rollout || policy) is large for several steps: the trainer's policy is far from the sampler's."""


@dataclass(frozen=True)
class AlarmLevels:
    """The thresholds of the signs.

    docs/measurements/stability.md has the runs that the defaults were chosen on, and their precision and recall on
    others.
    """

    ess_ratio: float = 0.3
    """LOW_ESS_RATIO needs an ESS ratio below this value."""
    ess_steps: int = 10
    """LOW_ESS_RATIO needs this number of such steps in a row."""
    spike: float = 5.0
    """VANISHED_GRADIENT begins with a gradient norm above the median of the last `window` steps by this factor."""
    vanish: float = 0.1
    """VANISHED_GRADIENT then needs, within `window` steps, gradient norms below this fraction of the same median."""
    vanish_steps: int = 3
    """VANISHED_GRADIENT needs this number of small norms in a row: one batch of equal rewards has no gradient too."""
    kl: float = 0.25
    """KL_GROWTH needs a KL, in nats per token, above this value."""
    kl_steps: int = 5
    """KL_GROWTH needs this number of such steps in a row."""
    window: int = 20
    """The number of steps of the median, and of steps after a spike in which the gradient may vanish."""


class CollapseAlarm:
    """An alarm that looks for signs of a collapse in the steps of a run.

    A sign is reported at the step where it appears, and again only after it has disappeared.
    """

    def __init__(self, levels: AlarmLevels | None = None) -> None:
        self._levels = levels or AlarmLevels()
        self._low_steps = 0
        self._norms: deque[float] = deque(maxlen=self._levels.window)
        self._high_steps = 0
        self._spike: tuple[int, float] | None = None  # steps since, median before it
        self._small_steps = 0  # gradient norms below the fraction of that median, in a row
        self._present: set[Sign] = set()

    def update(self, ess_ratio: float, grad_norm: float, kl: float) -> list[Sign]:
        """Take in one step. Returns the signs that appeared at this step. NaN counts as above every level."""
        present = set()
        if self._low_ess_ratio(ess_ratio):
            present.add(Sign.LOW_ESS_RATIO)
        if self._vanished(grad_norm):
            present.add(Sign.VANISHED_GRADIENT)
        if self._kl_grows(kl):
            present.add(Sign.KL_GROWTH)
        new = sorted(present - self._present)
        self._present = present
        return new

    def _low_ess_ratio(self, ratio: float) -> bool:
        self._low_steps = self._low_steps + 1 if ratio < self._levels.ess_ratio else 0
        return self._low_steps >= self._levels.ess_steps

    def _vanished(self, norm: float) -> bool:
        levels, full = self._levels, len(self._norms) == self._levels.window
        usual = statistics.median(self._norms) if full else math.nan
        if self._spike is not None:
            steps, before = self._spike
            self._spike = (steps + 1, before) if steps < levels.window else None
        if full and not norm <= levels.spike * usual and self._spike is None:
            self._spike = (0, usual)
        if math.isfinite(norm):
            self._norms.append(norm)
        small = self._spike is not None and norm < levels.vanish * self._spike[1]
        self._small_steps = self._small_steps + 1 if small else 0
        return self._small_steps >= levels.vanish_steps

    def _kl_grows(self, kl: float) -> bool:
        self._high_steps = 0 if kl <= self._levels.kl else self._high_steps + 1
        return self._high_steps >= self._levels.kl_steps


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Sum over each sequence's tokens of the k3 estimate of KL(rollout || policy).

    k3 = r - 1 - log r with r = pi_theta / mu: never negative, unbiased for tokens drawn from mu
    (J. Schulman, "Approximating KL divergence", 2020). Divide the sum by the number of tokens for the mean.

    Args:
        log_ratio: [B, T] log r, of `vcpo.importance.log_ratios`.

    Returns:
        [B] float64, in nats.
    """
    return (log_ratio.exp() - 1 - log_ratio).sum(dim=-1)
