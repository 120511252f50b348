"""What a long run takes more of at each step: `python -m tests.reliability.soak [--steps N] [--out FOLDER] [--json]`.

The real stack trains on a CPU by the preset countdown_lag, as scripts/quickstart.sh does, with a checkpoint every 50
steps and an evaluation every 100. Every 20 steps the memory, descriptors and threads of each process of the run are
noted, and the shared memory of all. From step 100 on, when the caches are full, the slope of each is the median of the
slopes between any two notes: a single jump, for a checkpoint, does not tilt it.

Exit code 0: no slope is above its level; 1: one is, or the run fails. 500 steps take 8 minutes on 2 cores.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command, whole_number
from recipe.fully_async_policy.launch.processes import processes_of
from tests.kit import ROOT
from tests.kit.small_run import TrainerRun
from verl_vcpo.common.shared_memory import mapped_by

EVERY, FROM_STEP = 20, 100
FIRST_POLICY = ROOT / "docs/measurements/stability/first_policy/countdown_lag"
LEVELS = {"private_kb": 100.0, "resident_kb": 100.0, "descriptors": 0.02, "threads": 0.02}
"""The slopes, per step and process, above which a soak fails: 1 GB of memory or 200 descriptors in 10,000 steps."""
LEVELS_OF_RUN = {"private_kb": 300.0, "shared_kb": 1.0, "processes": 0.02, "descriptors": 0.05, "threads": 0.05}
"""The same of all processes together."""
_HEADS = {
    "private_kb": "private KB",
    "resident_kb": "resident KB",
    "shared_kb": "/dev/shm KB",
    "descriptors": "descriptors",
    "threads": "threads",
    "processes": "processes",
}


@dataclass(frozen=True)
class Note:
    """What the processes of a run had after a step.

    processes: of each process, by its id, the role, and the numbers by the names of `LEVELS`.
    shared_kb: the size of the run's files in /dev/shm.
    """

    step: int
    processes: dict[str, dict[str, float]]
    roles: dict[str, str]
    shared_kb: float

    @property
    def of_run(self) -> dict[str, float]:
        sums: Counter[str] = Counter()
        for numbers in self.processes.values():
            sums.update(numbers)
        return {**sums, "shared_kb": self.shared_kb, "processes": len(self.processes)}


@dataclass(frozen=True)
class Slopes:
    """What a process, or a run, takes more of at each step.

    megabytes: the private memory at the first and at the last of the notes.
    above: the slopes above their levels, in words.
    """

    role: str
    megabytes: tuple[float, float]
    per_step: dict[str, float]
    above: list[str] = field(default_factory=list)


def soak_task(assets: Path, run_dir: Path) -> list[str]:
    """Return the settings of a run on the data in `assets`, with what a long run does now and then."""
    return [
        "+task=countdown_lag",
        f"data.train_files={assets}/train.parquet",
        f"data.val_files={assets}/val.parquet",
        f"actor_rollout_ref.model.path={FIRST_POLICY}",
        f"run_dir={run_dir}",
        "async.lag=4",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        # so that vLLM has touched all of its memory for keys and values long before the slopes begin
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=256",
        "trainer.save_freq=50",
        "trainer.max_actor_ckpt_to_keep=2",
    ]


def role(process: psutil.Process) -> str:
    """Return what a process of a run does: a Ray actor's class, a module that Python runs, or the program."""
    command = process.cmdline()
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    scripts = [Path(word).name for word in command if word.endswith(".py")]
    if "python" in Path(command[0]).name:
        return scripts[0] if scripts else "python"
    return Path(command[0].split(maxsplit=1)[0]).name.partition(".")[0]


def look(step: int, processes: Iterable[psutil.Process]) -> Note:
    """Return what the processes have now."""
    found, roles, processes = {}, {}, list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # ended since; a dead process has no command
            of, memory = role(process), process.memory_full_info()
            numbers = {
                "private_kb": memory.uss / 1024,
                "resident_kb": memory.rss / 1024,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
            }
            found[str(process.pid)], roles[str(process.pid)] = numbers, of
    sizes = [os.stat(file.path).st_blocks / 2 for file in mapped_by(processes) if os.path.exists(file.path)]
    return Note(step, found, roles, sum(sizes))


