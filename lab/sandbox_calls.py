"""Which system calls do ordinary programs make? `python -m lab.sandbox_calls`; needs strace.

Runs tests/kit/ordinary_programs.py without a sandbox, and compares with the allow-list of code_sandbox/seccomp.py.
Calls that are not allowed are no error: in the sandbox, where those calls fail, the programs end well too. About a
minute.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from code_sandbox.seccomp import ALLOWED
from recipe.command_line import OneLineParser, run_command
from tests.kit.ordinary_programs import PROGRAMS

_BY_ARGUMENT = {"clone", "fcntl", "ioctl", "prctl", "socket", "socketpair"}
_CALL = re.compile(r"^\d+ +(\w+)\(", re.MULTILINE)


def calls_of(code: str) -> set[str]:
    """The names of the calls that a program makes, the interpreter's own among them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "main.py").write_text(code)
        trace = Path(folder) / "trace"
        command = ["strace", "-f", "-qq", "-o", str(trace), sys.executable, "-B", "main.py"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)
        return set(_CALL.findall(trace.read_text(errors="replace")))


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.parse_args()
    if shutil.which("strace") is None:
        parser.error("strace is not on this machine: apt-get install strace")
    made: dict[str, list[str]] = {}
    for name, code in tqdm(PROGRAMS.items(), desc="programs", disable=None):
        for call in calls_of(code):
            made.setdefault(call, []).append(name)
    refused = sorted(set(made) - ALLOWED - _BY_ARGUMENT)
    for call in refused:
        print(f"not allowed: {call:<16} made by {', '.join(made[call])}")
    print(f"{len(made)} calls made, {len(refused)} of them not allowed")
    print(f"allowed and not made: {', '.join(sorted(ALLOWED - set(made)))}")
    return 0


if __name__ == "__main__":
    run_command(main)
