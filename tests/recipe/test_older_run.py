"""A run never overwrites an older one: what that wrote is moved aside."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.checks.errors import SettingError
from recipe.fully_async_policy.older_run import set_aside
from verl_vcpo.trainer.ppo.v1 import checkpoint

LINES = '{"step": 0}\n{"step": 1}\n'


def config(run_dir: Path, model: str = "models/tiny", **trainer: Any) -> DictConfig:
    given = {"default_local_dir": f"{run_dir}/checkpoints", "resume_mode": "disable", "val_only": False, **trainer}
    actor = {"model": {"path": model}}
    return OmegaConf.create({"run_dir": str(run_dir), "trainer": given, "actor_rollout_ref": actor})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of a run that has trained, with a file of the user's."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    for name in ("metrics.jsonl", "samples.jsonl", "verl.log", "model/config.json", "notes.txt"):
        (folder / name).write_text(LINES)
    return folder


def checkpoint_in(root: Path, step: int) -> None:
    (checkpoint.staging(root) / f"global_step_{step}").mkdir()
    checkpoint.publish(root, step)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_it_is_moved_aside_each_time(run_dir: Path) -> None:
    checkpoint_in(run_dir / "checkpoints", 5)
    assert set_aside(config(run_dir)) == f"{run_dir} had an earlier run: its files are now in {run_dir}.1"
    assert files(run_dir) == ["notes.txt"], "a file of the user's stays"
    assert "checkpoints/global_step_5/manifest.json" in files(Path(f"{run_dir}.1"))
    assert Path(f"{run_dir}.1", "metrics.jsonl").read_text() == LINES
    (run_dir / "metrics.jsonl").write_text(LINES)
    assert set_aside(config(run_dir)).endswith(f"{run_dir}.2")
    assert files(Path(f"{run_dir}.2")) == ["metrics.jsonl"]


@pytest.mark.parametrize("left", [None, ""], ids=["no metrics", "empty metrics"])
def test_a_run_that_measured_nothing_leaves_its_place(run_dir: Path, left: str | None) -> None:
    (run_dir / "metrics.jsonl").unlink()
    if left is not None:
        (run_dir / "metrics.jsonl").write_text(left)
    assert set_aside(config(run_dir)) == ""
    assert not Path(f"{run_dir}.1").exists()


def test_a_run_that_goes_on_keeps_its_files(run_dir: Path) -> None:
    checkpoint_in(run_dir / "checkpoints", 5)
    before = files(run_dir)
    assert set_aside(config(run_dir, resume_mode="auto")) == ""
    assert set_aside(config(run_dir, resume_mode="resume_path")) == ""
    assert files(run_dir) == before


def test_without_a_checkpoint_auto_begins_anew(run_dir: Path) -> None:
    assert set_aside(config(run_dir, resume_mode="auto")).endswith(f"{run_dir}.1")


def test_checkpoints_elsewhere_do_not_mix_with_the_new_runs(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "scratch"
    checkpoint_in(elsewhere, 100)
    assert set_aside(config(run_dir, default_local_dir=str(elsewhere), val_only=True)), "an evaluation writes none"
    assert checkpoint.checkpoints(elsewhere)
    assert set_aside(config(run_dir, default_local_dir=str(elsewhere)))
    assert checkpoint.checkpoints(elsewhere) == [], "trainer.resume_mode=auto would take them for this run's"
    assert checkpoint.checkpoints(Path(f"{elsewhere}.2"))


def test_a_model_of_the_older_run_is_not_moved_from_under_the_new_one(run_dir: Path) -> None:
    with pytest.raises(SettingError, match=r"model\.path=.*: an earlier run wrote it .*; give this run a folder"):
        set_aside(config(run_dir, model=f"{run_dir}/model"))
    assert (run_dir / "metrics.jsonl").is_file()


def test_where_it_cannot_be_moved_nothing_starts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.rename", rename)
    with pytest.raises(SettingError, match=r"cannot be moved to .*run\.1 \(.*cross-device link\); give another folder"):
        set_aside(config(run_dir))
