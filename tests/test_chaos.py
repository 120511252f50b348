"""The reader of an hour of chaos: a made-up hour without a mistake is clean, and each kind of mistake is found."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.chaos_reader import KINDS, LEFT, SAMPLES, count
from tests.reliability.chaos_reward import is_filtered, value
from tests.reliability.chaos_watch import LEDGER

STEPS, BATCH = 6, 2
ROWS = [row for row in range(100) if not is_filtered(row)]


def write(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def change(file: Path, which: int, **values: Any) -> None:
    lines = lines_of(file)
    lines[which] |= values
    write(file, lines)


def rows_of(step: int) -> list[int]:
    return ROWS[(step - 1) * BATCH : step * BATCH]


def checkpoint(run_dir: Path, step: int) -> Path:
    folder = run_dir / "checkpoints" / f"global_step_{step}"
    folder.mkdir(parents=True)
    (folder / "model").write_bytes(b"weights" * 99)
    files = {"model": [7 * 99, zlib.crc32(b"weights" * 99)]}
    (folder / "manifest.json").write_text(json.dumps({"run": "a", "files": files}))
    return folder


@pytest.fixture
def hour(tmp_path: Path) -> Path:
    """Two launches: steps 1 to 5 at lag 2, of which 4 and 5 were made again at lag 0, and step 6."""
    made = [(1, step, 2) for step in range(1, 6)] + [(2, step, 0) for step in range(4, STEPS + 1)]
    ledger = [
        {
            "step": step,
            "rows": rows_of(step),
            "lag": min(lag, step - 1),
            "reward": sum(map(value, rows_of(step))) / BATCH + 4e-5,
            "launch": launch,
            "at": 10.0 * at,
        }
        for at, (launch, step, lag) in enumerate(made, start=1)
    ]
    scored = [{"row": row, "at": line["at"] - 5} for line in ledger for row in line["rows"] for _ in range(SAMPLES)]
    write(tmp_path / LEDGER, ledger)
    write(tmp_path / "scored.jsonl", scored)
    write(tmp_path / "launches.jsonl", [
        {"launch": 1, "lag": 2, "batch": BATCH, "from": None, "said": None, "code": -9, "words": ""},
        {"launch": 2, "lag": 0, "batch": BATCH, "from": 3, "said": 3, "code": 0, "words": ""},
    ])  # fmt: skip
    write(tmp_path / "faults.jsonl", [
        {"launch": 1, "fault": "kill -9: driver", "target": "process 7", "outcome": "ended", "violation": None}
    ])  # fmt: skip
    nothing: dict[str, list[str]] = dict.fromkeys(LEFT, [])
    write(tmp_path / "left.jsonl", [{"launch": launch, **nothing} for launch in (1, 2)])
    run_dir = tmp_path / "run"
    checkpoint(run_dir, 3), checkpoint(run_dir, 6)
    write(run_dir / "metrics.jsonl", [{"step": step} for step in range(1, STEPS + 1)])
    samples = [{"step": step, "lag": 0} for step in (1, 2, 4, 6) for _ in range(SAMPLES)]
    write(run_dir / "samples.jsonl", samples)
    return tmp_path


def not_trained(hour: Path) -> None:
    """A row gives its place to the next one."""
    changed = [*rows_of(6)[:-1], ROWS[STEPS * BATCH]]
    write(hour / "scored.jsonl", [*lines_of(hour / "scored.jsonl"), *[{"row": changed[-1], "at": 71.0}] * SAMPLES])
    change(hour / LEDGER, -1, rows=changed, reward=sum(map(value, changed)) / BATCH)


def trained_again(hour: Path) -> None:
    twice = [*rows_of(6), rows_of(1)[0]]
    write(hour / "scored.jsonl", [*lines_of(hour / "scored.jsonl"), *[{"row": twice[-1], "at": 71.0}] * SAMPLES])
    change(hour / LEDGER, -1, rows=twice, reward=sum(map(value, twice)) / len(twice))


def damaged(hour: Path) -> None:
    (hour / "run/checkpoints/global_step_6/model").write_bytes(b"")


def without_line(hour: Path) -> None:
    write(hour / "run/metrics.jsonl", lines_of(hour / "run/metrics.jsonl")[:-1])


def garbage_line(hour: Path) -> None:
    with open(hour / "run/metrics.jsonl", "a") as file:
        file.write("garbage\n")


def left(kind: str) -> Callable[[Path], None]:
    return lambda hour: change(hour / "left.jsonl", 0, **{kind: ["it"]})


def noted(kind: str) -> Callable[[Path], None]:
    return lambda hour: change(hour / "faults.jsonl", 0, violation=kind)


def as_said(**values: Any) -> Callable[[Path], None]:
    return lambda hour: change(hour / LEDGER, -1, **values)


MISTAKES: list[tuple[str, Callable[[Path], None]]] = [
    ("prompts lost", not_trained),
    ("trained on twice", trained_again),
    ("trained on, and not as said", as_said(reward=0.0)),
    ("lag above the bound", as_said(lag=1)),
    ("steps missing", without_line),
    ("lines unreadable", garbage_line),
    ("checkpoints unreadable", damaged),
    ("resumes refused", lambda hour: change(hour / "launches.jsonl", 1, code=2)),
    ("resumes from another step", lambda hour: change(hour / "launches.jsonl", 1, said=0)),
    ("waits above their limit", noted("waits above their limit")),
    ("not as the table says", noted("not as the table says")),
    *((f"{kind} left", left(kind)) for kind in LEFT),
]


def test_nothing_is_found_where_nothing_is_wrong(hour: Path) -> None:
    assert count(hour) == {kind: [] for kind in KINDS}
    assert {kind for kind, _ in MISTAKES} == {*KINDS}


@pytest.mark.parametrize(("kind", "mistake"), MISTAKES, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(MISTAKES)])
def test_each_mistake_is_found_and_no_other(hour: Path, kind: str, mistake: Callable[[Path], None]) -> None:
    mistake(hour)
    assert [name for name, found in count(hour).items() if found] == [kind]
