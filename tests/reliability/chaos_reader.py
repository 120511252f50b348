"""A count of the mistakes in an hour of chaos, from files alone. The module imports nothing of the product.

The folder of an hour:

    launches.jsonl  {launch, lag, batch, from, said, code}: its settings; the newest whole checkpoint before it, by the
                    checksums; the step from which the launcher says that it goes on, or null; its exit code
    ledger.jsonl    {step, rows, lag, reward, launch, at}: the lines of metrics.jsonl, copied as they came
    scored.jsonl    {row, at}: each call of the reward (of a row that was sampled)
    faults.jsonl    {at, launch, fault, target, outcome, violation}: each fault, and its outcome
    spoilt.jsonl    {file, steps, mark}: the files that the chaos itself has spoilt
    left.jsonl      {launch, processes, shared memory, semaphores, sockets, folders, files}: left by a launch
    run/            the folder of the runs
"""

import json
import zlib
from collections import Counter
from math import ceil
from pathlib import Path
from typing import Any

from tests.reliability.chaos_reward import SPREAD, is_filtered, value

SAMPLES = 4
"""The number of samples of a prompt, and of lines in samples.jsonl for a recorded step."""
KINDS = (
    "prompts lost",
    "trained on twice",
    "trained on, and not as said",
    "lag above the bound",
    "steps missing",
    "lines unreadable",
    "checkpoints unreadable",
    "resumes refused",
    "resumes from another step",
    "waits above their limit",
    "not as the table says",
    "processes left",
    "shared memory left",
    "semaphores left",
    "sockets left",
    "folders left",
    "files left",
)
LEFT = ("processes", "shared memory", "semaphores", "sockets", "folders", "files")
_ROUNDING = 1e-5


def read(file: Path) -> list[dict[str, Any]]:
    """Read a file of the chaos's own; [] if nothing was written. The last line may be cut."""
    raw = file.read_text().split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in raw]


def count(folder: Path) -> dict[str, list[str]]:
    """Return the mistakes of each of `KINDS`, a line each; all lists are empty if nothing went wrong."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    launches = {line["launch"]: line for line in read(folder / "launches.jsonl")}
    steps = lineage(read(folder / "ledger.jsonl"))
    if not steps:
        found["steps missing"].append("no step was made")
        return found
    complete = bool(launches) and launches[max(launches)].get("code") == 0 and launches[max(launches)]["lag"] == 0
    _prompts(found, steps, complete)
    _lags(found, steps, launches, folder)
    _values(found, steps)
    _steps(found, steps, folder)
    _resumes(found, launches)
    for checkpoint, wrong in damaged_checkpoints(folder).items():
        found["checkpoints unreadable"].append(f"{checkpoint}: {wrong}")
    for fault in read(folder / "faults.jsonl"):
        if fault.get("violation"):
            found[fault["violation"]].append(f"launch {fault['launch']}, {fault['fault']}: {fault['outcome']}")
    for left in read(folder / "left.jsonl"):
        for kind in LEFT:
            found[f"{kind} left"] += [f"launch {left['launch']}: {name}" for name in left[kind]]
    return found


def lineage(ledger: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the surviving line of each step: a later launch makes the steps after its checkpoint again."""
    return {line["step"]: line for line in ledger if line["step"]}


def _prompts(found: dict[str, list[str]], steps: dict[int, dict[str, Any]], complete: bool) -> None:
    """Note prompts lost, trained twice or unfiltered. Rows come in the file's order; the last launch leaves none."""
    trained = Counter(row for line in steps.values() for row in line["rows"])
    where = {row: step for step, line in steps.items() for row in line["rows"]}
    for row, times in sorted(trained.items()):
        if times > 1:
            found["trained on twice"].append(f"row {row}: {times} times, last in step {where[row]}")
        if is_filtered(row):
            found["trained on, and not as said"].append(
                f"row {row}, whose group is to be filtered, in step {where[row]}"
            )
    if complete:
        due = (row for row in range(max(trained)) if not is_filtered(row))
        found["prompts lost"] += [f"row {row}" for row in due if row not in trained]


