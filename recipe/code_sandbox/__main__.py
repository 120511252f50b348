"""Serve the code sandbox: `python -m recipe.code_sandbox --port 8080`.

Untrusted Python programs, isolated by the kernel, over HTTP as SandboxFusion's /run_code. docs/sandbox.md says what is
isolated how. Without isolation it does not start.
"""

import argparse
import asyncio
import logging
import os
import sys

import uvicorn

from recipe.code_sandbox.isolation import IsolationError, Limits, Sandbox
from recipe.code_sandbox.server import build_app

_DEFAULTS = Limits()
_OPTIONS = {
    "time_s": "seconds a program may take, at most; a request can ask for less",
    "memory_mb": "MiB of memory a program may have, at most; a request can ask for less",
    "processes": "processes and threads of a program",
    "files_mb": "MiB of files in a program's own /tmp",
    "output_kb": "KiB of output, on stdout and on stderr; a program that writes more is ended",
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 2 where a setting is wrong, 3 where programs cannot be isolated."""
    parser = argparse.ArgumentParser(prog="python -m recipe.code_sandbox", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default %(default)s); 0: a free one")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--concurrency", type=int, default=2 * cores, help="programs at a time (default 2 per core: %(default)s)"
    )
    parser.add_argument("--queue", type=int, default=4096, help="programs that may wait (default %(default)s)")
    parser.add_argument(
        "--packages", default="numpy,scipy,sympy", help="what programs may import (default %(default)s)"
    )
    for name, text in _OPTIONS.items():
        default = getattr(_DEFAULTS, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"{text} (default %(default)s)"
        )
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s sandbox %(levelname)s %(message)s")
    for name, least in (("concurrency", 1), ("queue", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: give {least} or more")
    try:
        limits = Limits(**{name: getattr(arguments, name) for name in _OPTIONS})
        sandbox = Sandbox(tuple(arguments.packages.split(",")))
        try:
            asyncio.run(sandbox.check())
        except IsolationError:
            sandbox.close()
            raise
    except ValueError as error:
        parser.error(str(error))
    except IsolationError as error:
        print(f"sandbox: programs cannot be isolated here, so it does not start: {error}", file=sys.stderr)
        return 3
    if not sandbox.limits_whole_programs:
        logging.warning("no control groups here: memory is limited per process, not per program (docs/sandbox.md)")
    app = build_app(sandbox, limits, arguments.concurrency, arguments.queue)
    logging.info("%d programs at a time, each with %s", arguments.concurrency, limits)
    # asyncio's own loop: uvloop's cannot be relied on to wait for a process's pipes.
    uvicorn.run(app, host=arguments.host, port=arguments.port, loop="asyncio", log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
