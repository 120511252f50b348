"""The console on a pseudo-terminal, as a terminal shows it; and in a pipe."""

import fcntl
import io
import os
import pty
import re
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from verl_vcpo.common.console import Screen

_ROOT = Path(__file__).resolve().parents[1]

_RUN = """
import logging, os, sys, time
from verl_vcpo.common import console
from verl_vcpo.report.run_log import RunLog
from tests.loop.test_run_log import step_metrics

folder = sys.argv[1]
logging.basicConfig()  # a logger with the terminal
with open(folder + "/others.log", "w") as others, console.owned(others):
    console.screen().stage("Starting the trainer")
    os.system("echo a child process"); logging.warning("a logger"); print("a library")
    time.sleep(0.6)  # the moving line is drawn
    console.screen().stage("Starting the samplers")
    log = RunLog(folder)
    with console.screen().busy("Measuring"):
        log.write(0, {"val-core/countdown/acc/mean@1": 0.25})
    console.screen().training(3, 0)
    for step in (1, 2, 3):
        time.sleep(0.6)
        print("verl's own bar", file=sys.stderr)
        log.write(step, step_metrics(step, 0.5))
print("the end")
"""
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


def shown(output: str) -> list[str]:
    """The lines that a terminal shows after `output`; it is as wide as the lines, and as high."""
    lines, row, column = [""], 0, 0
    at = 0
    while at < len(output):
        if control := _CONTROL.match(output, at):
            count, name = int(control[1] or 1) if control[1].isdigit() or not control[1] else 0, control[2]
            if name == "A":
                row -= count
            elif name == "K":
                lines[row] = "" if control[1] == "2" else lines[row][:column]
            else:
                assert name in "mlh", f"unknown control {control[0]!r}"
            at = control.end()
            continue
        character, at = output[at], at + 1
        if character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif character == "\r":
            column = 0
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def seen(folder: Path, columns: int) -> tuple[str, str]:
    """(what the run writes to a terminal of `columns` columns, what was kept from the terminal)."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-c", _RUN, str(folder)]
    process = subprocess.Popen(command, cwd=_ROOT, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    while True:
        try:
            output += os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            break
    os.close(ours)
    assert process.wait(60) == 0, output.decode()
    return output.decode(), (folder / "others.log").read_text()


@pytest.fixture(scope="module")
def on_terminal(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """`seen` on 80 columns."""
    return seen(tmp_path_factory.mktemp("terminal"), 80)


def test_on_a_terminal_the_lines_stay_whole(on_terminal: tuple[str, str]) -> None:
    *above, end = [line for line in shown(on_terminal[0]) if line]
    assert end == "the end"
    assert [line.split(":")[0] for line in above[:2]] == ["Starting the trainer", "Starting the samplers"]
    assert [line.split()[0] for line in above[-3:]] == ["1", "2", "3"], "a row for each step"
    assert all("━" not in line for line in above), "nothing is left of the bar"
    rows = above[[line.split()[:2] for line in above].index(["step", "reward"]) :]
    assert max(map(len, rows)) < 80, "no row is wrapped"
    for text in ("a child process", "a logger", "a library", "verl's own bar"):
        assert text in on_terminal[1] and text not in on_terminal[0]


def test_whenever_the_bar_is_drawn_it_is_one_and_below_the_lines(on_terminal: tuple[str, str]) -> None:
    output, bars = on_terminal[0], []
    for draw in re.finditer(r"━[^\r\n]*", output):
        lines = [line for line in shown(output[: draw.end()]) if line]
        assert "━" in lines[-1] and not any("━" in line for line in lines[:-1])
        bars.append(lines[-1])
    assert len(bars) > 3 and {bar[:4] for bar in bars} >= {"0/3 ", "1/3 ", "2/3 "}
    assert any(re.search(r"0:00:\d\d left: 0:00:\d\d$", bar) for bar in bars)


def test_the_columns_are_explained(on_terminal: tuple[str, str]) -> None:
    lines = shown(on_terminal[0])
    (heading,) = [i for i, line in enumerate(lines) if line.split()[:3] == ["step", "reward", "ess"]]
    explained = {line[:8].strip() for line in lines[:heading]}
    assert {"step", "reward", "ess", "lr x", "grad", "kl", "lag", "tok/s", "idle %", "held out"} <= explained
    assert any("steps below 0.3: a warning" in line for line in lines[:heading]), "the alarm's level"
    assert lines[heading + 1].split() == ["0", "25.0%"]


def test_in_a_pipe_there_are_only_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RUN, str(tmp_path)]
    environment = {**os.environ, "FORCE_COLOR": "1"}  # for a pipe that shows colours; still no terminal
    run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, env=environment, check=True)
    assert run.stderr == "" and "\x1b" not in run.stdout and "\r" not in run.stdout and "━" not in run.stdout
    lines = run.stdout.splitlines()
    assert lines[0] == "Starting the trainer ..." and re.fullmatch(r"Starting the trainer: \d+ s", lines[1])
    assert lines[-1] == "the end" and len([line for line in lines if re.match(r" +[123] ", line)]) == 3


_LASTS = """
import sys
from pathlib import Path
from verl_vcpo.common import console

log = Path(sys.argv[1])
log.touch()
with console.outlived(log):
    sys.stdin.read()  # until the console is gone
    with open(log, "a") as others, console.owned(others):
        console.screen().stage("Starting")
        console.print_line("a step")
    print("to see it")
    print("to go on", file=sys.stderr)
"""


@pytest.mark.parametrize("left", ["stderr", "the log"])
@pytest.mark.parametrize("console", ["closed pipe", "full disk", "hung up"])
def test_a_console_that_goes_away_ends_nothing(console: str, left: str, tmp_path: Path) -> None:
    if console == "full disk":
        ours, theirs = None, os.open("/dev/full", os.O_WRONLY)
    else:
        ours, theirs = pty.openpty() if console == "hung up" else os.pipe()
    command, log = [sys.executable, "-c", _LASTS, str(tmp_path / "log")], tmp_path / "log"
    run = subprocess.Popen(
        command,
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=subprocess.PIPE if left == "stderr" else theirs,
        start_new_session=True,
        preexec_fn=(lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0)) if console == "hung up" else None,
    )
    os.close(theirs)
    while not log.exists():
        time.sleep(0.05)
    if ours is not None:
        os.close(ours)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 0
    assert {"Starting ...", "a step"} <= set(log.read_text().splitlines())
    assert (said.decode() if said is not None else log.read_text()).endswith("to see it\nto go on\n")


def test_what_is_not_finished_is_said() -> None:
    now, stream = 0.0, io.StringIO()
    screen = Screen(stream, lambda: now)
    screen.stage("Starting the samplers")
    now = 45.0
    screen.ending()
    now = 47.0
    screen.ending()  # said where Ray ends, and where the run ends
    now = 48.0
    screen.close()
    assert stream.getvalue().splitlines() == [
        "Starting the samplers ...",
        "Starting the samplers: not finished after 45 s",
        "Ending the run's processes ...",
        "Ending the run's processes: 3 s",
    ]
