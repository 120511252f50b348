"""The lag is exact, a seed decides everything, every stabilizer runs, and a grid resumes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.simulator import main, simulator, update
from lab.simulator.analysis import LAST, LAST_SAMPLES
from lab.simulator.grid import Folder, GridRun, run_all
from lab.simulator.policy import Policy
from lab.simulator.sampling import sample
from lab.simulator.simulator import Simulator
from lab.simulator.task import TokenizedPrompts
from lab.stability.preset import METHODS
from lab.stability.published import adopt, publish

TASK = "countdown_lag"


def rows(overrides: list[str], *more: str) -> list[dict[str, float]]:
    return Simulator(main.compose([*overrides, *more])).run()


@pytest.mark.parametrize("lag", [0, 2])
def test_every_batch_is_exactly_as_old_as_asked_for(overrides: list[str], lag: int) -> None:
    steps = rows(overrides, f"async.lag={lag}")[1:]
    assert [row["lag_max"] for row in steps] == [min(step, lag) for step in range(6)]
    assert steps[0]["kl"] < 1e-9 and (steps[-1]["kl"] < 1e-9) == (lag == 0)


def test_without_arithmetic_the_lag_part_is_the_whole(overrides: list[str]) -> None:
    whole, of_lag = (rows(overrides, "async.lag=2", f"vcpo.ess_part={part}") for part in ("whole", "lag"))
    for one, other in zip(whole[1:], of_lag[1:], strict=True):
        assert {name: pytest.approx(value, rel=1e-4) for name, value in one.items()} == other
        assert one["actor/vcpo/ess/lag"] == pytest.approx(one["ess_ratio"], rel=1e-6)


def test_the_seed_decides(overrides: list[str]) -> None:
    one, same, other = (rows(overrides, "async.lag=1", f"data.seed={seed}") for seed in (3, 3, 4))
    assert json.dumps(one) == json.dumps(same) != json.dumps(other)


def test_looking_at_a_run_does_not_change_it(overrides: list[str]) -> None:
    often, seldom = (rows(overrides, f"trainer.test_freq={frequency}") for frequency in (1, 6))
    assert [row["grad_norm"] for row in often[1:]] == [row["grad_norm"] for row in seldom[1:]]
    assert sum("val_accuracy" in row for row in often) == 7 and sum("val_accuracy" in row for row in seldom) == 2


def test_the_last_policy_is_evaluated_with_several_samples(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[int] = []

    def counted(policy: Policy, prompts: TokenizedPrompts, samples: int, *more: Any) -> Any:
        evaluated.append(samples)
        return sample(policy, prompts, samples, *more)

    monkeypatch.setattr(simulator, "sample", counted)
    steps = rows(overrides, "trainer.total_training_steps=2", "trainer.test_freq=1")
    assert evaluated == [1, 1, 1, LAST_SAMPLES, 1], "and the most likely ones"
    assert ["last_accuracy" in row for row in steps] == [False, False, True]
    drawn, greedy, one_of_eight, nats = (steps[-1][name] for name in LAST)
    assert 0 <= drawn <= one_of_eight <= 1 and 0 <= greedy <= 1 and nats > 0
    assert 1 / 8 <= steps[-1]["largest_share"] <= 1 and steps[-1]["log_weight_max"] >= 0
    assert steps[1]["log_weight_std"] == pytest.approx(0, abs=1e-4) and steps[-1]["log_weight_std"] > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs(overrides: list[str], method: str) -> None:
    steps = rows(overrides, f"method={method}", "async.lag=1", "trainer.total_training_steps=3")
    assert [row["step"] for row in steps] == [0, 1, 2, 3] and all(row["finite"] for row in steps[1:])


@pytest.mark.parametrize(
    "settings",
    [
        [
            f"method={name}"
            for name in (
                *("none", "tis_token", "tis_seq", "mis", "whitened", "ppo", "topr", "vespo", "m2po", "sat"),
                *("p3o", "r2vpo", "dppo_tv", "dppo_kl"),
            )
        ],
        # rewards divided by the population's standard deviation
        ["vcpo.baseline=mean", "vcpo.baseline=mean vcpo.step_size_rule=none"],
    ],
    ids=lambda settings: settings[0],
)
def test_methods_without_a_correction_agree_on_policy(overrides: list[str], settings: list[str]) -> None:
    """On policy every weight is 1 and every clip open: the first steps are the same."""
    steps_of_two = [*overrides, "async.lag=0", "trainer.total_training_steps=2"]
    runs = {given: rows(steps_of_two, *given.split()) for given in settings}
    for name, steps in runs.items():
        for row, reference in zip(steps[1:], runs[settings[0]][1:], strict=True):
            assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3), name


@pytest.mark.parametrize("method", METHODS)
def test_groups_of_equal_rewards_need_no_backward(
    overrides: list[str], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is the same with and without them."""
    run = Simulator(main.compose([*overrides, f"method={method}"]))
    run.roll_out(version=0)
    batch = replace(run.queue[0], reward=torch.tensor([1, 1, 1, 1, 0, 1, 0, 0], dtype=torch.float64))
    run.policy.flat.detach().mul_(1.01)  # off policy
    fields = run.method.prepare(run.policy, batch)
    torch.manual_seed(0)
    without = run.method.update(run.policy, batch, fields, lag=0).gradient
    monkeypatch.setattr(update, "log_probs_of", lambda policy, batch, rows: update.sampled_log_probs(policy, batch))
    monkeypatch.setattr(update.VCPOMethod, "_have_signal", lambda self, batch: torch.ones(8, dtype=torch.bool))
    torch.manual_seed(0)
    whole = run.method.update(run.policy, batch, fields, lag=0).gradient
    assert whole.any()
    torch.testing.assert_close(without, whole, rtol=1e-4, atol=1e-6 * whole.abs().max().item())


