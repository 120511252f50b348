"""A soak sees what grows with each step, in one process or in all, and nothing else."""

from types import SimpleNamespace

import psutil
import pytest

from tests.reliability.soak import EVERY, FROM_STEP, Note, look, role, slopes

STEPS = range(FROM_STEP, 500, EVERY)
STEADY = {"private_kb": 500_000.0, "resident_kb": 600_000.0, "descriptors": 40.0, "threads": 9.0}


def note(step: int, *processes: dict[str, float], shared_kb: float = 0.0) -> Note:
    named = {str(pid): {**STEADY, **numbers} for pid, numbers in enumerate(processes)}
    return Note(step, named, {pid: f"of {pid}" for pid in named}, shared_kb)


def jump(step: int) -> float:
    return 900_000.0 if step == 300 else 500_000.0


@pytest.mark.parametrize(
    ("grown", "found"),
    [
        (lambda step: note(step, {}, {}), []),
        (lambda step: note(step, {"private_kb": 5e5 + 90 * step}, {"private_kb": 5e5 - 90 * step}), []),
        (lambda step: note(step, {"private_kb": jump(step)}), []),
        (lambda step: note(step, {}, *([{"private_kb": 9e6}] if step == 300 else [])), []),
        (lambda step: note(step, {}, {"private_kb": 5e5 + 150 * step}), ["of 1 (1): private KB +150"]),
        (lambda step: note(step, {"descriptors": 40 + step // 20}), ["of 0 (0): descriptors +0.05"]),
        (lambda step: note(step, {}, shared_kb=4.0 * step), ["all processes: /dev/shm KB +4"]),
        (
            lambda step: note(step, *[{"private_kb": 5e5 + 80 * step}] * 4),
            ["all processes: private KB +320"],
        ),
        (lambda step: note(step, *[{}] * (step // 20)), ["all processes: processes +0.05", "descriptors", "private"]),
    ],
)
def test_a_slope_above_its_level(grown: object, found: list[str]) -> None:
    rows = slopes([grown(step) for step in STEPS])  # type: ignore[operator]
    above = [f"{of.role}: {what}" for of in rows for what in of.above]
    assert bool(above) == bool(found) and all(any(text in line for line in above) for text in found), above


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["ray::LagKTrainer.step", ""], "ray::LagKTrainer"),
        (
            ["/venv/bin/python", "-u", "-m", "recipe.fully_async_policy.main", "+task=x"],
            "recipe.fully_async_policy.main",
        ),
        (["/venv/bin/python", "-u", "/ray/dashboard/agent.py", "--port", "1"], "agent.py"),
        (["/ray/core/src/ray/gcs/gcs_server", "--log_dir=/x.y"], "gcs_server"),
        (["VLLM::EngineCore"], "VLLM::EngineCore"),
    ],
)
def test_a_process_is_named_by_what_it_does(command: list[str], name: str) -> None:
    assert role(SimpleNamespace(cmdline=lambda: command)) == name  # type: ignore[arg-type]


def test_a_look_at_this_process_and_one_that_has_ended() -> None:
    ended = psutil.Popen(["true"])
    ended.wait()
    found = look(20, [psutil.Process(), ended])
    (numbers,) = found.processes.values()
    assert all(value > 0 for value in numbers.values()) and len(found.roles) == 1
