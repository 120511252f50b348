"""The mutation run: what it reports of a module with one weak test, and its list of harmless mistakes."""

import subprocess
import sys
from pathlib import Path

from tests import mutants
from tests.kit import ROOT, mutation
from tests.kit.mutation import Called

MODULE = """
def doubled(x):
    return 2 * x


def counted(n):
    total = 0
    while total < n:
        total += 1
    return total
"""
TESTS = """
from module import counted, doubled


def test_doubled():
    assert doubled(1) == 2


def test_counted():
    assert (counted(0), counted(3)) == (0, 3)
"""
RUN = """
from pathlib import Path
from tests.kit.mutation import Copy, in_order, mutants

copy = Copy(Path.cwd(), [""])
copy.import_others(["test_module.py"], wall_s=60)
right, called = copy.calls(["test_module.py"], wall_s=60)
assert right.passed
tried = [m for m in mutants("module.py", Path.cwd()) if m.function == "doubled" or m.after in ("pass", "total <= n")]
for mutant in tried:
    tests = in_order(called, mutant)
    assert tests == ["test_module.py::test_" + mutant.function], tests
    print(copy.passes_with(mutant, tests, wall_s=60, processor_s=1), mutant.function, mutant.after)
"""


def test_a_weak_test_is_found_and_a_loop_without_an_end_is_seen(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TESTS)
    ran = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    outcomes = ran.stdout.splitlines()
    assert [line for line in outcomes if line.startswith("True")] == ["True doubled 2 / x"], ran.stderr
    assert {"False counted pass", "False counted total <= n"} < {*outcomes}
    assert (tmp_path / "module.py").read_text() == MODULE


def test_quick_callers_come_first_and_tests_of_another_function_of_the_file_are_left_out() -> None:
    """A test that calls nothing of the file may have processes that do; a mistake in a function
    that no test calls may be seen by any test."""
    called = [
        Called("slow", 9.0, {"a.py": ["A.f"]}),
        Called("quick", 1.0, {"a.py": ["A.f", "A.g"]}),
        Called("of g", 1.0, {"a.py": ["A.g"], "b.py": ["A.f"]}),
        Called("processes", 5.0, {"b.py": ["A.f"]}),
    ]

    def chosen(function: str) -> list[str]:
        return mutation.in_order(called, mutation.Mutant("a.py", 0, 1, function, "1", "2"))

    assert chosen("A.f") == ["quick", "slow", "processes"]
    assert chosen("module") == ["quick", "of g", "processes", "slow"]


def test_a_later_run_knows_what_tests_saw(tmp_path: Path) -> None:
    first, second = mutation.mutants("vcpo/config.py", ROOT)[:2]
    seen = mutants.Seen(tmp_path / "seen.txt")
    assert first not in seen
    seen.add(first)
    seen.add(second)
    later = mutants.Seen(tmp_path / "seen.txt")
    assert first in later and second in later and first not in mutants.Seen(None)


def test_only_the_files_that_are_asked_for() -> None:
    assert {file.split("/")[0] for file in mutants.chosen(["vcpo/"])} == {"vcpo"}, "not those of verl_vcpo"
    assert list(mutants.chosen(["losses.py", "norms/te_"])) == [
        "verl/verl_vcpo/actor/losses.py",
        *(f"verl/verl_vcpo/actor/norms/te_{name}.py" for name in ("check", "modules")),
    ]


def test_every_harmless_mistake_exists() -> None:
    """Catches a reason for code that is no longer there, which could hide another mistake."""
    files = mutants.chosen([""])
    there = {mutant.name for file in files for mutant in mutation.mutants(file, ROOT)}
    for listed in mutants.harmless(ROOT / mutants.HARMLESS):
        assert any(mutants.is_harmless(name, [listed]) for name in there), listed
    assert mutants.is_harmless("a: 1 -> 2", ["a: *"]) and not mutants.is_harmless("a: 1 -> 2", ["b: *", "a: 1"])
    tests = {test for of_file in files.values() for test in of_file}
    assert all((ROOT / test.split("::")[0]).is_file() for test in tests)
