"""The reader of an hour of chaos: a made-up hour without a mistake is clean, and each kind of mistake is found."""

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.chaos_reader import KINDS, LEFT, SAMPLES, count, newest_whole
from tests.reliability.chaos_reward import compute_score, is_filtered, value
from tests.reliability.chaos_spoil import SPOILS
from tests.reliability.chaos_watch import LEDGER, MARK, Watch, left_over

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


def scored_long_ago(hour: Path) -> None:
    """All that step 6 trained on was scored while step 2 was made; the run says a lag of 0."""
    kept = [score for score in lines_of(hour / "scored.jsonl") if score["row"] not in rows_of(6)]
    write(hour / "scored.jsonl", [*kept, *({"row": row, "at": 21.0} for row in rows_of(6) for _ in range(SAMPLES))])


def damaged(hour: Path) -> None:
    (hour / "run/checkpoints/global_step_6/model").write_bytes(b"")


def without_line(name: str) -> Callable[[Path], None]:
    def does(hour: Path) -> None:
        write(hour / "run" / name, lines_of(hour / "run" / name)[:-1])

    return does


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
    ("trained on, and not as said", lambda hour: write(hour / "scored.jsonl", lines_of(hour / "scored.jsonl")[:-1])),
    ("lag above the bound", as_said(lag=1)),
    ("lag above the bound", lambda hour: change(hour / "run/samples.jsonl", -1, lag=1)),
    ("lag above the bound", scored_long_ago),
    ("steps missing", without_line("metrics.jsonl")),
    ("steps missing", without_line("samples.jsonl")),
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


@pytest.mark.parametrize(("kind", "mistake"), MISTAKES, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(MISTAKES)])
def test_each_mistake_is_found_and_no_other(hour: Path, kind: str, mistake: Callable[[Path], None]) -> None:
    mistake(hour)
    assert [name for name, found in count(hour).items() if found] == [kind]


def test_each_kind_has_its_mistake() -> None:
    assert {kind for kind, _ in MISTAKES} == {*KINDS}


@pytest.mark.parametrize("name", [name for name, _ in SPOILS])
def test_what_the_chaos_itself_has_spoilt_is_no_mistake(hour: Path, name: str) -> None:
    before = sorted((file.name, file.read_bytes()) for file in (hour / "run").rglob("*") if file.is_file())
    dict(SPOILS)[name](hour, random.Random(name))
    after = sorted((file.name, file.read_bytes()) for file in (hour / "run").rglob("*") if file.is_file())
    assert after != before
    assert newest_whole(hour / "run") == (3 if name.startswith("newest") else 6)
    assert count(hour) == {kind: [] for kind in KINDS}


def test_rewards_say_which_rows_a_step_has(tmp_path: Path) -> None:
    scores = [
        compute_score(str(tmp_path), str(tmp_path), "", {"index": row})["score"]
        for row in (5, 5, 6, 6, 7)
        for _ in "ab"
    ]
    assert len({*scores[:4]}) == 4 and len({*scores[4:8]}) == 1, "group filtering takes row 6 out, and no other"
    assert [round(score, 3) for score in scores] == [round(value(row), 3) for row in (5, 5, 6, 6, 7) for _ in "ab"]
    assert [line["row"] for line in lines_of(tmp_path / "scored.jsonl")] == [5] * 4 + [6] * 4 + [7] * 2


def test_a_line_restored_from_a_checkpoint_is_of_the_launch_that_saved_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    watch = Watch(tmp_path, run_dir / "metrics.jsonl", "no process has this")
    watch.begin(1, None)
    checkpoint(run_dir, 3)
    write(run_dir / "metrics.jsonl", [{"step": 1}, {"step": 2}])
    watch.copy_lines()
    watch.begin(2, 3)
    write(run_dir / "metrics.jsonl", [{"step": step} for step in range(1, 5)])
    watch.copy_lines()
    watch.stop()
    assert [(line["step"], line["launch"]) for line in lines_of(tmp_path / LEDGER)] == [(1, 1), (2, 1), (3, 1), (4, 2)]


def test_what_a_launch_has_left_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "this test")
    temporary = tmp_path / "temporary"
    watch = Watch(tmp_path, tmp_path / "metrics.jsonl", "this test")
    memory = f"/dev/shm/test-chaos-{time.monotonic_ns()}"
    program = f"import time; kept = open('{memory}', 'w'); time.sleep(600)"
    of_launch = subprocess.Popen([sys.executable, "-c", program])
    for folder in ("session", "vcpo-0/ray/session", "vcpo-0/run"):
        (temporary / folder).mkdir(parents=True)
    (temporary / "a.lock").touch()
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(temporary):
        bound.bind("a.socket")
    deadline = time.monotonic() + 60
    while not watch.shared_memory and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        left = left_over(watch, "this test", temporary, 0.0)
    finally:
        watch.stop()
        of_launch.terminate()
        of_launch.wait()
        Path(memory).unlink()
    assert any(line.startswith(f"{of_launch.pid} ") for line in left["processes"])
    assert left["shared memory"] == [Path(memory).name]
    assert [Path(name).name for name in left["sockets"]] == ["a.socket"]
    assert [str(Path(name).relative_to(temporary)) for name in left["folders"]] == [
        "session",
        "vcpo-0/ray/session",
        "vcpo-0/run",
    ]
    assert [Path(name).name for name in left["files"]] == ["a.lock"]
