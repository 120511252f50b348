"""A run whose folder was moved or removed writes nothing more at its path, and makes no folder there."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.command_line import INTERRUPTED
from recipe.fully_async_policy import main
from recipe.fully_async_policy.launch.next_steps import after_error, after_interruption
from recipe.fully_async_policy.launch.processes import sigterm_is_ctrl_c
from recipe.fully_async_policy.settings import run_folder
from tests.recipe.test_interrupted import command_in, saved
from tests.recipe.test_interrupted import config as settings
from verl_vcpo.common import held_folders
from verl_vcpo.common.held_folders import FolderMoved
from verl_vcpo.loop import checkpoint
from verl_vcpo.loop.held_out import HeldOutTrainer
from verl_vcpo.report.run_log import RunLog, write_command, write_summary
from verl_vcpo.report.sample_log import SampleLog


@pytest.fixture
def config(tmp_path: Path) -> Iterator[DictConfig]:
    """The settings of a run whose folder is held, with a file in it."""
    run_dir = tmp_path / "above" / "run"
    settings = {"default_local_dir": f"{run_dir}/checkpoints", "val_only": False, "save_freq": 5, "resume_mode": "auto"}
    config = OmegaConf.create({"run_dir": str(run_dir), "trainer": settings})
    with run_folder.held(config):
        (run_dir / "file").write_text("of the first run")
        yield config


def rename(run_dir: Path) -> Path:
    return run_dir.rename(run_dir.with_name("renamed"))


def rename_the_folder_above(run_dir: Path) -> Path:
    return run_dir.parent.rename(run_dir.parent.with_name("beside")) / run_dir.name


def rename_and_make_anew(run_dir: Path) -> Path:
    place = rename(run_dir)
    run_dir.mkdir()
    return place


def remove(run_dir: Path) -> None:
    shutil.rmtree(run_dir)


def move_to_another_disk(run_dir: Path) -> None:
    shutil.copytree(run_dir, run_dir.with_name("copy"))
    shutil.rmtree(run_dir)


MOVES: tuple[Callable[[Path], Path | None], ...] = (
    *(rename, rename_the_folder_above, rename_and_make_anew, remove, move_to_another_disk),
)


def write_checkpoint(config: DictConfig) -> None:
    with checkpoint.written_whole(config.trainer, 5, "run") as folder:
        folder.mkdir()


WRITES: dict[str, Callable[[DictConfig], object]] = {
    "metrics": lambda config: RunLog(config.run_dir).append(1, {}),
    "samples": lambda config: SampleLog(config.run_dir, 1).write([{"step": 1}]),
    "summary": lambda config: write_summary(config.run_dir, "vcpo", 1, 1.0),
    "command": lambda config: write_command(config.run_dir, "module", []),
    "checkpoint": write_checkpoint,
    "answers": lambda _: HeldOutTrainer._write_generations([], [], [], [], {}, "anywhere", 1),
    "a resumed run": lambda config: checkpoint.choose(config.trainer),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("move", MOVES)
def test_a_run_whose_folder_is_elsewhere_writes_nothing(
    config: DictConfig, move: Callable[[Path], Path | None], write: str
) -> None:
    run_dir = Path(config.run_dir)
    (run_dir / "metrics.jsonl").touch()
    held_folders.checked(run_dir)
    place = move(run_dir)
    made_anew = run_dir.exists()
    with pytest.raises(FolderMoved, match=rf"^run_dir={run_dir} was {f'moved to {place}' if place else 'removed'}"):
        WRITES[write](config)
    assert run_dir.exists() == made_anew and not (made_anew and any(run_dir.iterdir()))


def test_a_folder_that_its_path_still_leads_to_is_not_moved(config: DictConfig) -> None:
    run_dir = Path(config.run_dir)
    run_dir.symlink_to(rename(run_dir))
    assert held_folders.checked(run_dir) == run_dir and not held_folders.moved_in_words()


def test_the_folder_of_checkpoints_alone(config: DictConfig) -> None:
    saved = Path(config.trainer.default_local_dir)
    place = rename(saved)
    assert held_folders.moved() == {"trainer.default_local_dir": place} and held_folders.place(saved) == place


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("move", [rename, remove])
def test_what_other_processes_make_at_the_old_path_goes(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch, move: Callable[[Path], Path | None], relative: bool
) -> None:
    """As by a trainer whose rank writes its part of the checkpoint after the folder was moved."""
    run_dir = Path(config.run_dir)
    if relative:
        monkeypatch.chdir(run_dir.parent)
        config.trainer.default_local_dir = f"{run_dir.name}/checkpoints"
    with pytest.raises(FolderMoved), checkpoint.written_whole(config.trainer, 5, "run") as folder:
        move(run_dir)
        (folder / "actor").mkdir(parents=True)
        (folder / "actor" / "weights").touch()
    assert not run_dir.exists() and run_dir.parent.is_dir()


def unanswered(code: int, below: Path) -> Callable[..., os.stat_result]:
    """`os.stat` where the file system below a path fails with `code`."""
    stat = os.stat

    def fails(path: Any, **named: Any) -> os.stat_result:
        if not isinstance(path, int) and Path(path).is_relative_to(below):
            raise OSError(code, os.strerror(code), str(path))
        return stat(path, **named)

    return fails


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOTCONN, errno.EACCES, errno.EIO])
def test_a_file_system_that_does_not_answer_hides_no_error(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As where another machine has removed the folder (ESTALE), or a server has ended (ENOTCONN)."""
    kind = type(OSError(code, "")).__name__
    monkeypatch.setattr(os, "stat", unanswered(code, Path(config.run_dir)))
    config.save_model = False
    error = after_error(ValueError("the cause"), config, ["+task=gsm8k", f"run_dir={config.run_dir}"])
    assert error.startswith("error: ") and "ValueError: the cause" in error
    interruption = after_interruption(config, ["+task=gsm8k"])
    assert interruption.startswith("interrupted; ")
    for said in (error, interruption):
        assert ("was removed" if code == errno.ESTALE else f"cannot be read ({kind}: [Errno {code}]") in said
        place = "FOLDER" if code == errno.ESTALE else config.run_dir
        assert command_in(said) == ["+task=gsm8k", f"run_dir={place}", "trainer.resume_mode=auto"]
    assert held_folders.place(config.run_dir) is None
    held_folders.remove_made_anew(Path(config.run_dir))


