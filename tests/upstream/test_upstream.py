"""What we rely on in other packages is there, and what we rely on is written down: docs/reference/upstream.md.

The comparison has a process of its own: other tests exchange functions of Megatron and torch in this one.
"""

import json
import subprocess
import sys
from inspect import signature

import pytest

from tests.upstream import check, document
from tests.upstream.inventory import ROOT
from tests.upstream.reach import How, Place, Reach


def test_what_is_installed_is_what_we_rely_on() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.upstream", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.stdout, done.stderr[-3000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert not differences, f"{len(differences)} differences; see docs/reference/upstream.md:\n" + "\n".join(
        differences
    )


def test_the_pages_are_those_of_the_tables() -> None:
    for file, text in document.pages().items():
        assert file.read_text() == text, f"{file.relative_to(ROOT)}: python -m tests.upstream --write"


def _complaints(how: How, theirs: str, shape: str) -> list[str]:
    return check.differences((Place("tests/upstream/check.py", "", (Reach("resolve", how, theirs, shape, ""),)),))


@pytest.mark.parametrize(
    ("how", "theirs", "shape", "complaint"),
    [
        (How.CALLS, "json:no_such_function", "", "has no no_such_function"),
        (How.CALLS, "no_such_module:f", "", "no module"),
        (How.CALLS, "json:loads", "s, no_such_parameter=1", ""),  # it takes **kw
        (How.CALLS, "shutil:copytree", "src", "needs a parameter that ours does not give, dst"),
        (How.CALLS, "shutil:copytree", "dst, src", "in another order"),
        (How.CALLS, "shutil:copytree", "src, dst, symlinks=True", "symlinks is False by default"),
        (How.CALLS, "shutil:copytree", "src, dst, symlinks=False", ""),
        (How.CALLS, "shutil:copytree", "src, dst, depth", "has no parameter depth"),
        (How.USES, "subprocess:PIPE", "= -1", ""),
        (How.USES, "subprocess:PIPE", "= -2", "is -1"),
        (How.USES, "subprocess:Popen.returncode", "", ""),  # given to `self`
        (How.USES, "subprocess:Popen.no_such_attribute", "", "has no no_such_attribute"),
        (How.NAMES, "subprocess", "errread", ""),
        (How.NAMES, "subprocess:Popen", "no such text", "is not in its source"),
        (How.SUBCLASSES, "subprocess:Popen", "", "TypeError"),  # ours is a function
        (How.OVERRIDES, "shutil:copytree", "", "not in signatures.txt"),
    ],
)
def test_a_difference_is_told(how: How, theirs: str, shape: str, complaint: str) -> None:
    found = _complaints(how, theirs, shape)
    assert (len(found) == 1 and complaint in found[0]) if complaint else not found, found


def test_a_method_that_takes_less_than_theirs_is_told() -> None:
    def theirs(batch: int, metrics: int, *, keep: bool = False) -> None: ...
    def same(batch: int, metrics: int, *, keep: bool = False) -> None: ...
    def wider(batch: int, *args: int, **kwargs: int) -> None: ...
    def narrower(batch: int, metrics: int) -> None: ...
    def swapped(metrics: int, batch: int, *, keep: bool = False) -> None: ...
    def needier(batch: int, metrics: int, more: int, *, keep: bool = False) -> None: ...

    of_theirs = list(signature(theirs).parameters.values())
    reasons = {
        ours.__name__: list(check.incompatible(list(signature(ours).parameters.values()), of_theirs))
        for ours in (same, wider, narrower, swapped, needier)
    }
    assert {name for name, complaints in reasons.items() if complaints} == {"narrower", "swapped", "needier"}, reasons