def slope(steps: Sequence[int], values: Sequence[float]) -> float:
    """Return the median of the slopes between any two of the values."""
    pairs = itertools.combinations(zip(steps, values, strict=True), 2)
    return statistics.median((later[1] - sooner[1]) / (later[0] - sooner[0]) for sooner, later in pairs)


def slopes(notes: Sequence[Note]) -> list[Slopes]:
    """Return the slopes of the run, then those of each process that is in all notes, the steepest first."""
    steps = [note.step for note in notes]
    of_run = _slopes("all processes", steps, [note.of_run for note in notes], LEVELS_OF_RUN)
    lasting = set.intersection(*(set(note.processes) for note in notes))
    of_each = [
        _slopes(f"{notes[-1].roles[pid]} ({pid})", steps, [note.processes[pid] for note in notes], LEVELS)
        for pid in lasting
    ]
    return [of_run, *sorted(of_each, key=lambda found: -found.per_step["private_kb"])]


def _slopes(name: str, steps: list[int], values: list[dict[str, float]], levels: dict[str, float]) -> Slopes:
    found = {kind: slope(steps, [of_step[kind] for of_step in values]) for kind in levels}
    above = [
        f"{_HEADS[kind]} {found[kind]:+.3g} a step, above {level:g}"
        for kind, level in levels.items()
        if found[kind] > level
    ]
    first, last = (values[at]["private_kb"] / 1024 for at in (0, -1))
    return Slopes(name, (round(first), round(last)), found, above)


def soak(folder: Path, steps: int) -> list[Note]:
    """Make a run of `steps` in `folder`, and return the notes from `FROM_STEP` on; the file notes.jsonl has all.

    Raises:
        RuntimeError: the run fails.
    """
    rows = ["countdown", "--out", str(folder / "data"), "--train", "1024", "--val", "64"]
    subprocess.run(
        [sys.executable, "-m", "scripts.prepare_data", *rows], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    evaluation = ["trainer.test_freq=100", f"trainer.total_training_steps={steps}"]
    run, notes = TrainerRun(folder / "data", folder / "run", *evaluation, task=soak_task), []
    try:
        for step in tqdm(range(EVERY, steps, EVERY), desc=f"{EVERY} steps each"):
            run.wait_for_step(step)
            notes.append(look(step, [run.process, *processes_of(run.run_id)]))
            with open(folder / "notes.jsonl", "a") as file:
                file.write(json.dumps(asdict(notes[-1])) + "\n")
    except BaseException:
        with contextlib.suppress(psutil.NoSuchProcess):  # the run has ended
            run.process.terminate()
        run.wait()
        raise
    if code := run.wait():
        raise RuntimeError(f"the run ends with code {code}:\n{run.tail()}")
    return [note for note in notes if note.step >= FROM_STEP]


def main() -> int:
    arguments = _arguments()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="vcpo-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = slopes(soak(folder.absolute(), arguments.steps))
    except RuntimeError as error:
        print(f"{error}\nThe run and its notes are in {folder}", file=sys.stderr)
        return 1
    _print_table(found)
    failed = [f"{of.role}: {what}" for of in found for what in of.above]
    print("\n".join(failed) or "No slope is above its level.")
    if arguments.out is None and not failed:
        shutil.rmtree(folder)
    else:
        print(f"The run and its notes are in {folder}")
    if arguments.json:
        print(json.dumps({"steps": arguments.steps, "failed": failed, "rows": [asdict(of) for of in found]}))
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    least = FROM_STEP + 5 * EVERY
    parser.add_argument("--steps", type=whole_number(least), default=500, help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the run and the notes in this new folder")
    parser.add_argument("--json", action="store_true", help="print the slopes as one JSON line, last")
    arguments = parser.parse_args()
    if arguments.out and arguments.out.exists():
        parser.error(f"--out {arguments.out}: is there already; give a new folder")
    return arguments


def _print_table(found: list[Slopes]) -> None:
    from rich.console import Console
    from rich.table import Table

    kinds = [kind for kind in _HEADS if any(kind in of.per_step for of in found)]
    table = Table("a step more of", "private MB", *(_HEADS[kind] for kind in kinds))
    for of in found:
        numbers = [f"{of.per_step[kind]:+.2f}" if kind in of.per_step else "" for kind in kinds]
        table.add_row(of.role, f"{of.megabytes[0]:.0f} to {of.megabytes[1]:.0f}", *numbers)
    Console(width=140).print(table)


if __name__ == "__main__":
    run_command(main)
