"""An intervention moves the level of the baseline, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from verl.utils.config import omega_conf_to_dataclass

from lab.simulator import main, rates
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


def test_the_lags_law_changes_the_step_and_nothing_else(overrides: list[str]) -> None:
    config = main.compose([*overrides, "method=vcpo_ess"])
    run = Simulator(config)
    run.roll_out(version=0)
    plain = run.method.update(run.policy, run.queue[0], {}, lag=64)
    law = rates.changed(rates.LAG_LAW, config)
    for lag, wanted in ((0, 1.0), (8, 1.0), (32, 1.0), (64, 0.5), (128, 0.25)):
        update = law.update(run.policy, run.queue[0], {}, lag=lag)
        assert update.lr_multiplier == wanted, "lag times rate is constant above lag 32"
        assert update.gradient is not None and plain.gradient is not None
        torch.testing.assert_close(update.gradient, plain.gradient)


def test_the_dual_variable_follows_the_variance_of_the_ratios(overrides: list[str]) -> None:
    run = Simulator(main.compose([*overrides, "method=r2vpo"]))
    run.method = rates.changed(rates.R2VPO_DUAL, main.compose([*overrides, "method=r2vpo"]))
    run.roll_out(version=0)
    batch, multipliers = run.queue[0], [0.0]
    for log_ratio in (0.0, 1.0, 0.2, 0.0):
        shifted = replace(batch, rollout_log_prob=batch.rollout_log_prob - log_ratio)
        update = run.method.update(run.policy, shifted, run.method.prepare(run.policy, shifted), lag=0)
        assert update.gradient is not None
        multipliers.append(run.method._actor.stabilizer["multiplier"])
    # (e - 1)^2 is above ten times the bound, (e^0.2 - 1)^2 is 0.0490
    assert multipliers == pytest.approx([0.0, 0.0, 1.0, 1.0 + 0.1 * 0.0490 / 0.04 - 0.1, 0.9 + 0.1225 - 0.1], abs=1e-3)
