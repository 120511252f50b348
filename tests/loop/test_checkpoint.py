"""A checkpoint is whole or it is not there, and it is of one run."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.kit.checkpoints import write_checkpoint
from verl_vcpo.common.whole_file import whole_folder, write_whole
from verl_vcpo.loop import checkpoint


def save(root: Path, step: int, run: str | None = None, keep: int | None = None) -> Path:
    return write_checkpoint(root, step, run, keep, **{"model.bin": "weights" * 1000, "data.pt": "position"})


def settings(root: Path, **given: Any) -> DictConfig:
    return OmegaConf.create({"default_local_dir": str(root), "resume_mode": "auto", "resume_from_path": None} | given)


def names(root: Path) -> list[str]:
    return [path.name for path in checkpoint.checkpoints(root)]


def test_what_is_published_is_whole_and_verls_tracker_points_to_it(tmp_path: Path) -> None:
    folder = save(tmp_path, 5, "of-this-run")
    assert folder == tmp_path / "global_step_5" and checkpoint.damage(folder) is None
    assert checkpoint.written_by(folder) == "of-this-run"
    assert (tmp_path / checkpoint.TRACKER).read_text() == "5"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_5", checkpoint.TRACKER]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "what"), [(truncate, "bytes, not"), (flip_a_bit, "has changed"), (Path.unlink, "is missing")]
)
@pytest.mark.parametrize("file", ["model.bin", "data.pt"])
def test_a_damaged_checkpoint_is_found_out_and_the_one_before_it_taken(
    tmp_path: Path, spoil: object, what: str, file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 5)
    spoil(save(tmp_path, 10) / file)  # type: ignore[operator]
    assert what in (checkpoint.damage(tmp_path / "global_step_10") or "")
    checkpoint.choose(trainer := settings(tmp_path))
    assert trainer.resume_from_path == str(tmp_path / "global_step_5")
    said = capfd.readouterr().out
    assert said.count("\n") == 1 and "global_step_10 is damaged" in said


def test_a_file_that_the_disk_does_not_give_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 5)

    def crc(file: Path) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint, "_crc", crc)
    assert checkpoint.damage(folder) == "data.pt cannot be read: Input/output error"


def test_where_all_are_damaged_it_does_not_begin_anew(tmp_path: Path) -> None:
    for step in (5, 10):
        flip_a_bit(save(tmp_path, step) / "model.bin")
    with pytest.raises(checkpoint.NoWholeCheckpoint, match=r"none of 2 .* \(global_step_10: model.bin has changed"):
        checkpoint.choose(settings(tmp_path))
    checkpoint.choose(trainer := settings(tmp_path / "empty"))
    assert trainer.resume_mode == "disable"


def test_a_process_that_died_while_writing_leaves_the_old_ones(tmp_path: Path) -> None:
    save(tmp_path, 5)
    half, other = tmp_path / f".partial-{'a' * 12}-{'b' * 8}" / "global_step_10", tmp_path / ".partial-rsync"
    half.mkdir(parents=True)
    other.mkdir()
    (half / "model.bin").write_text("half")
    assert checkpoint.newest_whole(tmp_path) == (tmp_path / "global_step_5", {})
    assert checkpoint.damage(save(tmp_path, 10)) is None
    checkpoint.remove_unfinished(tmp_path)
    assert not half.exists() and other.exists() and len(checkpoint.checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"files": {"a": 1}}', '{"a": "b"}', "\0" * 99], ids=repr)
def test_without_a_manifest_it_is_not_whole(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, 5, "a run")
    (folder / checkpoint.MANIFEST).write_text(text)
    assert checkpoint.newest_whole(tmp_path) == (None, {folder: "manifest.json is missing or unreadable"})
    assert checkpoint.written_by(folder) is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 9, 10):
        save(tmp_path, step)
    assert names(tmp_path) == ["global_step_10", "global_step_9", "global_step_2"]
    save(tmp_path, 11, keep=2)
    assert names(tmp_path) == ["global_step_11", "global_step_10"]


def test_checkpoints_that_do_not_say_they_are_of_the_run_stay(tmp_path: Path) -> None:
    """As those of verl alone, which have no manifest, in a folder of checkpoints that the user has given."""
    others = [save(tmp_path, 2), save(tmp_path, 3, "another"), save(tmp_path, 5)]
    for folder in (others[0], others[2]):
        (folder / checkpoint.MANIFEST).unlink()
    for step in (4, 5, 6):
        save(tmp_path, step, "a run", keep=1)
    assert names(tmp_path) == ["global_step_6", "global_step_3", "global_step_2"]
    assert (tmp_path / "global_step_5.1" / "model.bin").exists()


def test_one_of_a_later_step_takes_no_place(tmp_path: Path) -> None:
    """As where a run goes on before a damaged one: what it writes must not be removed as the oldest."""
    for step in (90, 100):
        save(tmp_path, step)
    for step in (10, 20, 30):
        assert save(tmp_path, step, keep=2).is_dir()
    assert names(tmp_path) == ["global_step_100", "global_step_90", "global_step_30", "global_step_20"]


def test_one_that_no_process_of_the_trainer_wrote_into_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster whose nodes share no disk, or whose workers have another working directory."""
    monkeypatch.chdir(tmp_path)
    trainer = settings(Path("saved"))

    def written(by_workers: bool) -> None:
        with checkpoint.written_whole(trainer, 2) as folder:
            assert Path(trainer.default_local_dir).is_absolute()
            (folder / "actor").mkdir(parents=True)
            (folder / "data.pt").touch()
            if by_workers:
                (folder / "actor/weights").touch()
            checkpoint.check_written_by_workers(folder)

    with pytest.raises(RuntimeError, match="processes wrote elsewhere: all nodes have to share this folder"):
        written(by_workers=False)
    assert names(tmp_path / "saved") == []
    written(by_workers=True)
    assert names(tmp_path / "saved") == ["global_step_2"]


