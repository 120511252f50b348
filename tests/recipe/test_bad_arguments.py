"""Wrong arguments of every command: exit code 2, and one line that names the argument and what to give."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.kit import ROOT
from tests.kit.wrong_argument import check_refused
from tests.recipe.conftest import GOOD_ROW

ROWS = ["--data", "{rows}", "--answers", "data_source"]

WRONG = [
    # an argument that is none, in every family of commands
    ("recipe.fully_async_policy.main", ["--dryrun"], "unrecognized arguments: --dryrun (see --help)"),
    ("recipe.fully_async_policy.main", ["--async.lag=8"], "a setting has no dashes: async.lag=8"),
    ("recipe.evaluate.__main__", ["MODEL"], "give MODEL and --task NAME, or --follow RUN"),
    ("recipe.export", ["global_step_1"], "the following arguments are required: OUT"),
    ("recipe.warm_start.train", ["steps=9"], "unrecognized arguments: steps=9"),
    ("scripts.report.__main__", [], "the following arguments are required: RUN"),
    ("scripts.check_data", ["rows.parquet"], "the following arguments are required: --task"),
    ("tests.reliability.schedules", ["--frist", "1"], "unrecognized arguments: --frist 1"),
    # arguments without effect
    ("recipe.fully_async_policy.main", ["--forecast", "RUN"], "of the plan that --dry-run prints: add --dry-run"),
    ("scripts.report.__main__", ["{tmp}", "--port", "80"], "--port: is for --live"),
    # values
    ("scripts.report.__main__", ["--live", "{tmp}", "--port", "-1"], "--port: -1: give a whole number, 0 or more"),
    ("scripts.report.__main__", ["--live", "{tmp}", "--port", "99999"], "--port 99999: give 65535 or less"),
    ("tests.reliability.schedules", ["--n", "0"], "argument --n: 0: give a whole number, 1 or more"),
    ("tests.reliability.soak", ["--steps", "199"], "argument --steps: 199: give a whole number, 200 or more"),
    # files and folders
    ("recipe.warm_start.train", [*ROWS, "--out", "{rows}/model"], "/model cannot be written (Not a directory)"),
    ("recipe.warm_start.train", ["--learning-rate", "inf", *ROWS], "learning_rate=inf: Input should be less"),
]


@pytest.mark.parametrize(("module", "arguments", "expected"), WRONG, ids=[f"{m} {' '.join(a)}" for m, a, _ in WRONG])
def test_a_wrong_argument(
    module: str,
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "rows.parquet"
    pd.DataFrame(
        [{**GOOD_ROW, "data_source": str(i), "prompt": [{"role": "user", "content": str(i)}]} for i in range(9)]
    ).to_parquet(rows)
    filled = [argument.format(tmp=tmp_path, rows=rows) for argument in arguments]
    check_refused(module, filled, expected, monkeypatch, capsys)


CTRL_C_TWICE = """
import atexit, time
from recipe.command_line import run_command

def say(what):
    print(what, flush=True)
    time.sleep(60)

atexit.register(say, "exits")
run_command(lambda: say("works"))
"""


def test_ctrl_c_is_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CTRL_C_TWICE],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
    ) as command:
        assert command.stdout and command.stderr
        for expected in ("works", "exits"):
            assert command.stdout.readline() == f"{expected}\n"
            command.send_signal(signal.SIGINT)
        assert command.stderr.read() == "interrupted\n"
    assert command.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, "1 \\xe9 \\u2192"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}, "1 \xe9 \\u2192"),
        ({"LC_ALL": "C.UTF-8"}, "0 \xe9 \u2192"),
    ],
)
def test_files_are_utf8_in_any_locale(environment: dict[str, str], shown: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("\xe9 \u2192", encoding="utf-8")
    (tmp_path / "command.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom recipe.command_line import run_command\n"
        "run_command(lambda: print(sys.flags.utf8_mode, Path(sys.argv[1]).read_text()) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, f"{tmp_path}/command.py", f"{tmp_path}/file"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
    )
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    assert done.stdout.decode(encoding) == f"{shown}\n", done.stderr
