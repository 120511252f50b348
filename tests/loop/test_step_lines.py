"""A line of metrics.jsonl or samples.jsonl that cannot be read stops nobody."""

from pathlib import Path

import pytest

from recipe.fully_async_policy.launch.next_steps import after_interruption
from scripts.report.payload import read_samples as samples_of_report
from tests.recipe.test_interrupted import config
from verl_vcpo.common import step_lines
from verl_vcpo.report.metrics_file import METRICS_FILE, read_metrics
from verl_vcpo.report.run_log import SAMPLES_FILE, RunLog, last_step, write_summary
from verl_vcpo.report.sample_log import SampleLog, read_samples

SPOILT = {
    "NUL": b"\0" * 400 + b"\n",
    "cut": b'{"step": 3, "wall\0\0\n',
    "no UTF-8": b'\xff\xfe{"step": 3}\n',
    "blank": b"\n",
    "no record": b"[3]\n",
    "deep": b"[" * 100_000 + b"\n",
    "two in one": b'{"step": 3, "rew{"step": 3, "reward": 0.5}\n',
    "no step": b'{"stfp": 3}\n',
}


@pytest.fixture(params=["first", "middle", "last"])
def place(request: pytest.FixtureRequest) -> int:
    return {"first": 0, "middle": 2, "last": 4}[request.param]


@pytest.fixture(params=SPOILT)
def spoilt(request: pytest.FixtureRequest) -> bytes:
    return SPOILT[request.param]


def write(file: Path, spoilt: bytes, place: int) -> None:
    """The lines of steps 1 to 4, the spoilt one among them, and one that a crash has cut off."""
    lines = [b'{"step": %d, "wall_clock_s": 10.0, "reward": 0.5}\n' % step for step in (1, 2, 3, 4)]
    lines.insert(place, spoilt)
    file.write_bytes(b"".join(lines) + b'{"step": 5, "rew')


def test_a_run_goes_on_without_it(tmp_path: Path, spoilt: bytes, place: int, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / METRICS_FILE
    write(file, spoilt, place)
    RunLog(tmp_path).resume(3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    said = capfd.readouterr()
    assert said.out == f"warning: {file}: 1 line(s) cannot be read: skipped\n"
    assert said.err == ""


def test_samples_go_on_without_it(tmp_path: Path, spoilt: bytes, place: int) -> None:
    file = tmp_path / SAMPLES_FILE
    write(file, spoilt, place)
    report = samples_of_report(tmp_path)
    assert report is not None and [row["step"] for row in report["rows"]] == [1, 2, 3, 4] and report["of"] == 4
    SampleLog(tmp_path, 1).resume(3)
    assert [line["step"] for line in read_samples(tmp_path)] == [1, 2, 3]


def test_readers_leave_it_out_and_say_so_once(
    tmp_path: Path, spoilt: bytes, place: int, capfd: pytest.CaptureFixture[str]
) -> None:
    step_lines._say.cache_clear()
    write(tmp_path / METRICS_FILE, spoilt, place)
    assert last_step(tmp_path) == 4
    assert after_interruption(config(tmp_path), []).startswith("interrupted after step 4; ")
    assert write_summary(tmp_path, "vcpo", lag=1, wall_clock_s=60.0)["steps"] == 4
    assert capfd.readouterr().err == (f"warning: {tmp_path / METRICS_FILE}: 1 line(s) cannot be read: skipped\n")
