"""Writers of one file or folder do not meet, and what a killed one leaves goes with the next."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_vcpo.common.whole_file import try_file, try_folder, whole_file, whole_folder

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
