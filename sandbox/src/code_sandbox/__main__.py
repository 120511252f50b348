"""Serve the code sandbox: `python -m code_sandbox --port 8080`.

Untrusted Python programs, isolated by the kernel, over HTTP as SandboxFusion's /run_code.
docs/explanation/security.md and README.md say what is isolated. Without isolation the sandbox does not start.
"""

import argparse
import asyncio
import functools
import ipaddress
import logging
import os
import resource
import sys
from pathlib import Path
from typing import NoReturn

import uvicorn

from code_sandbox.connections import TRANSFER_S, TimedConnection
from code_sandbox.environment import modules_of
from code_sandbox.few_lines import FewLines
from code_sandbox.isolation import Sandbox
from code_sandbox.limits import IsolationError, Limits
from code_sandbox.server import Service, build_app

_DEFAULTS = Limits()
_LIMITS = {
    "time_s": "seconds a program may take, at most; a request can ask for less",
    "memory_mb": "MiB of memory a program may have, at most; a request can ask for less",
    "processes": "processes and threads of a program",
    "files_mb": "MiB of files in a program's own /tmp",
    "output_kb": "KiB of output, on stdout and on stderr; a program that writes more is ended",
}
_MIN_TOKEN_CHARS = 16
# Descriptors: for each program its pipes, processes and starter; some more for the server itself.
_PER_PROGRAM, _SPARE = 10, 64
_SPARE_CONNECTIONS = 64


class _Parser(argparse.ArgumentParser):
    """argparse, with the error alone on stderr instead of after the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Serve until the end. Return the exit code: 2 for a wrong setting, 3 where programs cannot be isolated."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    log = logging.StreamHandler()
    log.addFilter(FewLines())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s sandbox %(levelname)s %(message)s", handlers=[log])
    packages = arguments.packages.split(",")
    try:
        limits = Limits(**{name: getattr(arguments, name) for name in _LIMITS})
        token = _token(arguments.token_file, arguments.host)
        connections = _connections(arguments)
        sandbox = Sandbox(tuple(packages))
        try:
            _check(sandbox, arguments.allow_unbounded_memory)
        except IsolationError:
            sandbox.close()
            raise
    except ValueError as error:
        parser.error(str(error))
    except IsolationError as error:
        print(f"sandbox: programs cannot be isolated here, so it does not start: {error}", file=sys.stderr)
        return 3
    service = Service(sandbox, limits, arguments.concurrency, arguments.queue, modules_of(packages), arguments.warm)
    logging.info("%d programs at a time, each with %s; %s", arguments.concurrency, limits, sandbox.isolation)
    uvicorn.run(
        build_app(service, sandbox, token),
        host=arguments.host,
        port=arguments.port,
        loop="asyncio",  # uvloop's cannot be relied on to wait for a process's pipes
        http=TimedConnection,
        ws="none",
        limit_concurrency=connections,
        headers=TimedConnection.CLOSE,
        timeout_graceful_shutdown=int(TRANSFER_S),
        log_config=None,  # into the handler above
        log_level="warning",
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m code_sandbox",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = functools.partial(parser.add_argument, type=int)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    number("--port", default=8080, help="port to listen on (default %(default)s); 0: a free one")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"holds what clients send as `Authorization: Bearer TOKEN`, {_MIN_TOKEN_CHARS} characters or more; needed "
        "where --host is another machine's to reach",
    )
    number("--concurrency", default=2 * cores, help="programs at a time (default 2 per core: %(default)s)")
    number("--queue", default=4096, help="programs that may wait (default %(default)s)")
    number(
        "--warm",
        default=2 * cores,
        help="interpreters with the packages imported, for programs that name one (default 2 per core: %(default)s)",
    )
    parser.add_argument(
        "--packages", default="numpy,scipy,sympy", help="what programs may import (default %(default)s)"
    )
    parser.add_argument(
        "--allow-unbounded-memory",
        action="store_true",
        help="start also where there are no control groups: a program can then take all of the machine's memory",
    )
    for name, text in _LIMITS.items():
        default = getattr(_DEFAULTS, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"{text} (default %(default)s)")
    return parser


def _token(file: Path | None, host: str) -> str | None:
    """Read the token. Raise ValueError if it is too short, or missing while other machines reach the server."""
    if file is None:
        if host != "localhost" and not (_is_address(host) and ipaddress.ip_address(host).is_loopback):
            raise ValueError(f"--host {host}: other machines reach it, so it needs --token-file FILE")
        return None
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {file}: it cannot be read ({error})") from None
    if len(token) < _MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise ValueError(f"--token-file {file}: give {_MIN_TOKEN_CHARS} characters or more: openssl rand -hex 32")
    return token


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _connections(arguments: argparse.Namespace) -> int:
    """Return the most connections that leave descriptors for programs. Raises ValueError naming a wrong setting."""
    for name, least in (("concurrency", 1), ("queue", 0), ("warm", 0)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name} {getattr(arguments, name)}: give {least} or more")
    programs = arguments.concurrency + arguments.warm
    if programs > Sandbox.users // 2:
        raise ValueError(f"--concurrency and --warm: give {Sandbox.users // 2} together or less")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    left = most - _PER_PROGRAM * programs - _SPARE
    if left < _SPARE_CONNECTIONS:
        raise ValueError(f"--concurrency {arguments.concurrency}: too many for {most} descriptors (ulimit -n)")
    return min(arguments.concurrency + arguments.queue + _SPARE_CONNECTIONS, left)


def _check(sandbox: Sandbox, unbounded: bool) -> None:
    """Raise IsolationError if a program does not run, or if its memory has no limit and that was not allowed."""
    if not sandbox.limits_whole_programs:
        if not unbounded:
            raise IsolationError(
                f"no control groups ({sandbox.no_groups}), so a program could take all of the machine's memory: "
                "run it as root or in a control group of your own (docs/explanation/security.md), or add "
                "--allow-unbounded-memory"
            )
        logging.warning(
            "no control groups here: memory is limited per process, not per program (docs/explanation/security.md)"
        )
    asyncio.run(sandbox.check())


if __name__ == "__main__":
    sys.exit(main())
