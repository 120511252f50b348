"""samples.jsonl: which steps are recorded, and what a resumed run keeps of it."""

from pathlib import Path

from verl_vcpo.report.run_log import SAMPLES_FILE
from verl_vcpo.report.sample_log import SampleLog, read_samples


def test_the_first_step_and_every_nth_are_recorded(tmp_path: Path) -> None:
    assert [step for step in range(1, 13) if SampleLog(tmp_path, 5).is_due(step)] == [1, 5, 10]
    assert not any(SampleLog(tmp_path, 0).is_due(step) for step in range(1, 13))


def test_a_resumed_record_goes_on_after_its_step(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, 1)
    for step in (1, 2, 3):
        log.write([{"step": step, "response": f"{step}{letter}\u2028"} for letter in "ab"])
    with open(tmp_path / SAMPLES_FILE, "a") as file:
        file.write('{"step": 2, "half')
    assert len(read_samples(tmp_path)) == 6, "a line that a crash has cut off is none"
    resumed = SampleLog(tmp_path, 1)
    resumed.resume(2)
    resumed.write([{"step": 3, "response": "anew"}])
    assert [line["response"] for line in read_samples(tmp_path)] == [
        "1a\u2028",
        "1b\u2028",
        "2a\u2028",
        "2b\u2028",
        "anew",
    ]


def test_a_new_run_begins_a_new_record(tmp_path: Path) -> None:
    SampleLog(tmp_path, 1).resume(0)
    SampleLog(tmp_path, 1).write([{"step": 1}])
    SampleLog(tmp_path, 1).resume(0)
    assert read_samples(tmp_path) == [] and not (tmp_path / SAMPLES_FILE).exists()