BREAKS = "actor_rollout_ref.actor.optim.weight_decay=1e38"


def test_a_run_that_breaks_stops(overrides: list[str]) -> None:
    """Weights of 1e30 have no finite outputs, and no finite gradient."""
    broken = rows(overrides, "method=none", BREAKS)
    assert not broken[-1]["finite"] and broken[-1]["step"] < 6


def test_several_mini_batches_are_one_version(overrides: list[str]) -> None:
    steps = rows(overrides, "method=decoupled_ppo", "async.lag=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    assert steps[-1]["step"] == 6 and steps[-1]["lag_max"] == 1


def test_the_command_ends_well_where_a_run_breaks(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*overrides, "method=none", BREAKS]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/run: " in out and "0.0% after" in out and "mean ESS ratio" in out


def test_a_grid_goes_on_where_it_stopped(
    overrides: list[str], folder_settings: tuple[str, ...], assets: Path, tmp_path: Path
) -> None:
    folder = Folder(tmp_path / "grid", TASK, folder_settings)
    folder.open(assets / "model")
    first, second = GridRun("vcpo", 0, 1, 1e-3), GridRun("tis_seq", 1, 1, 1e-3)
    assert list(run_all([(first, folder)], workers=1)) == [first]
    made = folder.file(first).stat().st_mtime_ns
    assert list(run_all([(first, folder), (second, folder)], workers=2)) == [first, second]
    assert folder.file(first).stat().st_mtime_ns == made, "a run that is there is not made again"
    curves = folder.curves([first, second])
    assert set(curves["method"]) == {"vcpo", "tis_seq"} and len(curves) == 14
    same = pd.DataFrame(rows(overrides, "async.lag=0", "actor_rollout_ref.actor.optim.lr=1e-3"))
    mine = curves[curves["method"] == "vcpo"][same.columns].reset_index(drop=True)
    pd.testing.assert_frame_equal(mine, same, check_dtype=False)
    with pytest.raises(ValueError, match="holds runs of other settings"):
        Folder(folder.path, TASK, folder_settings[1:]).open(assets / "model")

    published = tmp_path / "curves.parquet"
    publish({TASK: curves}, published)
    other = Folder(tmp_path / "another", TASK, folder_settings)
    other.open(assets / "model")
    adopt(other, published)
    kept = ["method", "lag", "seed", "lr", "step", "val_accuracy"]
    pd.testing.assert_frame_equal(other.curves([first, second])[kept], curves[kept], check_dtype=False)
    publish({TASK: other.curves([first, second])}, tmp_path / "again.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(published), pd.read_parquet(tmp_path / "again.parquet"))
    fewer = Folder(tmp_path / "fewer", TASK, folder_settings[1:])
    fewer.open(assets / "model")
    with pytest.raises(ValueError, match="holds runs of other settings"):
        adopt(fewer, published)


def test_runs_from_another_first_policy_are_not_mixed(assets: Path, tmp_path: Path) -> None:
    """The same settings, other weights."""
    another = tmp_path / "model"
    shutil.copytree(assets / "model", another)
    weights = load_file(another / "model.safetensors")
    save_file({name: weight * 1.001 for name, weight in weights.items()}, another / "model.safetensors")
    run = GridRun("vcpo", 0, 1, 1e-3)
    folder, other = Folder(tmp_path / "grid", TASK), Folder(tmp_path / "other", TASK)
    folder.open(assets / "model")
    folder.write(run, pd.DataFrame([{"step": 0, "val_accuracy": 0.25, "finite": 1.0}]))
    published = tmp_path / "curves.parquet"
    publish({TASK: folder.curves([run])}, published)
    with pytest.raises(ValueError, match=f"--out {folder.path}: holds runs of another first policy"):
        folder.open(another)
    other.open(another)
    with pytest.raises(ValueError, match=f"--known {published}: holds runs of another first policy"):
        adopt(other, published)
    assert not other.has(run)
