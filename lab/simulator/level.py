"""Other levels of a baseline: does OPOB gain by its level, and is another level better?

The level of a step is OPOB's baseline less the mean reward of the group, a mean over the sequences with a signal
(`lab.simulator.update.level`). lab/stability/predictions.md says what each intervention should do,
lab/stability/candidates.md what each candidate for a better method.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.simulator import rates
from lab.simulator.batch import Batch
from lab.simulator.update import LossMethod, VCPOMethod, level
from vcpo import Estimate, VCPOConfig
from vcpo.baseline import group_mean, group_std, group_sum
from vcpo.estimator import log_reward_scale

MEAN_WITH_LEVEL, OPOB_WITHOUT_LEVEL = "mean_with_level", "opob_without_level"
TOPR_HALF, NONE_HALF = "topr_half", "none_half"
RECORDED_FROM = "vcpo"
"""The method whose levels `mean_with_level` is given: of its run with the same lag, seed and rate."""
BASES = {
    MEAN_WITH_LEVEL: "vcpo_ess",
    OPOB_WITHOUT_LEVEL: "vcpo",
    TOPR_HALF: "topr",
    NONE_HALF: "none",
    **rates.BASES,
}
"""By name, the method that is changed in one thing: the baseline, or what lab.simulator.rates has."""

Moved = Callable[[Estimate, Batch], Tensor | float]
"""A function of a step and its batch: the number that is added to the baseline of each sequence."""


class Intervened(VCPOMethod):
    """VCPO's update with every baseline moved.

    Args:
        vcpo: the settings of the method in `BASES`.
        actor: verl's ActorConfig.
        moved: by how much.
    """

    def __init__(self, vcpo: VCPOConfig, actor: Any, moved: Moved) -> None:
        super().__init__(vcpo, actor)
        self._moved = moved

    def _estimate(self, *given: Any) -> Estimate:
        step = super()._estimate(*given)
        batch: Batch = given[0]
        if not step.usable.any():
            return step
        by = self._moved(step, batch)
        scale = log_reward_scale(self._vcpo, batch.reward, _groups(batch)).exp() / step.usable.sum()
        coefficient = (step.coefficient - step.weight * scale * by).where(step.usable, 0.0)
        return replace(step, coefficient=coefficient, baseline=(step.baseline + by).where(step.usable, 0.0))


class HalfMeanLoss(LossMethod):
    """A policy loss whose advantages are (R - mean / 2) / deviation: GRPO's, and half of the mean more."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        grpo = self._advantages

        def advantages(**batch: Any) -> tuple[Tensor, Tensor]:
            found, reward = grpo(**batch)[0], batch["token_level_rewards"].sum(-1)
            group = torch.from_numpy(np.unique(batch["index"], return_inverse=True)[1])
            size = group_sum(torch.ones_like(reward), group)
            deviation = group_std(reward, group) * (size / (size - 1)).sqrt()  # torch.std's, which GRPO divides by
            more = torch.where(deviation > 0, 0.5 * group_mean(reward, group) / (deviation + 1e-6), 0.0)
            found = found + more[:, None] * batch["response_mask"]
            return found, found

        self._advantages = advantages


def moved(name: str, recorded: Mapping[int, float]) -> Moved:
    """Return how an intervention moves baselines.

    Args:
        name: one of `BASES`.
        recorded: by step, the level in the run of `RECORDED_FROM`; needed by `mean_with_level`.
    """
    steps = iter(sorted(recorded))
    if name == MEAN_WITH_LEVEL:
        return lambda step, batch: recorded[next(steps)]
    assert name == OPOB_WITHOUT_LEVEL
    return lambda step, batch: -level(step, batch)


def _groups(batch: Batch) -> Tensor:
    return batch.group.unique(return_inverse=True)[1]
