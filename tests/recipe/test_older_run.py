"""A run never overwrites an older one: what that wrote is moved aside."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy import main
from recipe.fully_async_policy.launch.older_run import set_aside
from recipe.fully_async_policy.settings.errors import SettingError
from tests.kit.checkpoints import write_checkpoint
from verl_vcpo.common.run_id import RUN_ID_FILE, run_in
from verl_vcpo.loop import checkpoint
from verl_vcpo.report.metrics_file import SAVE_S

LINES = '{"step": 0}\n{"step": 1}\n'
A, B, C = "a" * 12, "b" * 12, "c" * 12
"""Ids of launches."""


def config(run_dir: Path, model: str = "models/tiny", **trainer: Any) -> DictConfig:
    given = {"default_local_dir": f"{run_dir}/checkpoints", "resume_mode": "disable", "val_only": False}
    given |= {"max_actor_ckpt_to_keep": None, "resume_from_path": None, "save_freq": 5, **trainer}
    actor = {"model": {"path": model}}
    return OmegaConf.create({"run_dir": str(run_dir), "trainer": given, "actor_rollout_ref": actor})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of a run that has trained, with a file of the user's."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    for name in (
        "metrics.jsonl",
        "samples.jsonl",
        "skipped_prompts.jsonl",
        "verl.log",
        "verl.log.1",
        "model/config.json",
        "notes.txt",
    ):
        (folder / name).write_text(LINES)
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_it_is_moved_aside_each_time(run_dir: Path) -> None:
    write_checkpoint(run_dir / "checkpoints", 5)
    assert set_aside(config(run_dir)) == f"{run_dir} had an earlier run's files: they are now in {run_dir}.1"
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
    (run_dir / RUN_ID_FILE).write_text(A)
    assert set_aside(config(run_dir)) == ""
    assert not Path(f"{run_dir}.1").exists()


def test_a_user_s_files_of_the_names_that_a_run_gives_are_moved(tmp_path: Path) -> None:
    for name in ("ray_logs/mine", "summary.json", "config.yaml"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("mine")
    set_aside(config(tmp_path / "run"))
    assert files(tmp_path / "run.1") == ["config.yaml", "ray_logs/mine", "summary.json"] and not files(tmp_path / "run")


def begin(run_dir: Path, launch: str, *steps: int, **trainer: Any) -> DictConfig:
    """What a launch does with the folders: takes them over, chooses a checkpoint, writes those of `steps`."""
    settings = config(run_dir, **trainer)
    saved = Path(settings.trainer.default_local_dir)
    with main._folders(settings, launch):
        checkpoint.choose(settings.trainer)
        for step in steps:
            write_checkpoint(saved, step, run_in(run_dir), keep=settings.trainer.max_actor_ckpt_to_keep)
    return settings


def names(saved: Path) -> list[str]:
    return [path.name for path in checkpoint.checkpoints(saved)]


@pytest.mark.parametrize("inside", [True, False], ids=["in run_dir", "elsewhere"])
def test_a_new_run_keeps_its_own_checkpoints_and_goes_on_from_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: bool
) -> None:
    """Where the older run had more steps, and both keep two checkpoints."""
    run_dir = tmp_path / "run"
    saved = run_dir / "checkpoints" if inside else tmp_path / "scratch"
    folder = {"default_local_dir": str(saved), "max_actor_ckpt_to_keep": 2}
    begin(run_dir, A, 80, 90, 100, **folder)
    (run_dir / "metrics.jsonl").write_text(LINES)
    begin(run_dir, B, 10, 20, 30, **folder)
    places = [run_dir] if inside else [saved, run_dir]
    said = "; ".join(f"{place} had an earlier run's files: they are now in {place}.1" for place in places)
    assert capsys.readouterr().out == f"{said}\n"
    assert names(saved) == ["global_step_30", "global_step_20"]
    assert {checkpoint.written_by(path) for path in checkpoint.checkpoints(saved)} == {B}
    resumed = begin(run_dir, C, 40, **folder, resume_mode="auto")
    assert resumed.trainer.resume_from_path == str(saved / "global_step_30")
    assert run_in(run_dir) == B == checkpoint.written_by(saved / "global_step_40")
    moved = Path(f"{run_dir}.1/checkpoints" if inside else f"{saved}.1")
    older = begin(Path(f"{run_dir}.1"), C, default_local_dir=str(moved), resume_mode="auto")
    assert older.trainer.resume_from_path == str(moved / "global_step_100"), "the older run can go on, too"


def test_steps_after_the_one_that_a_run_goes_on_from_are_moved_aside(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = run_dir / "checkpoints"
    begin(run_dir, A, 50, 90, 100)
    (run_dir / "metrics.jsonl").write_text(LINES)
    for step in (50, 90):
        for name in ("weights", "evaluations"):
            (run_dir / name / f"step_{step}").mkdir(parents=True)
    chosen = {"resume_mode": "resume_path", "resume_from_path": f"{saved}/global_step_50/"}
    capsys.readouterr()
    resumed = begin(run_dir, B, 60, **chosen, max_actor_ckpt_to_keep=2)
    assert resumed.trainer.resume_from_path == f"{saved}/global_step_50", "verl takes the step from its end"
    assert capsys.readouterr().out == (
        f"{run_dir} had steps after 50: their checkpoints are now in {run_dir}.2, with a copy of the metrics\n"
    )
    assert names(saved) == ["global_step_60", "global_step_50"]
    assert names(Path(f"{run_dir}.2/checkpoints")) == ["global_step_100", "global_step_90"]
    assert Path(f"{run_dir}.2/metrics.jsonl").read_text() == LINES == (run_dir / "metrics.jsonl").read_text()
    for name in ("weights", "evaluations"):
        assert [path.name for path in (run_dir / name).iterdir()] == ["step_50"]
        assert [path.name for path in Path(f"{run_dir}.2", name).iterdir()] == ["step_90"]
    assert begin(run_dir, C, resume_mode="auto").trainer.resume_from_path == str(saved / "global_step_60")
    assert run_in(run_dir) == A, "it is the same run"


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    shared = {"default_local_dir": str(tmp_path / "scratch"), "resume_mode": "auto"}
    begin(tmp_path / "a", A, 5, **shared)
    for other in ("b", "new"):
        if other == "b":
            begin(tmp_path / other, B, 5)
        with pytest.raises(SettingError, match=f"global_step_5 is of another run than .*run_dir={tmp_path}/{other}; "):
            begin(tmp_path / other, C, **shared)
        chosen = {**shared, "resume_mode": "resume_path", "resume_from_path": f"{tmp_path}/scratch/global_step_5"}
        with pytest.raises(SettingError, match="is of another run"):
            begin(tmp_path / other, C, **chosen)
    assert names(tmp_path / "scratch") == ["global_step_5"]
    assert begin(tmp_path / "a", C, 10, **shared).trainer.resume_from_path.endswith("global_step_5")


def test_a_run_may_begin_with_the_checkpoint_of_another(run_dir: Path, tmp_path: Path) -> None:
    begin(tmp_path / "a", A, 50, 60)
    chosen = {"resume_mode": "resume_path", "resume_from_path": f"{tmp_path}/a/checkpoints/global_step_50"}
    begin(run_dir, B, 55, **chosen)
    assert run_in(run_dir) == B and names(run_dir / "checkpoints") == ["global_step_55"]
    assert Path(f"{run_dir}.1/metrics.jsonl").read_text() == LINES, "of the run that was there"
    assert names(tmp_path / "a" / "checkpoints") == ["global_step_60", "global_step_50"]


def test_a_copy_of_a_checkpoint_is_the_runs(run_dir: Path, tmp_path: Path) -> None:
    begin(run_dir, A, 50)
    (run_dir / "metrics.jsonl").write_text(LINES)
    (run_dir / "checkpoints" / "global_step_50").rename(tmp_path / "global_step_50")
    begin(run_dir, B, 60, resume_mode="resume_path", resume_from_path=f"{tmp_path}/global_step_50")
    assert run_in(run_dir) == A and (run_dir / "metrics.jsonl").read_text() == LINES


@pytest.mark.parametrize("spoilt", [None, "\0" * 12], ids=repr)
def test_a_run_without_an_id_goes_on(tmp_path: Path, spoilt: str | None) -> None:
    """One of version 0.1, or one whose file was spoilt."""
    begin(tmp_path, A, 5)
    (tmp_path / "run_id.txt").unlink()
    if spoilt is not None:
        (tmp_path / "run_id.txt").write_text(spoilt)
    begin(tmp_path, B, 10, resume_mode="auto")
    assert run_in(tmp_path) == A, "as its checkpoints say"


def test_auto_does_not_begin_anew_where_no_checkpoint_is_whole(run_dir: Path) -> None:
    begin(run_dir, A, 5, 10)
    (run_dir / "metrics.jsonl").write_text(LINES)
    for path in checkpoint.checkpoints(run_dir / "checkpoints"):
        (path / "model").unlink()
    before = files(run_dir)
    with pytest.raises(SettingError, match=r"none of 2 .* is whole \(global_step_10: model is missing\); restore one"):
        begin(run_dir, B, resume_mode="auto")
    assert files(run_dir) == before


def test_auto_does_not_begin_anew_where_the_folder_is_not_mounted(run_dir: Path) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": 5, "{SAVE_S}": 0.5}}\n{{"step": 6}}\n')
    before = files(run_dir)
    with pytest.raises(SettingError, match="checkpoints: has no checkpoint, .* wrote one after step 5; mount or"):
        begin(run_dir, B, resume_mode="auto")
    assert [name for name in files(run_dir) if not name.endswith(".lock")] == before
    begin(run_dir, B)
    assert Path(f"{run_dir}.1/metrics.jsonl").is_file(), "resume_mode=disable begins anew"


def test_auto_begins_anew_where_none_was_written_yet(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a job that is started again after it has failed early."""
    begin(run_dir, A, resume_mode="auto")
    assert capsys.readouterr().out == f"{run_dir} had an earlier run's files: they are now in {run_dir}.1\n"


