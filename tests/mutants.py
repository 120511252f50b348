"""Which mistakes do the tests miss? `python -m tests.mutants [--minutes 60] [--only TEXT ...] [--seen FILE] [--json]`.

Makes one small mistake at a time (another operator, number or function, a statement left out) in the algorithm, in the
engine's losses, norms and mini-batches, and in the replay buffer with its deadlines, in an order drawn by the seed, and
runs those of the file's tests that may see it: that call the function, or whose own processes may. Prints the mistakes
that no test saw, but those of tests/kit/harmless_mutants.txt, which change no number and have their reason there. Exits
with 1 where there are others. The files of the tree stay as they are: mistakes are made in a copy.
"""

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from recipe.command_line import OneLineParser, positive_number, run_command
from tests.kit import ROOT, mutation, session
from tests.kit.mutation import Called, Copy, Mutant, Outcome, in_order
from verl_vcpo.cpu import environment

_ACTOR, _LOOP = "verl/verl_vcpo/actor", "verl/verl_vcpo/loop"
_ALGORITHM = [f"tests/vcpo/test_{name}.py" for name in ("weights", "estimator", "collapse_alarm")]
_GRADNORM = ["tests/vcpo/test_gradnorm.py"]
_LAYOUTS = "MoE EP2 x CP2", "TP2 SP x PP2, tied", "PP2, 2 virtual stages", "LoRA, TP2"
_NORMS = [
    *(
        f"tests/actor/test_{name}.py"
        for name in ("per_trajectory", "rounding", "taps", "passes", "packed", "vcpo_engine")
    ),
    "tests/actor/test_extreme_weights.py",
    *(f"tests/actor/test_layouts.py::test_equals_one_process[{name}]" for name in _LAYOUTS),
]
_LAYOUT, _TE = "tests/actor/test_micro_batch_layout.py", "tests/actor/test_transformer_engine.py"
_BATCHES = ["tests/actor/test_losses.py", "tests/actor/test_lag_bins.py"]
_EXPERTS = "tests/actor/test_router_replay.py::test_a_token_without_experts_is_refused"
_BUFFER = [
    *(f"tests/loop/test_{name}.py" for name in ("left_out", "replay_buffer", "failed_prompts")),
    "tests/loop/test_schedules.py::test_some_schedules",
]
TESTS: dict[str, list[str]] = {
    "vcpo/*.py": _ALGORITHM,
    "vcpo/estimator.py": [*_ALGORITHM, "tests/vcpo/test_mismatch.py", "tests/vcpo/test_published.py"],
    "vcpo/mismatch.py": ["tests/vcpo/test_mismatch.py"],
    **{f"vcpo/gradnorm/{name}.py": _GRADNORM for name in ("linear", "segments", "sums", "vectors")},
    "vcpo/stabilizers/*.py": ["tests/vcpo/test_stabilizers.py"],
    f"{_LOOP}/deadlines.py": _BUFFER,
    f"{_LOOP}/replay_buffer.py": _BUFFER,
    f"{_LOOP}/failed_prompts.py": _BUFFER,
    f"{_ACTOR}/losses.py": _BATCHES,
    f"{_ACTOR}/mini_batch.py": [*_BATCHES, _EXPERTS],
    f"{_ACTOR}/sequence_weights.py": _BATCHES,
    f"{_ACTOR}/packed_rotary.py": ["tests/actor/test_packed_rotary.py"],
    f"{_ACTOR}/norms/*.py": _NORMS,
    **{f"{_ACTOR}/norms/{name}.py": [_LAYOUT, *_NORMS] for name in ("collector", "layout")},
    f"{_ACTOR}/norms/settings.py": ["tests/actor/test_norms_in_words.py", *_NORMS],
    f"{_ACTOR}/norms/te_*.py": [_TE],
    **{f"{_ACTOR}/norms/{name}.py": [*_NORMS, _TE] for name in ("experts", "tapping")},
}
"""Files -> the tests that may see a mistake in one of them. The last pattern of a file counts: the code for Transformer
Engine runs in `test_transformer_engine.py` only."""
HARMLESS = "tests/kit/harmless_mutants.txt"


def harmless(file: Path) -> dict[str, str]:
    """Name of a mistake -> why it changes no number. In the file a reason is a line that begins with `#`.

    Raises:
        ValueError: a mistake without a reason before it.
    """
    reasons, reason = {}, ""
    for line in filter(None, file.read_text().splitlines()):
        if line.startswith("#"):
            reason = line.removeprefix("#").strip()
        elif not reason:
            raise ValueError(f"{file}: {line}: no reason before it; put a line that begins with # there")
        else:
            reasons[line] = reason
    return reasons


def is_harmless(mistake: str, reasons: Iterable[str]) -> bool:
    """Return True for a name of the list, or one that begins as a name of the list does up to its star."""
    return any(mistake.startswith(each[:-1]) if each.endswith("*") else mistake == each for each in reasons)


