"""The lag is exact, a seed decides everything, every stabilizer runs, and a grid resumes."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from recipe.lag_simulator import main
from recipe.lag_simulator.grid import Folder, GridRun, run_all
from recipe.lag_simulator.simulator import Simulator
from scripts.bench.stability.preset import METHODS


def rows(overrides: list[str], *more: str) -> list[dict[str, float]]:
    return Simulator(main.compose([*overrides, *more])).run()


@pytest.mark.parametrize("lag", [0, 2])
def test_every_batch_is_exactly_as_old_as_asked_for(overrides: list[str], lag: int) -> None:
    steps = rows(overrides, f"async.lag={lag}")[1:]
    assert [row["lag_max"] for row in steps] == [min(step, lag) for step in range(6)]
    assert steps[0]["kl"] < 1e-9 and (steps[-1]["kl"] < 1e-9) == (lag == 0)


def test_the_seed_decides(overrides: list[str]) -> None:
    one, same, other = (rows(overrides, "async.lag=1", f"data.seed={seed}") for seed in (3, 3, 4))
    assert json.dumps(one) == json.dumps(same) != json.dumps(other)


def test_looking_at_a_run_does_not_change_it(overrides: list[str]) -> None:
    often, seldom = (rows(overrides, f"trainer.test_freq={frequency}") for frequency in (1, 6))
    assert [row["grad_norm"] for row in often[1:]] == [row["grad_norm"] for row in seldom[1:]]
    assert sum("val_accuracy" in row for row in often) == 7 and sum("val_accuracy" in row for row in seldom) == 2


def test_accuracy_is_of_drawn_or_of_the_most_likely_responses(overrides: list[str]) -> None:
    drawn, greedy = (
        Simulator(main.compose([*overrides, f"actor_rollout_ref.rollout.val_kwargs.{setting}"]))
        for setting in ("n=8", "do_sample=false")
    )
    assert greedy.accuracy() == greedy.accuracy()
    assert len({drawn.accuracy() for _ in range(5)}) > 1


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs(overrides: list[str], method: str) -> None:
    steps = rows(overrides, f"method={method}", "async.lag=1", "trainer.total_training_steps=3")
    assert [row["step"] for row in steps] == [0, 1, 2, 3] and all(row["finite"] for row in steps[1:])


def test_methods_without_a_correction_agree_on_policy(overrides: list[str]) -> None:
    """On policy every weight is 1 and every clip open: the first steps are the same."""
    names = (
        "none",
        "tis_token",
        "tis_seq",
        "mis",
        "whitened",
        "ppo",
        "topr",
        "vespo",
        "m2po",
        "sat",
        "tis_tempered_kl",
    )
    runs = {n: rows(overrides, f"method={n}", "async.lag=0", "trainer.total_training_steps=2") for n in names}
    for name, steps in runs.items():
        for row, reference in zip(steps[1:], runs["none"][1:], strict=True):
            assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3), name


def test_a_critic_learns_the_rewards(overrides: list[str]) -> None:
    """The same batch again and again, the actor standing still: values go to the reward."""
    settings = ["method=a2c", "async.lag=0", "critic.optim.lr=1e-3", "actor_rollout_ref.actor.optim.lr=0"]
    simulator = Simulator(main.compose([*overrides, *settings]))
    batch = simulator.roll_out(list(range(4)), version=0)
    critic, batch = simulator.method, replace(batch, reward=torch.full_like(batch.reward, 0.7))
    errors = []
    for _ in range(20):
        fields = critic.prepare(simulator.policy, batch)
        errors.append((fields["values"][:, 0] - batch.reward).square().mean().item())
        critic.update(simulator.policy, batch, fields, lag=0)
    assert errors[0] == pytest.approx(0.49), "it starts at 0"
    assert errors[-1] < 0.5 * errors[0]


def test_several_mini_batches_are_one_version(overrides: list[str]) -> None:
    steps = rows(overrides, "method=decoupled_ppo", "async.lag=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    assert steps[-1]["step"] == 6 and steps[-1]["lag_max"] == 1


def test_the_command_writes_its_curve(overrides: list[str], tmp_path: Path) -> None:
    assert main.main([*overrides, "async.lag=1"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(7)) and lines[0]["val_accuracy"] is not None


@pytest.mark.parametrize(
    "setting, message",
    [
        ("async.exact_lag=false", "async.exact_lag=False: the simulator knows true only"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "ppo_epochs=2: the simulator knows 1 only"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=0.5", "temperature=0.5: the simulator knows 1.0 only"),
        ("method=magic", "magic"),
        ("async.lag=-1", "async.lag=-1: give a number of policy updates"),
    ],
)
def test_a_wrong_setting(overrides: list[str], capsys: pytest.CaptureFixture[str], setting: str, message: str) -> None:
    assert main.main([*overrides, setting]) == 2
    assert message in capsys.readouterr().err


def test_a_grid_goes_on_where_it_stopped(overrides: list[str], assets: Path, tmp_path: Path) -> None:
    settings = tuple(o for o in overrides if not o.startswith(("+task", "run_dir")))
    folder = Folder(tmp_path / "grid", settings)
    folder.open(assets / "model")
    first, second = GridRun("vcpo", 0, 1, 1e-3), GridRun("tis_seq", 1, 1, 1e-3)
    assert list(run_all([first], folder, workers=1)) == [first]
    made = folder.file(first).stat().st_mtime_ns
    assert list(run_all([first, second], folder, workers=2)) == [first, second]
    assert folder.file(first).stat().st_mtime_ns == made, "a run that is there is not made again"
    curves = folder.curves([first, second])
    assert set(curves["method"]) == {"vcpo", "tis_seq"} and len(curves) == 14
    same = pd.DataFrame(rows(overrides, "async.lag=0", "actor_rollout_ref.actor.optim.lr=1e-3"))
    mine = curves[curves["method"] == "vcpo"][same.columns].reset_index(drop=True)
    pd.testing.assert_frame_equal(mine, same, check_dtype=False)
    with pytest.raises(ValueError, match="holds runs of other settings"):
        Folder(folder.path, settings[1:]).open(assets / "model")

    published = tmp_path / "curves.parquet"
    folder.publish(curves, published)
    other = Folder(tmp_path / "another", settings)
    other.open(assets / "model")
    other.adopt(published)
    pd.testing.assert_frame_equal(other.curves([first, second]), curves)
    fewer = Folder(tmp_path / "fewer", settings[1:])
    fewer.open(assets / "model")
    with pytest.raises(ValueError, match="holds runs of other settings"):
        fewer.adopt(published)