def test_what_a_killed_process_was_writing_is_removed(run_dir: Path) -> None:
    half = run_dir / "checkpoints" / f".partial-{A}-{A[:8]}" / "global_step_5"
    half.mkdir(parents=True)
    begin(run_dir, B)
    assert not half.parent.exists()


def test_an_evaluation_of_another_runs_checkpoints_changes_nothing(tmp_path: Path) -> None:
    begin(tmp_path / "a", A, 5, 10)
    before, saved = files(tmp_path / "a"), tmp_path / "a" / "checkpoints"
    chosen = {"resume_mode": "resume_path", "resume_from_path": f"{saved}/global_step_5"}
    with main._folders(config(tmp_path / "a", resume_mode="auto"), C):  # while that run trains
        for how in ({"resume_mode": "auto"}, chosen):
            begin(tmp_path / "evaluation", B, default_local_dir=str(saved), val_only=True, **how)
    assert files(tmp_path / "a") == before and files(tmp_path / "evaluation") == [".lock"]


def test_two_runs_do_not_write_into_one_folder_of_checkpoints(tmp_path: Path) -> None:
    shared = {"default_local_dir": str(tmp_path / "scratch")}
    with main._folders(config(tmp_path / "a", **shared), A):
        for save_freq in (5, -1):
            with pytest.raises(SettingError, match=f"trainer.default_local_dir={tmp_path}/scratch: another run writes"):
                begin(tmp_path / "b", B, **shared, save_freq=save_freq)
        begin(tmp_path / "b", B)
    begin(tmp_path / "b", B, **shared)
    begin(tmp_path / "one", B, 5, default_local_dir=str(tmp_path / "one"))
    assert names(tmp_path / "one") == ["global_step_5"], "a run whose two folders are one"


