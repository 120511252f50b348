"""The line that says why an engine did not start names the cause, which vLLM has in a log alone."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from verl_vcpo.samplers.engine_error import cause
from verl_vcpo.samplers.vllm_server import LagKvLLMHttpServer, vLLMHttpServer

ENGINE = "(EngineCore pid=7) ERROR 11-28 10:01:46 [core.py:1433]"
WORKERS = "(Worker_TP1 pid=9) ERROR 11-28 10:01:46 [multiproc_executor.py:948]"
SEE_ABOVE = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
SEE_TRACE = (
    "RuntimeError: WorkerProc initialization failed due to an exception in a background process. See stack trace for "
    "root cause."
)
OF_THE_ENGINE = [
    "INFO a server starts",
    f"{ENGINE} EngineCore failed to start.",
    f"{ENGINE} Traceback (most recent call last):",
    f"{ENGINE}     raise ValueError(",
    f"{ENGINE} KeyError: 'a'",
    f"{ENGINE} ValueError: No available memory for the cache blocks",
]
OF_A_WORKER = [
    f"{WORKERS} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
    f"{ENGINE} {SEE_TRACE}",
    "ValueError: of another process",
]


@pytest.mark.parametrize(
    ("error", "logs", "expected"),
    [
        (SEE_ABOVE, OF_THE_ENGINE, "ValueError: No available memory for the cache blocks"),
        (SEE_ABOVE, OF_A_WORKER, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"),
        (SEE_ABOVE, ["Fatal Python error: Illegal instruction"], "Fatal Python error: Illegal instruction"),
        (SEE_ABOVE.replace("{}", "{'EngineCore': -9}"), ["loading"], "its process was ended by SIGKILL"),
        (SEE_ABOVE, ["nothing said"], SEE_ABOVE),
        ("max_model_len is too large", OF_THE_ENGINE, "max_model_len is too large"),
    ],
)
def test_the_cause(error: str, logs: list[str], expected: str) -> None:
    assert cause(RuntimeError(error), "\n".join(logs)) == expected


def test_a_server_finds_the_cause_in_its_own_log(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        subprocess.run([sys.executable, __file__], stdout=log, stderr=log, check=True)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "a sampler's engine did not start: ValueError: of a child"


async def _dies(*_: object) -> None:
    subprocess.run([sys.executable, "-c", "raise ValueError('of a child')"], check=False)
    raise RuntimeError(SEE_ABOVE)


if __name__ == "__main__":
    vLLMHttpServer.run_server = _dies
    try:
        asyncio.run(object.__new__(LagKvLLMHttpServer).run_server(None))
    except RuntimeError as error:
        print(error)