def _lags(
    found: dict[str, list[str]], steps: dict[int, dict[str, Any]], launches: dict[int, dict[str, Any]], folder: Path
) -> None:
    """Note lags above the bound, by the run's lines and by the times at which the samples were scored."""
    times: dict[int, list[float]] = {}
    for score in read(folder / "scored.jsonl"):
        times.setdefault(score["row"], []).append(score["at"])
    events = sorted((line["at"], line["step"]) for line in read(folder / "ledger.jsonl"))
    for step, line in steps.items():
        bound = ceil(launches[line["launch"]]["lag"])
        if line["lag"] is None or line["lag"] > bound:
            found["lag above the bound"].append(f"step {step}: {line['lag']} of at most {bound}")
        for row in line["rows"]:
            scored = [at for at in times.get(row, []) if at <= line["at"]]
            if len(scored) < SAMPLES:
                found["trained on, and not as said"].append(f"step {step}: row {row} was scored {len(scored)} times")
                continue
            before = [made for at, made in events if at <= scored[-SAMPLES]]
            # A line appears after its step's weight update, so the samplers had at most one more version.
            newest = before[-1] + 1 if before else 0
            if before and step - 1 - newest > bound:
                found["lag above the bound"].append(f"step {step}: row {row} was scored at version {newest} or before")
    for sample in _lines(folder / "run" / "samples.jsonl")[0]:
        step = sample["step"]
        if step in steps and sample["lag"] > ceil(launches[steps[step]["launch"]]["lag"]):
            found["lag above the bound"].append(f"step {step}: a sample of lag {sample['lag']}")


def _values(found: dict[str, list[str]], steps: dict[int, dict[str, Any]]) -> None:
    """Note steps whose mean reward is not that of their rows: other rows, or a failed reward, were in the batch."""
    for step, line in steps.items():
        expected = sum(map(value, line["rows"])) / max(1, len(line["rows"]))
        if line["reward"] is None or not -_ROUNDING <= line["reward"] - expected <= SPREAD + _ROUNDING:
            found["trained on, and not as said"].append(
                f"step {step}: mean reward {line['reward']}, of its rows {expected:.6f}"
            )


def _steps(found: dict[str, list[str]], steps: dict[int, dict[str, Any]], folder: Path) -> None:
    """Note steps that are not once in the ledger and the run's own files, except lines that the chaos spoilt."""
    last = max(steps)
    found["steps missing"] += [f"step {step}" for step in range(1, last + 1) if step not in steps]
    spoilt = read(folder / "spoilt.jsonl")
    for name, each in (("metrics.jsonl", 1), ("samples.jsonl", SAMPLES)):
        lines, unreadable = _lines(folder / "run" / name)
        there = Counter(line["step"] for line in lines if line["step"])
        gone = {step for entry in spoilt if Path(entry["file"]).name == name for step in entry["steps"]}
        recorded = range(1, last + 1) if each == 1 else there
        for step in recorded:
            if there[step] > each or (there[step] < each and step not in gone):
                found["steps missing"].append(f"{name}: step {step} has {there[step]} lines of {each}")
        if unreadable and not any(Path(entry["file"]).name == name for entry in spoilt):
            found["lines unreadable"].append(f"{name}: {unreadable}")


def _resumes(found: dict[str, list[str]], launches: dict[int, dict[str, Any]]) -> None:
    for number, launch in launches.items():
        if launch.get("code") == 2:
            found["resumes refused"].append(f"launch {number}: {launch.get('words', '')[-300:]}")
        elif launch["from"] is not None and launch.get("said") not in (None, launch["from"]):
            found["resumes from another step"].append(f"launch {number}: {launch['said']}, not {launch['from']}")


def _lines(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the readable lines of a file of the run, and the number of unreadable ones, without a cut last line."""
    lines, unreadable = [], 0
    for raw in file.read_bytes().split(b"\n")[:-1] if file.is_file() else []:
        try:
            line = json.loads(raw)
            lines.append({**line, "step": int(line["step"])})
        except (ValueError, TypeError, KeyError):
            unreadable += 1
    return lines, unreadable


def damaged_checkpoints(folder: Path) -> dict[str, str]:
    """Return the damage of each damaged checkpoint that the chaos has not spoilt."""
    spoilt = {(entry["file"], entry["mark"]) for entry in read(folder / "spoilt.jsonl")}
    damaged = {}
    for checkpoint in (folder / "run" / "checkpoints").glob("global_step_*"):
        if (checkpoint.name, mark_of(checkpoint)) not in spoilt and (wrong := damage(checkpoint)):
            damaged[checkpoint.name] = wrong
    return damaged


def mark_of(checkpoint: Path) -> str:
    """Return a mark that tells a checkpoint of a step from a later one of the same step."""
    found = checkpoint.stat()
    return f"{found.st_ino}-{found.st_ctime_ns}"


def damage(checkpoint: Path) -> str:
    """Return how a checkpoint's files differ from its manifest; '' if the checkpoint is whole."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        for name, (size, crc) in files.items():
            content = (checkpoint / name).read_bytes()
            if len(content) != size or zlib.crc32(content) != crc:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def newest_whole(run_dir: Path) -> int | None:
    """Return the step of the newest whole checkpoint, or None."""
    folders = (run_dir / "checkpoints").glob("global_step_*")
    steps = sorted((int(path.name.rpartition("_")[2]) for path in folders), reverse=True)
    return next((step for step in steps if not damage(run_dir / "checkpoints" / f"global_step_{step}")), None)