def chosen(only: Sequence[str]) -> dict[str, list[str]]:
    """The files with their tests: those in whose path a name begins with one of `only`."""
    found = {str(f.relative_to(ROOT)): tests for pattern, tests in TESTS.items() for f in sorted(ROOT.glob(pattern))}
    return {file: tests for file, tests in found.items() if any(f"/{text}" in f"/{file}" for text in only)}


class Seen:
    """The names of the mistakes that tests saw, in `file`, to which each is added at once; None: in no file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._names = set(file.read_text().splitlines()) if file and file.exists() else set()

    def __contains__(self, mistake: Mutant) -> bool:
        return mistake.name in self._names

    def add(self, mistake: Mutant) -> None:
        self._names.add(mistake.name)
        if self._file:
            with self._file.open("a") as file:
                file.write(f"{mistake.name}\n")


def in_turn(files: dict[str, list[str]], seed: int) -> list[Mutant]:
    """All mistakes, one of each file in turn, so that a run that ends early has tried some of each."""
    drawn = []
    for file in files:
        mistakes = mutation.mutants(file, ROOT)
        random.Random(f"{seed} {file}").shuffle(mistakes)
        drawn += [(i / len(mistakes), mistake) for i, mistake in enumerate(mistakes)]
    return [mistake for _, mistake in sorted(drawn, key=lambda each: each[0])]


def print_table(made: Counter[str], tried: Counter[str], missed: list[Mutant], known: Counter[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("file", "mistakes", "tried", "seen", "harmless", "missed")
    of_file = Counter(mutant.file for mutant in missed)
    for file in made:
        seen = tried[file] - of_file[file]
        table.add_row(file, *map(str, (made[file], tried[file], seen, known[file], of_file[file])))
    totals = (made.total(), tried.total(), tried.total() - len(missed), known.total(), len(missed))
    table.add_row("all", *map(str, totals))
    Console(width=140).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--minutes", type=positive_number, default=60.0, help="how long to try (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="which mistakes are tried first (default: 0)")
    parser.add_argument(
        "--only", metavar="TEXT", nargs="+", default=[""], help="names (of files or folders) that begin with TEXT"
    )
    parser.add_argument(
        "--seen",
        type=Path,
        metavar="FILE",
        help="the mistakes that tests saw: those in FILE are not tried again, others are added",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line, last")
    arguments = parser.parse_args()
    files = chosen(arguments.only)
    if not files:
        parser.error(f"--only {' '.join(arguments.only)}: no such file among {', '.join(TESTS)}")
    if arguments.seen and not arguments.seen.parent.is_dir():
        parser.error(f"--seen {arguments.seen}: no such folder; make it first")
    environment.apply()
    reaper = session.begin()
    seen = Seen(arguments.seen)
    reasons = harmless(ROOT / HARMLESS)
    mistakes = in_turn(files, arguments.seed)
    made, known = (
        Counter(each.file for each in mistakes),
        Counter(each.file for each in mistakes if is_harmless(each.name, reasons)),
    )
    tried, missed = Counter[str](), list[Mutant]()
    end = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        mutation.copy_of_tree(ROOT, Path(folder))
        copy = Copy(Path(folder))
        copy.import_others(sorted({test for tests in files.values() for test in tests}), wall_s=600.0)
        measured = dict[str, tuple[Outcome, list[Called]]]()
        for mutant in mistakes:
            tests, key = files[mutant.file], " ".join(files[mutant.file])
            if is_harmless(mutant.name, reasons):
                continue
            if mutant in seen:
                tried[mutant.file] += 1
                continue
            if (left := end - time.monotonic()) <= 0:
                continue
            if key not in measured:
                measured[key] = copy.calls(tests, wall_s=3600.0)
            right, called = measured[key]
            if not right.passed:
                parser.error(f"its tests fail without a mistake; run python -m pytest {key}")
            tried[mutant.file] += 1
            limits = {"wall_s": 60 + 10 * right.wall_s, "processor_s": 10 + 3 * right.processor_s}
            if copy.passes_with(mutant, in_order(called, mutant), **limits):
                missed.append(mutant)
                print(f"line {mutant.line}: {mutant.name}", flush=True)
            else:
                seen.add(mutant)
            if tried.total() % 20 == 0:
                print(f"{tried.total()} tried, {len(missed)} missed, {left / 60:.0f} minutes left", file=sys.stderr)
    reaper.communicate(timeout=60)
    print_table(made, tried, missed, known)
    if arguments.json:
        rows = [asdict(mutant) for mutant in missed]
        counts = {"mistakes": made.total(), "tried": tried.total(), "harmless": known.total()}
        print(json.dumps({"seed": arguments.seed, **counts, "missed": rows}))
    return 1 if missed else 0


if __name__ == "__main__":
    run_command(main)
