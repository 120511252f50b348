"""A model that vLLM's OpenAI server serves, in processes of its own."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import requests

from tests.kit.sandbox_server import free_port


@contextlib.contextmanager
def served_by_vllm(model: Path, log: Path, *options: str) -> Iterator[str]:
    """Yield the address of `recipe.vllm serve` with this model and options; its output goes to `log`."""
    port = free_port()
    command = [sys.executable, "-m", "recipe.vllm", "serve", str(model), "--port", str(port)]
    with open(log, "w") as output:
        arguments = [*command, "--dtype", "float32", "--enforce-eager", *options]
        server = psutil.Popen(arguments, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 600
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"http://127.0.0.1:{port}/health", timeout=10).ok:
                    break
            time.sleep(0.2)
        listens = [at.laddr.ip for at in server.net_connections("tcp") if at.laddr[1:] == (port,) and not at.raddr]
        assert listens == ["127.0.0.1"], "other machines reach a server that asks for no key"
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # a server that did not start has ended
            processes = [server, *server.children(recursive=True)]
            server.terminate()
            _, left = psutil.wait_procs(processes, timeout=30)
            for process in left:
                process.kill()