def test_checkpoints_elsewhere_do_not_mix_with_the_new_runs(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "scratch"
    write_checkpoint(elsewhere, 100)
    assert set_aside(config(run_dir, default_local_dir=str(elsewhere), val_only=True)), "an evaluation writes none"
    assert checkpoint.checkpoints(elsewhere)
    assert set_aside(config(run_dir, default_local_dir=str(elsewhere)))
    assert checkpoint.checkpoints(elsewhere) == [], "trainer.resume_mode=auto would take them for this run's"
    assert checkpoint.checkpoints(Path(f"{elsewhere}.2"))


def test_a_model_of_the_older_run_is_not_moved_from_under_the_new_one(run_dir: Path) -> None:
    with pytest.raises(SettingError, match=r"model\.path=.*: an earlier run wrote it .*; give this run a folder"):
        set_aside(config(run_dir, model=f"{run_dir}/model"))
    assert (run_dir / "metrics.jsonl").is_file()


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recipe.fully_async_policy.launch.older_run.write_whole", write)
    with pytest.raises(SettingError, match=rf"run_dir={tmp_path}: cannot be .* \(.*No space left on device\); mend"):
        begin(tmp_path, A)


def test_where_it_cannot_be_moved_nothing_starts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.rename", rename)
    with pytest.raises(SettingError, match=r"cannot be moved to .*run\.1 \(.*cross-device link\); give another folder"):
        set_aside(config(run_dir))
