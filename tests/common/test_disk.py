"""A file system that takes no more is named, with the cause, wherever a run writes."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from tests.cpu.test_weight_file import engine, weights
from verl_vcpo.common import disk, step_lines
from verl_vcpo.loop import checkpoint

ROOM = {"f_bavail": 935, "f_frsize": 1_000_000, "f_files": 9, "f_favail": 5, "f_flag": 0}
UNLIMITED = resource.RLIM_INFINITY
NO_INODE = "has 935 MB free, but no inode for another file: remove files there"


@pytest.mark.parametrize(
    ("error", "found", "limit", "words"),
    [
        (OSError(errno.ENOSPC, "No space left"), {"f_bavail": 0}, UNLIMITED, "0 MB free ([Errno 28] No space left)"),
        (RuntimeError("begins\nunexpected pos 704 vs 598"), {}, UNLIMITED, "935 MB free (unexpected pos 704 vs 598)"),
        (OSError(errno.ENOSPC, "x"), {"f_favail": 0}, UNLIMITED, f"{NO_INODE.removeprefix('has ')} ([Errno 28] x)"),
        (RuntimeError("x"), {"f_files": 0, "f_favail": 0}, UNLIMITED, "935 MB free (x)"),
        (OSError(errno.EDQUOT, "x"), {}, UNLIMITED, "935 MB free, your quota there is used up ([Errno 122] x)"),
        (OSError(errno.EROFS, "x"), {}, UNLIMITED, "935 MB free, it is mounted read-only ([Errno 30] x)"),
        (RuntimeError("x"), {"f_flag": os.ST_RDONLY}, UNLIMITED, "935 MB free, it is mounted read-only (x)"),
        (
            *(OSError(errno.EFBIG, "x"), {}, 2_000_000),
            "935 MB free, the file is too large for it, and this process may write files of 2 MB at the most (ulimit "
            "-f) ([Errno 27] x)",
        ),
        (SimpleNamespace(cause=ValueError("of another process")), {}, UNLIMITED, "935 MB free (of another process)"),
    ],
)
def test_why_nothing_was_written(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, found: dict[str, int], limit: int, words: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**ROOM | found))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert disk.why_not_written(Path("/not/there"), error) == words


@pytest.mark.parametrize("asked", ["stat", "statvfs"])
def test_a_file_system_that_does_not_answer_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTCONN, "Not connected")

    monkeypatch.setattr(os, asked, fails)
    words = disk.why_not_written(tmp_path, OSError(errno.EIO, "x"))
    assert words == "a file system that cannot be read: Not connected ([Errno 5] x)"


def a_line(folder: Path) -> None:
    step_lines.append(folder / "metrics.jsonl", "{}\n")


def a_checkpoint(folder: Path) -> None:
    with checkpoint.written_whole(OmegaConf.create({"default_local_dir": str(folder)}), 3) as staged:
        staged.mkdir()
        (staged / "model").open("w")


def the_weights(folder: Path) -> None:
    engine(folder, is_master=True).stage_weights(iter(weights(1.0).items()), 1)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (a_line, f"^{{}}/metrics.jsonl was not written; {{}} {NO_INODE} "),
        (a_checkpoint, f"^the checkpoint of step 3 was not written; trainer.default_local_dir={{}} {NO_INODE} "),
        (the_weights, f"^the samplers' weights were not written: {{}} {NO_INODE} .*, and the weights take .* MB; re"),
    ],
)
def test_whatever_is_written_names_the_folder_and_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], words: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**ROOM | {"f_favail": 0}))
    monkeypatch.setattr("builtins.open", fails)
    monkeypatch.setattr(Path, "open", fails)
    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(RuntimeError, match=words.format(tmp_path, tmp_path)):
        write(tmp_path)