def test_two_runs_that_write_at_once_do_not_mix(tmp_path: Path) -> None:
    """No lock holds them apart here: one begins while the other has written half of its files."""
    began, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with checkpoint.written_whole(settings(tmp_path), 2, "a") as folder:
            folder.mkdir()
            (folder / "half").write_text("a")
            began.set()
            assert go_on.wait(60)
            (folder / "other half").write_text("a")

    writer = threading.Thread(target=first)
    writer.start()
    assert began.wait(60)
    with checkpoint.written_whole(settings(tmp_path), 2, "b") as folder:
        assert folder.parent.name.startswith(".partial-b-")
        folder.mkdir()
        go_on.set()
        writer.join()
        written = tmp_path / "global_step_2"
        assert {file.name: file.read_text() for file in written.glob("*half")} == {"half": "a", "other half": "a"}
        assert checkpoint.damage(written) is None and checkpoint.written_by(written) == "a"
        (folder / "whole").write_text("b")
    assert [file.name for file in written.iterdir() if file.name != checkpoint.MANIFEST] == ["whole"]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What was written to the disk for good, renamed and removed, in order."""
    happened: list[tuple[str, Path]] = []
    sync, replace, remove = os.fsync, os.replace, shutil.rmtree

    def fsync(descriptor: int) -> None:
        happened.append(("on disk", Path(f"/proc/self/fd/{descriptor}").resolve()))
        sync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        happened.append(("renamed", Path(new)))
        replace(old, new)

    def removed(path: Path, **how: Any) -> None:
        happened.append(("removed", Path(path)))
        remove(path, **how)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    return happened


def test_a_checkpoint_is_on_the_disk_before_the_one_before_it_goes(
    tmp_path: Path, done: list[tuple[str, Path]]
) -> None:
    save(tmp_path, 5, keep=1)
    done.clear()
    save(tmp_path, 10, keep=1)
    renamed, removed = (
        done.index(what) for what in (("renamed", tmp_path / "global_step_10"), ("removed", tmp_path / "global_step_5"))
    )
    before = {path.name for what, path in done[:renamed] if what == "on disk"}
    assert {"model.bin", "data.pt", "manifest.json", "global_step_10"} <= before
    assert ("on disk", tmp_path) in done[renamed:removed]
    assert names(tmp_path) == ["global_step_10"]


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path: Path, done: list[tuple[str, Path]]) -> None:
    write_whole(tmp_path / "a", "text")
    (partial, renamed, folder, _) = done
    assert (partial[0], partial[1].name) == ("on disk", "a") and partial[1].parent != tmp_path
    assert (renamed, folder) == (("renamed", tmp_path / "a"), ("on disk", tmp_path))
    done.clear()
    with whole_folder(tmp_path / "b") as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text("text")
    renamed = done.index(("renamed", tmp_path / "b"))
    assert {path.name for what, path in done[:renamed] if what == "on disk"} == {"file", "below", "b"}
    assert done[renamed + 1] == ("on disk", tmp_path)
