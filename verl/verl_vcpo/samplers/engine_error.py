"""Why an engine did not start, in one line.

vLLM's engine and its workers are processes of their own, and write their errors to the log of the server that started
them. The server's own error says "See root cause above".
"""

import os
import re
import signal
from pathlib import Path

_ELSEWHERE = re.compile(r"root cause|initialization failed", re.IGNORECASE)
_LOGGED = re.compile(r"^(?:\((?P<process>[^)]*pid=\d+)\) )?(?:ERROR [^\[]*\[[^\]]*\] )?(?P<said>\S.*)$")
_ERROR = re.compile(
    r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?:: .*)?|Fatal Python error: .*|terminate called .*"
)
_KILLED = re.compile(r"Failed core proc\(s\): .*?: -(\d+)")
_MOST_BYTES = 1 << 20


def cause(error: Exception, logs: str) -> str:
    """Return the error that began the failure, as the server's logs have it; the error's own words where it is there.

    An engine's workers fail first and the engine after them: of the processes that say more than where to look, the
    first one's last error.
    """
    if not _ELSEWHERE.search(str(error)):
        return str(error)
    last: dict[str, str] = {}  # of every process, in the order of their first errors
    for line in logs.splitlines():
        found = _LOGGED.match(line)
        if found and _ERROR.fullmatch(found["said"]) and not _ELSEWHERE.search(found["said"]):
            last[found["process"] or ""] = found["said"]
    killed = _KILLED.search(str(error))
    ended = [f"its process was ended by {signal.Signals(int(killed[1])).name}"] if killed else []
    return "; ".join([*ended, *list(last.values())[:1]]) or str(error)


def own_logs() -> str:
    """Return what this process and its children have written to standard output and error, where these are files."""
    logs = []
    for descriptor in (1, 2):
        file = Path(f"/proc/self/fd/{descriptor}").resolve()
        if file.is_file():
            with file.open("rb") as content:
                content.seek(max(0, os.fstat(content.fileno()).st_size - _MOST_BYTES))
                logs.append(content.read().decode(errors="replace"))
    return "\n".join(logs)
