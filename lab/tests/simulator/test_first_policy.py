"""lab.stability begins with the published first policy, the same bytes everywhere, unless told otherwise."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from lab.simulator.grid import fingerprint
from lab.stability import __main__ as stability
from lab.stability import preset
from lab.stability.preset import TASKS, BenchTask, prepare
from recipe.fully_async_policy.settings import method

CONFIG = Path(method.__file__).resolve().parents[1] / "config"


@pytest.fixture
def task(tmp_path: Path) -> BenchTask:
    """Countdown, in folders of its own."""
    return replace(TASKS["countdown"], data=tmp_path / "data", model=tmp_path / "models/first")


@pytest.mark.parametrize("name", TASKS)
def test_it_is_published_with_what_it_was_taught(name: str) -> None:
    task = TASKS[name]
    settings = json.loads((task.published / "warm_start.json").read_text())["settings"]
    given = dict(zip(task.lesson[::2], task.lesson[1::2], strict=True))
    assert str(settings["steps"]) == given["--steps"]
    assert str(settings["correct_fraction"]) == given["--correct-fraction"]
    named = OmegaConf.load(CONFIG / f"task/{task.preset}.yaml")
    assert named.actor_rollout_ref.model.path == str(task.model)
    assert named.data.train_files == str(task.data / "train.parquet")
    assert sum(file.stat().st_size for file in task.published.iterdir()) < 1_000_000


def test_it_is_put_in_place_once(task: BenchTask) -> None:
    prepare(task)
    assert fingerprint(task.model) == fingerprint(task.published)
    made = (task.model / "model.safetensors").stat().st_mtime_ns
    prepare(task)
    assert (task.model / "model.safetensors").stat().st_mtime_ns == made


def test_another_policy_in_its_place_is_refused(
    task: BenchTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(task.published, task.model)
    weights = load_file(task.model / "model.safetensors")
    save_file({name: weight * 1.001 for name, weight in weights.items()}, task.model / "model.safetensors")
    monkeypatch.setitem(preset.TASKS, "countdown", task)
    assert stability.main(["--prepare"]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"stability: {task.model}: not the published first policy; remove it, or go on with it by --new-policy\n"
    )
