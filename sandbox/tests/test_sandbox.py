"""The code sandbox: what ordinary programs can do in it, what others cannot, and how it fails."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyseccomp
import pytest
from aiohttp import web
from verl.utils.reward_score.sandbox_fusion.utils import call_sandbox_api

from code_sandbox import __main__ as sandbox_server
from code_sandbox import cgroups, isolation, seccomp
from code_sandbox.__main__ import main
from code_sandbox.client import SandboxClient, SandboxUnavailable
from code_sandbox.environment import package_paths
from code_sandbox.few_lines import LINES_A_MINUTE
from code_sandbox.protocol import CommandResult
from tests.kit.ordinary_programs import PROGRAMS
from tests.kit.sandbox_server import served

SHORT_S = 5.0  # enough to start in, for programs that are to reach their limit
LIMIT_S = 60.0  # programs have the lowest priority: beside other tests, importing scipy can take them half a minute


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--memory-mb", "512", "--output-kb", "16", "--time-s", f"{LIMIT_S}", "--warm", "1") as (url, _):
        yield url


def run(url: str, code: str, run_timeout: float = LIMIT_S, stdin: str = "") -> CommandResult:
    return asyncio.run(SandboxClient(url, patience_s=5.0).run(code, run_timeout, stdin))


def stats(url: str) -> dict[str, Any]:
    import requests

    return requests.get(f"{url}/stats", timeout=10).json()


def settled(url: str) -> None:
    """The server sees a moment later that a client has left."""
    deadline = time.monotonic() + LIMIT_S
    while (here := stats(url)["waiting_or_running"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert here == 0


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(__name__, isinstance(3, int), type(3).__name__)", "__main__ True int\n"),
        ("import numpy as np\nx = np.arange(6.).reshape(2, 3)\nprint(x.dtype, (x @ x.T).sum())", "float64 83.0\n"),
        ("from sympy import *\nx = symbols('x')\nprint(integrate(x**2, (x, 0, 3)))", "9\n"),
        ("from scipy.optimize import brentq\nprint(round(brentq(lambda x: x**2 - 2, 0, 2), 6))", "1.414214\n"),
        ("import sys\nprint(input() + sys.stdin.read(), end='')", "one\ntwo\n".replace("\n", "", 1)),
        ("from multiprocessing import Pool\nwith Pool(2) as p: print(p.map(abs, [-1, -2]))", "[1, 2]\n"),
        ("open('note', 'w').write('kept')\nprint(open('/tmp/note').read())", "kept\n"),
        ("print('\\u00e4\\u03c0')", "\u00e4\u03c0\n"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "\ufffd"),
        ("exit()", ""),
    ],
)
def test_ordinary_programs(url: str, code: str, printed: str) -> None:
    result = run(url, code, stdin="one\ntwo\n")
    assert (result.stdout, result.stderr, result.return_code) == (printed, "", 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_ordinary_programs_need_is_there(url: str, name: str) -> None:
    """The programs that the allow-list of system calls was recorded from."""
    result = run(url, PROGRAMS[name])
    assert result.return_code == 0, result.stderr
    assert result.stdout.endswith("done\n") or len(result.stdout) == 16 << 10


def test_every_allowed_call_has_a_number() -> None:
    for name in seccomp.ALLOWED:
        pyseccomp.resolve_syscall(pyseccomp.Arch.X86_64, name)


def test_programs_that_fail(url: str) -> None:
    result = run(url, "print('before')\n1 / 0")
    assert (result.status, result.return_code, result.stdout) == ("Finished", 1, "before\n")
    assert "line 2" in result.stderr and result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert run(url, "import sys; sys.exit(7)").return_code == 7
    assert run(url, "import os; os.abort()").return_code == 128 + 6
    assert "MemoryError" in run(url, "x = bytearray(600 << 20)").stderr
    assert "SyntaxError" in run(url, "print('\0')").stderr


def test_a_program_ends_as_it_would_elsewhere(url: str) -> None:
    code = """
import atexit, os, sys, threading, time
atexit.register(print, "at exit")
threading.Timer(0.2, print, ["a thread"]).start()
unwritten = os.fdopen(os.dup(1), "w"); unwritten.write("a file\\n")
class Thing:
    def __del__(self): os.write(1, b"a thing\\n")
