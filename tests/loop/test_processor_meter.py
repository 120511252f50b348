"""Processor time is counted for what a process works for, and only of processes of the run."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from verl_vcpo.common.run_id import RUN_ID_VARIABLE
from verl_vcpo.report.processor_meter import CORES, ProcessorMeter, Role

_BUSY = """
import sys, time
print(flush=True)
sys.stdin.readline()
end = time.process_time() + 0.2
while time.process_time() < end: pass
sys.stdin.read()
"""


Start = Callable[[str, str], "subprocess.Popen[str]"]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a process that takes 0.2 s of the processor once it is sent a line."""
    monkeypatch.setenv(RUN_ID_VARIABLE, "this run")
    started = []

    def start_one(title: str, run_id: str) -> subprocess.Popen[str]:
        command, environment = [sys.executable, "-S", "-c", _BUSY, title], os.environ | {RUN_ID_VARIABLE: run_id}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    yield start_one
    for process in started:
        process.communicate()


def test_what_processes_take_is_counted_by_their_work(start: Start) -> None:
    meter, begun = ProcessorMeter(), []
    work = {"VLLM::EngineCore": "this run", "VLLM::Worker": "this run", "gcs_server": "this run"}
    for title, run_id in (work | {"ray::WorkerDict": "another"}).items():
        process = start(title, run_id)
        assert process.stdout
        process.stdout.readline()
        begun.append(process)
    assert meter.take() == {}
    for process in begun:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    spent, deadline = dict.fromkeys(Role, 0.0), time.monotonic() + 120
    while spent[Role.ENGINES] < 0.35 or spent[Role.OTHERS] < 0.15:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        taken = meter.take()
        spent = {role: spent[role] + taken[role] for role in Role}
    assert spent[Role.ENGINES] < 0.5 and spent[Role.OTHERS] < 0.3
    assert spent[Role.AGENT_LOOPS] == 0 and taken[CORES] >= 1
