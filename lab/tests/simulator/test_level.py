"""An intervention moves the level of the baseline, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from verl.utils.config import omega_conf_to_dataclass

from lab.simulator import main
from lab.simulator.grid import Folder, GridRun, run_all
from lab.simulator.level import (
    BASES,
    MEAN_WITH_LEVEL,
    OPOB_WITHOUT_LEVEL,
    HalfMeanLoss,
    Intervened,
    moved,
)
from lab.simulator.simulator import Simulator
from vcpo.baseline import group_std
from verl_vcpo.actor.vcpo_settings import VCPOSettings


@pytest.mark.parametrize(("name", "level"), [(MEAN_WITH_LEVEL, 0.25), (OPOB_WITHOUT_LEVEL, 0.0)], ids=str)
def test_the_level_is_what_the_intervention_says(overrides: list[str], name: str, level: float) -> None:
    config = main.compose([*overrides, f"method={BASES[name]}"])
    run = Simulator(config)
    run.roll_out(version=0)
    batch = replace(run.queue[0], reward=torch.tensor([1, 1, 0, 1, 0, 1, 0, 0], dtype=torch.float64))
    run.policy.flat.detach().mul_(1.01)  # off policy
    plain = run.method.update(run.policy, batch, {}, lag=0)
    settings, actor = VCPOSettings.of(config.vcpo), config.actor_rollout_ref.actor
    update = Intervened(settings, actor, moved(name, {1: 0.25})).update(run.policy, batch, {}, lag=0)
    assert update.level == pytest.approx(level, abs=1e-12)
    assert update.lr_multiplier == plain.lr_multiplier and plain.level != update.level
    step = update.estimate
    assert step is not None and plain.estimate is not None and torch.equal(step.weight, plain.estimate.weight)
    advantage = (batch.reward - step.baseline) / group_std(batch.reward, batch.group)
    torch.testing.assert_close(step.coefficient, step.weight * advantage / 8)


def test_advantages_over_half_of_the_mean(overrides: list[str]) -> None:
    config = main.compose([*overrides, "method=topr"])
    run = Simulator(config)
    run.roll_out(version=0)
    batch = replace(run.queue[0], reward=torch.tensor([1, 1, 0, 1, 0, 0, 0, 0], dtype=torch.float64))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    plain, half = (
        method.prepare(run.policy, batch)["advantages"]
        for method in (run.method, HalfMeanLoss(actor, config.algorithm))
    )
    for rows in (batch.group == group for group in batch.group.unique()):
        reward = batch.reward[rows]
        wanted = (reward - 0.5 * reward.mean()) / (reward.std() + 1e-6) if reward.std() else torch.zeros_like(reward)
        torch.testing.assert_close(half[rows][:, 0], wanted.float())
    assert not torch.equal(plain, half)


def test_recorded_levels_are_those_of_the_run_with_opob(
    folder_settings: tuple[str, ...], assets: Path, tmp_path: Path
) -> None:
    folder = Folder(tmp_path, "countdown_lag", folder_settings)
    folder.open(assets / "model")
    opob, mean = (GridRun(method, 1, 1, 1e-3) for method in ("vcpo", MEAN_WITH_LEVEL))
    with pytest.raises(ValueError, match="make the runs of method vcpo first"):
        list(run_all([(mean, folder)], workers=1))
    for run in (opob, mean):
        list(run_all([(run, folder)], workers=1))
    levels = folder.curves([opob, mean]).pivot_table(index="step", columns="method", values=["level", "reward"])
    assert levels["level", "vcpo"].any() and set(levels["reward"]) == {"vcpo", MEAN_WITH_LEVEL}
    signal = levels["level", MEAN_WITH_LEVEL] != 0  # a batch without a signal has no level
    torch.testing.assert_close(
        torch.tensor(levels["level", MEAN_WITH_LEVEL][signal].to_numpy()),
        torch.tensor(levels["level", "vcpo"][signal].to_numpy()),
    )
