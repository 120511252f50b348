"""Writers of one file or folder do not meet, and what a killed one leaves goes with the next."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_vcpo.common.whole_file import try_file, try_folder, whole_file, whole_folder, write_whole

KILLED = """
import os, sys
from pathlib import Path
from verl_vcpo.common import whole_file
with getattr(whole_file, sys.argv[1])(Path(sys.argv[2])):
    os.kill(os.getpid(), 9)
"""


def fill(partial: Path, text: str) -> None:
    (partial / "file" if partial.is_dir() else partial).write_text(text)


@pytest.mark.parametrize(("whole", "tried"), [(whole_file, try_file), (whole_folder, try_folder)])
def test_writers_do_not_meet(tmp_path: Path, whole: Callable[[Path], Any], tried: Callable[[Path], None]) -> None:
    place, users = tmp_path / "a.b", {tmp_path / name for name in ("a.b.partial", ".a.b.partial", ".a.b.old")}
    for file in users:
        file.write_text("a user's")
    for name in (".a.b.of-alice.partial", ".a.b.of_alice.partial"):
        users.add(tmp_path / name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("a user's")
    subprocess.run([sys.executable, "-c", KILLED, whole.__name__, str(place)], check=False)
    assert len({*tmp_path.iterdir()} - users) == 1, "nothing is left of the killed one, so nothing is shown"
    with whole(place) as first:
        fill(first, "1")
        with whole(place) as second:
            fill(second, "2")
            tried(place)
        assert (place / "file" if place.is_dir() else place).read_text() == "2"
    assert (place / "file" if place.is_dir() else place).read_text() == "1"
    assert {*tmp_path.iterdir()} == {place, *users}
    assert all((user / "file" if user.is_dir() else user).read_text() == "a user's" for user in users)


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "x")], ids=repr)
@pytest.mark.parametrize("name", ["model", "old"])
def test_an_interruption_between_the_two_renamings_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, restored: bool
) -> None:
    """Not `restored`: as after a kill, or where the disk takes no third renaming either."""
    place, renamed, replace = tmp_path / name, [], os.replace
    with whole_folder(place) as first:
        fill(first, "1")

    def once(source: Path, target: Path) -> None:
        renamed.append(source)
        if len(renamed) == 2 or (len(renamed) > 2 and not restored):
            raise error
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(type(error)), whole_folder(place) as second:
        fill(second, "2")
        patch.setattr(os, "replace", once)
    try_folder(place)
    (kept,) = tmp_path.iterdir()
    assert ((place if restored else kept / f"{name}.old") / "file").read_text() == "1"
    with whole_folder(place) as third:
        fill(third, "3")
    assert [*tmp_path.iterdir()] == [place] and (place / "file").read_text() == "3"


@pytest.mark.parametrize(("call", "module"), [("mkdtemp", tempfile), ("open", os), ("flock", fcntl)])
def test_another_writer_comes_before_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, module: Any
) -> None:
    place, before = tmp_path / "a", getattr(module, call)

    def then_another(*arguments: Any, **named: Any) -> Any:
        done = before(*arguments, **named) if call != "flock" else None
        monkeypatch.setattr(module, call, before)
        try_file(place)
        return before(*arguments, **named) if call == "flock" else done

    monkeypatch.setattr(module, call, then_another)
    write_whole(place, "1")
    assert place.read_text() == "1" and [*tmp_path.iterdir()] == [place]