thing = Thing()
print("the program"); sys.exit("because")
"""
    result = run(url, code)
    assert (result.return_code, result.stderr) == (1, "because\n")
    assert sorted(result.stdout.splitlines()) == ["a file", "a thing", "a thread", "at exit", "the program"]
    for end, exit_code in (("None", 0), ("7", 7), ("-1", 255), ("True", 1), ("[]", 1)):
        assert run(url, f"import sys; sys.exit({end})").return_code == exit_code
    assert run(url, "import sys; sys.stdout.close()").return_code == 0


def test_time_limit(url: str) -> None:
    start = time.perf_counter()
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)\\nwhile True: pass'])"
    result = run(url, f"print('before', end=' ')\n{child}", run_timeout=SHORT_S)
    assert (result.status, result.return_code, result.stdout) == ("TimeLimitExceeded", None, "before 1\n"), "unflushed"
    assert SHORT_S <= result.execution_time <= time.perf_counter() - start < LIMIT_S


def test_short_limits_and_clients_that_leave_during_a_start_cost_no_slot() -> None:
    """Killing bubblewrap alone would leave a child that it has only just started."""
    with served("--concurrency", "4", "--warm", "0") as (url, pid):

        async def many() -> list[CommandResult]:
            client = SandboxClient(url)
            code = "import time\nwhile True: time.sleep(1)"
            left = [asyncio.wait_for(client.run(code, 5.0), 0.02 + 0.002 * i) for i in range(50)]
            assert set(map(type, await asyncio.gather(*left, return_exceptions=True))) == {TimeoutError}
            return await asyncio.gather(*[client.run(code, 0.1 + 0.004 * i) for i in range(50)])

        assert {result.status for result in asyncio.run(many())} == {"TimeLimitExceeded"}
        settled(url)
        assert stats(url)["over_limit"] == 0
        assert run(url, "print(1)").stdout == "1\n"
        assert not psutil.wait_procs(psutil.Process(pid).children(recursive=True), timeout=30)[1]


def test_a_client_that_hangs_up_ends_its_program() -> None:
    mark = f"vcpo-test-{time.time_ns()}"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}])"
    with served("--time-s", "60", "--warm", "0") as (url, _):

        async def ask_and_leave() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5):
                    await SandboxClient(url).run(code, 60.0)

        asyncio.run(ask_and_leave())
        settled(url)
        assert not any(mark in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


def test_warm_interpreters_are_for_programs_that_name_a_package() -> None:
    code = "import sys; known = 'sympy' in sys.modules\nopen('left', 'x').close()\nprint(known, sys.argv, __name__)"
    with served("--warm", "2") as (url, _):
        for _ in range(3):  # each is used once, and another one takes its place
            deadline = time.monotonic() + 4 * LIMIT_S
            while stats(url)["warm"] < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert stats(url)["warm"] == 2
            assert run(url, code + " # sympy").stdout == "True ['/tmp/main.py'] __main__\n"
        assert run(url, code.replace("'sympy'", "'sym' + 'py'")).stdout == "False ['/tmp/main.py'] __main__\n"


def test_output_limit(url: str) -> None:
    result = run(url, "while True: print('x' * 1000)")
    assert result.return_code != 0 and len(result.stdout) == 16 << 10
    assert "16 KiB of output" in result.stderr


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"\xff\xfe{", b'{"code": "\xff"}', b'{"code": "\\ud800"}', b'["code"]', b"\x00"),
        *(b"[" * 100_000, b'{"code": ' + b'{"a":' * 100_000, b'{"code": "", "run_timeout": %s}' % (b"9" * 5000)),
        *(b'{"code": "", "run_timeout": NaN}', b'{"code": "", "memory_limit_MB": 1e999}', b'{"code": 1}'),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_wrong_request_is_told_so_in_one_line(url: str, body: bytes) -> None:
    import requests

    answer = requests.post(f"{url}/run_code", data=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert answer.status_code == 422
    assert answer.json().keys() == {"detail"} and "\n" not in answer.json()["detail"]


def test_clients_do_not_fill_the_log(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        options = ("--port", "0", "--warm", "0", "--allow-unbounded-memory")
        server = psutil.Popen([sys.executable, "-m", "code_sandbox", *options], stderr=log)
        deadline = time.monotonic() + LIMIT_S
        while not (listening := server.net_connections("tcp")) and time.monotonic() < deadline:
            time.sleep(0.1)
        for _ in range(200):
            with socket.create_connection(listening[0].laddr) as client:
                client.sendall(b"no HTTP\r\n\r\n")
                while client.recv(1 << 10):
                    continue
        server.terminate()
        server.wait(LIMIT_S)
    lines = (tmp_path / "log").read_text().splitlines()
    assert 2 < len(lines) <= 2 + LINES_A_MINUTE, lines[:3]
    assert "stopped: " in lines[-1]


def test_sandbox_fusion_clients_work(url: str) -> None:
    answer, error = call_sandbox_api(f"{url}/run_code", "print(input())", "hello", 60, 60, 256)
    assert error is None and answer is not None
    assert answer["status"] == "Success" and answer["run_result"]["status"] == "Finished"
    assert answer["run_result"]["stdout"] == "hello\n"
    answer, _ = call_sandbox_api(f"{url}/run_code", "int main() {}", "", 5, 5, 256, language="cpp")
    assert answer is not None and answer["status"] == "SandboxError" and "runs python" in answer["message"]


def test_a_failed_program_is_not_run_again(url: str) -> None:
    before = stats(url)
    run(url, "raise SystemExit(1)")
    run(url, "while True: pass", run_timeout=0.5)
    after = stats(url)
    assert (after["Failed"] - before["Failed"], after["Success"] - before["Success"]) == (2, 0)


class FailingService:
    """Answers `failures` times with HTTP status 502, then with a program's result."""

    def __init__(self, failures: int) -> None:
        self.failures, self.requests = failures, 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.requests <= self.failures:
            return web.Response(status=502, text="bad gateway")
        result = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "ok", "stderr": ""}
        return web.json_response({"status": "Success", "message": "", "run_result": result})

    async def ask(self, patience_s: float) -> CommandResult:
        app = web.Application()
        app.router.add_post("/run_code", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            await web.SockSite(runner, s).start()
            try:
                return await SandboxClient(f"http://127.0.0.1:{s.getsockname()[1]}", patience_s).run("", 1.0)
            finally:
                await runner.cleanup()


def test_a_failed_service_is_asked_again() -> None:
    service = FailingService(failures=2)
    assert asyncio.run(service.ask(patience_s=10.0)).stdout == "ok"
    assert service.requests == 3
    with pytest.raises(SandboxUnavailable, match=r"sandbox_url.*502"):
        asyncio.run(FailingService(failures=99).ask(patience_s=0.5))


def test_a_service_that_starts_late_is_waited_for() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with pytest.raises(SandboxUnavailable, match="refused|Connect"):
        run(f"http://127.0.0.1:{port}", "", 1.0)


def test_a_full_queue_is_waited_for() -> None:
    with served("--concurrency", "1", "--queue", "1") as (url, _):

        async def six() -> list[CommandResult]:
            client = SandboxClient(url)
            return await asyncio.gather(*[client.run(f"print({i})", LIMIT_S) for i in range(6)])

        assert [result.stdout for result in asyncio.run(six())] == [f"{i}\n" for i in range(6)]


def test_it_does_not_start_without_isolation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolation, "_TOOLS", str(tmp_path))
    assert main([]) == 3
    assert "apt-get install bubblewrap" in capsys.readouterr().err


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Unlike `tmp_path` one that the sandbox's user can enter."""
    with tempfile.TemporaryDirectory(prefix="vcpo-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_it_does_not_start_without_namespaces(open_folder: Path) -> None:
    bwrap = open_folder / "bwrap"
    bwrap.write_text(
        '#!/bin/sh\n[ "$1" = --help ] && echo "--disable-userns" && exit 0\n'
        'echo "bwrap: No permissions to create new namespace" >&2; exit 1\n'
    )
    bwrap.chmod(0o755)
    code = (
        "import sys; from code_sandbox import isolation, __main__\n"
        f"isolation._TOOLS = {str(open_folder)!r} + ':' + isolation._TOOLS; sys.exit(__main__.main([]))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3
    assert "No permissions" in ended.stderr and "user.max_user_namespaces" in ended.stderr


def test_it_does_not_start_where_memory_has_no_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class SandboxWithoutGroups:
        limits_whole_programs, no_groups, users = False, "no such file", 100

        def __init__(self, packages: tuple[str, ...]) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(sandbox_server, "Sandbox", SandboxWithoutGroups)
    assert main([]) == 3
    assert "--allow-unbounded-memory" in capsys.readouterr().err


def test_other_machines_need_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short").write_text("secret\n")
    for options in ([], [f"--token-file={tmp_path}/none"], [f"--token-file={tmp_path}/short"]):
        with pytest.raises(SystemExit, match="2"):
            main(["--host", "0.0.0.0", *options])
        assert "--token-file" in capsys.readouterr().err


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    token = "a-token-of-many-characters"
    (tmp_path / "token").write_text(f"{token}\n")
    with served("--warm", "0", "--token-file", str(tmp_path / "token")) as (url, _):
        for wrong in (None, token + "x", "\u00e4"):
            with pytest.raises(SandboxUnavailable, match=r"401.*--token-file"):
                asyncio.run(SandboxClient(url, token=wrong).run("print(1)", 5.0))
        assert asyncio.run(SandboxClient(url, token=token).run("print(1)", LIMIT_S)).stdout == "1\n"


def test_packages_may_not_bring_the_root_folder_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "odd-1.0.dist-info"
    for file in (package / "METADATA", tmp_path / "bin" / "odd", tmp_path / "site" / "odd" / "__init__.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()  # Python 3.12 leaves out files that are not there
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (package / "RECORD").write_text("/etc/passwd,,\n../bin/odd,,\nodd/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert package_paths(["odd"]) == [tmp_path / "site" / "odd"]


@pytest.mark.parametrize("option", ["--memory-mb=1", "--concurrency=0", "--packages=no-such-package", "--warm=-1"])
def test_wrong_settings(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option])
    assert option.split("=")[0].strip("-").split("-")[0] in capsys.readouterr().err


def test_a_process_that_has_left_a_group_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id is another process's by then, as far as one can know."""
    bystander = psutil.Popen(["sleep", "60"])
    procs, opened = tmp_path / "cgroup.procs", os.pidfd_open
    procs.write_text(f"{bystander.pid}\n")

    def left(pid: int) -> int:
        procs.write_text("")
        return opened(pid)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", left)
        cgroups._kill(tmp_path)
    assert bystander.poll() is None
    procs.write_text(f"{bystander.pid}\n")
    cgroups._kill(tmp_path)
    assert bystander.wait(timeout=10) == -signal.SIGKILL