def test_a_path_through_the_open_folder_leads_to_where_it_is(config: DictConfig) -> None:
    """TensorBoard's writer and the last resort of the console open their files again."""
    through = held_folders.through(config.run_dir)
    place = rename_and_make_anew(Path(config.run_dir))
    (through / "tensorboard").mkdir()
    assert (place / "tensorboard").is_dir() and held_folders.place(config.run_dir) == place
    assert held_folders.through("another") == held_folders.place("another") == Path("another")


@pytest.mark.parametrize("ends", [FolderMoved, FileNotFoundError, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("removed", [False, True])
def test_a_run_whose_folder_was_moved_or_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    removed: bool,
    ends: type[BaseException],
) -> None:
    """`OSError`: another process of the run fails because of that; `KeyboardInterrupt`: before the run has noticed."""
    run_dir, place = tmp_path / "run", tmp_path / "renamed"
    of_run = settings(run_dir)

    def train(*_: Any) -> NoReturn:
        run_dir.rename(place)
        if removed:
            shutil.rmtree(place)
        raise FolderMoved(held_folders.moved_in_words()) if ends is FolderMoved else ends("No such file")

    monkeypatch.setattr(main, "train", train)
    with run_folder.held(of_run), sigterm_is_ctrl_c():
        saved(run_dir, 5)
        dumps = "trainer.rollout_data_dir"
        given = ["+task=gsm8k", f"{dumps}={run_dir}/of_steps", f"run_dir={run_dir}", "trainer.resume_mode=disable"]
        assert main.launch(of_run, "id", given) == (INTERRUPTED if ends is KeyboardInterrupt else 1)
    first, how, *_ = said = capsys.readouterr().err.splitlines()
    became = "removed, or moved to another disk," if removed else f"moved to {place}"
    begins = "interrupted; " if ends is KeyboardInterrupt else "error: "
    also = " (OSError: No such file)" if ends is OSError else ""
    assert first.startswith(f"{begins}run_dir={run_dir} was {became} while the run went on{also}")
    assert ("No such file" in first) == (ends is OSError)
    assert (f"Details: {place}/verl.log" in first) == (not removed and ends is not KeyboardInterrupt)
    assert how == f"To go on from {'a copy in FOLDER, or to begin anew there' if removed else 'global_step_5'}:"
    now = "FOLDER" if removed else place
    resumed = [f"{dumps}={now}/of_steps", f"run_dir={now}", "trainer.resume_mode=auto"]
    assert command_in("\n".join(said)) == ["+task=gsm8k", *resumed] and not run_dir.exists()
