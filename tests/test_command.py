"""The command `vcpo`, which verl/pyproject.toml installs."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe import vllm
from verl_vcpo import command

ROOT = Path(__file__).resolve().parent.parent
VCPO = Path(sys.executable).with_name("vcpo")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([VCPO, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def test_help_has_a_line_for_each_command_and_the_page_has_them_all(tmp_path: Path) -> None:
    said = run(tmp_path, "--help").stdout
    words = re.findall(r"^  (\w+) {2,}\w", said, re.MULTILINE)
    page = (ROOT / "docs/reference/commands.md").read_text()
    named = dict(re.findall(r"^\| `vcpo (\w+)` \| `python -m ([\w.]+)", page, re.MULTILINE))
    assert named == {word: command.COMMANDS[word][0] for word in words} and len(words) == len(command.COMMANDS)
    assert all(importlib.util.find_spec(module) for module in named.values())


@pytest.mark.slow
@pytest.mark.parametrize("word", ["report", "train", "serve"])
def test_a_command_runs_from_any_folder(tmp_path: Path, word: str) -> None:
    """Where the environment's own packages `scripts` and `recipe` would be found first."""
    done = run(tmp_path, word, "--help")
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert "method=" in done.stdout or "--" in done.stdout


@pytest.mark.parametrize(
    ("options", "file", "closed", "one_node"),
    [
        ("-dp 2 --n 4 -n1", "", True, True),
        ("--distributed_executor_backend mp --master-addr=localhost", "", True, True),
        ("--host=::", "", False, True),
        ("--hos ::", "", False, True),
        ("--uds /s --api-key=a_b", "", False, True),
        ("--config FILE", "max_model_len: 9\nheadless: false", True, True),
        ("--config FILE", "host: '::'\nheadless: true", False, False),
        ("--config FILE -n 1", "nnodes: 2", True, True),
        ("--config FILE", "nnodes: 2", True, False),
        *((spelling, "", True, False) for spelling in ("--nnodes=2", "-n 2", "-n2", "--nn 2", "-r 1", "--node_rank=1")),
        *((spelling, "", True, False) for spelling in ("--data_parallel_address a", "-dpa=a", "-dpb ray", "--hea")),
        *((f"--distributed-executor-backend={name}", "", True, False) for name in ("ray", "external_launcher")),
    ],
)
def test_a_server_of_one_node_is_closed(options: str, file: str, closed: bool, one_node: bool, tmp_path: Path) -> None:
    (path := tmp_path / "vllm.yaml").write_text(file)
    given = vllm.places(["serve", "m", *options.replace("FILE", str(path)).split()])
    assert vllm.on_loopback(given) == (["--host", "127.0.0.1"] if closed else [])
    assert vllm.meeting_place(given).get("GLOO_SOCKET_IFNAME") == ("lo" if one_node else None)


@pytest.mark.parametrize(("file", "says"), [("a: b: c", "mapping values"), ("", "no line"), (None, "No such file")])
def test_a_file_of_options_that_cannot_be_read(
    file: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if file is not None:
        Path("vllm.yaml").write_text(file)
    with pytest.raises(SystemExit, match="2"):
        vllm.main(["serve", "m", "--config", "vllm.yaml"])
    said = capsys.readouterr().err
    assert said.startswith("error: --config vllm.yaml: ") and says in said and said.count("\n") == 1


def test_a_plan_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["vcpo", "plan", "+task=math"])
    monkeypatch.setattr("runpy.run_module", lambda module, **_: ran.append([module, *sys.argv]))
    command.main()
    assert ran == [["recipe.fully_async_policy.main", "plan", "--dry-run", "+task=math"]]


def test_what_is_no_command_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "trian")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "no command trian" in done.stderr


def test_a_wheel_says_where_the_commands_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["vcpo", "train"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2 and "from a checkout" in capsys.readouterr().err
