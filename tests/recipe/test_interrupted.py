"""What is said of a run that was interrupted, or that failed: above all the command with which it goes on."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TextIO

import pytest
from omegaconf import DictConfig, OmegaConf
from pydantic_core import SchemaValidator, core_schema

from recipe.command_line import INTERRUPTED, interruption_kept, run_command
from recipe.fully_async_policy import main
from recipe.fully_async_policy.launch import nodes, processes, ray_access, session
from recipe.fully_async_policy.launch.next_steps import after_death, after_error, after_interruption, to_go_on
from recipe.fully_async_policy.launch.processes import RunOnMachine, sigterm_is_ctrl_c
from tests.kit import ROOT
from tests.kit.checkpoints import write_checkpoint
from verl_vcpo.common import console, held_folders
from verl_vcpo.common.run_id import RUN_ID_VARIABLE
from verl_vcpo.loop.checkpoint import NoWholeCheckpoint
from verl_vcpo.report.run_log import SUMMARY_FILE


def config(run_dir: Path, **trainer: Any) -> DictConfig:
    settings = {"default_local_dir": str(run_dir / "checkpoints"), "val_only": False, "save_freq": 5, **trainer}
    of_run = {"run_dir": str(run_dir), "trainer": settings, "ray_kwargs": {"ray_init": {}}}
    return OmegaConf.create({**of_run, "method": "vcpo", "async": {"lag": 1}, "save_model": False})


def saved(run_dir: Path, step: int) -> Path:
    return write_checkpoint(run_dir / "checkpoints", step, **{"model.bin": "weights"})


def command_in(said: str) -> list[str]:
    (line,) = [line for line in said.splitlines() if line.startswith("  python")]
    return shlex.split(line)[3:]


@pytest.mark.parametrize("lines", [None, "", '{"step": 0, "reward": null}\n'], ids=["no file", "no line", "validated"])
def test_before_the_first_step_no_metrics_were_kept(tmp_path: Path, lines: str | None) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    said = after_interruption(config(tmp_path), [])
    assert said.startswith("interrupted before the first step: no step's metrics") and "keeps" not in said


def test_afterwards_the_steps_that_were_made(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert after_interruption(config(tmp_path), []).startswith("interrupted after step 2; ")


def test_the_command_that_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    whole, half = saved(run_dir, 5), saved(run_dir, 10)
    (half / "model.bin").unlink()
    task = ["--config-dir", "my presets", "+task=mine"]
    given = [*task, "trainer.resume_mode=resume_path", "trainer.resume_from_path=/else", f"run_dir={run_dir}"]
    said = after_interruption(config(run_dir), given)
    assert "To go on from global_step_5:" in said
    assert command_in(said) == [*task, f"run_dir={run_dir}", "trainer.resume_mode=auto"]
    assert said.endswith(f"\nA model of it: python -m recipe.export {shlex.quote(str(whole))} OUT")


def test_a_folder_with_the_time_of_the_start_in_its_name_is_in_the_command(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    assert command_in(to_go_on(config(tmp_path), ["+task=gsm8k"])) == [
        "+task=gsm8k",
        f"run_dir={tmp_path}",
        "trainer.resume_mode=auto",
    ]
    named = ["+task=gsm8k", "trainer.experiment_name=first"]
    assert command_in(to_go_on(config(tmp_path), named)) == [*named, "trainer.resume_mode=auto"]


def test_the_command_goes_to_the_cluster_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "\n  RAY_ADDRESS=10.0.0.1:6379 python -m " in to_go_on(config(tmp_path), ["+task=gsm8k"])


@pytest.mark.parametrize(
    ("trainer", "why"),
    [
        ({"save_freq": 5}, "It has no checkpoint yet (trainer.save_freq=5). To begin anew:"),
        ({"save_freq": -1}, "It has no checkpoint: trainer.save_freq=10 writes one every 10 steps. To begin anew:"),
        ({"val_only": True}, "To evaluate again:"),
    ],
    ids=str,
)
def test_without_a_checkpoint_it_begins_anew(tmp_path: Path, trainer: dict[str, Any], why: str) -> None:
    given = ["+task=gsm8k", f"run_dir={tmp_path}", "trainer.resume_mode=resume_path", "trainer.resume_from_path=/else"]
    said = to_go_on(config(tmp_path, **trainer), given)
    assert said.splitlines()[0] == why
    assert command_in(said) == given, "as it began"


def test_an_error_says_it_too(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    said = after_error(ValueError("first line\nthe reason."), config(tmp_path), ["+task=gsm8k", "run_dir=x"])
    assert said.startswith(f"error: ValueError: the reason. Details: {tmp_path}/verl.log\nTo go on from global_step_5:")
    assert command_in(said) == ["+task=gsm8k", "run_dir=x", "trainer.resume_mode=auto"]


def test_what_is_said_of_a_killed_launcher_names_the_run_and_its_newest_checkpoint(tmp_path: Path) -> None:
    """The words are written when the run starts, before it has a checkpoint."""
    run_dir = tmp_path / "my run"
    given = ["+task=gsm8k", "trainer.resume_mode=resume_path", "trainer.resume_from_path=/else", "run_dir='my run'"]
    said = after_death(config(run_dir), given)
    assert said.startswith("error: the launcher was killed, ") and f" Details: {run_dir}/verl.log\n" in said
    assert command_in(said) == ["+task=gsm8k", f"run_dir={run_dir}", "trainer.resume_mode=auto"]


def test_where_no_checkpoint_is_whole_no_command_goes_on(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    said = after_error(NoWholeCheckpoint("restore one"), config(tmp_path), ["+task=gsm8k"])
    assert said == f"error: NoWholeCheckpoint: restore one. Details: {tmp_path}/verl.log"


def raised(*errors: type[BaseException], hidden: bool = False) -> BaseException:
    """The last of these, each raised while the one before it was handled."""
    found: BaseException | None = None
    for kind in errors:
        error = kind("x")
        error.__context__, error.__suppress_context__ = found, hidden
        found = error
    assert found is not None
    return found


def test_what_fails_while_a_run_is_interrupted_is_an_interruption() -> None:
    assert processes.code_of_interruption(raised(KeyboardInterrupt)) == 130
    assert processes.code_of_interruption(raised(KeyboardInterrupt, RuntimeError, ValueError)) == 130
    assert processes.code_of_interruption(raised(SystemExit)) == 143, "Ray's handler of SIGTERM"
    assert processes.code_of_interruption(raised(RuntimeError)) is None
    assert processes.code_of_interruption(raised(KeyboardInterrupt, RuntimeError, hidden=True)) is None, (
        "as where a dead actor's watch interrupts the trainer"
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_has_ended_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signum: int
) -> None:
    """As where a signal comes while the processes of a run are ended, or its last lines are printed."""

    def train(*_: Any) -> NoReturn:
        (tmp_path / SUMMARY_FILE).write_text("{}")
        signal.raise_signal(signum)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(main, "train", train)
    with processes.sigterm_is_ctrl_c():
        assert main.launch(config(tmp_path), "id", ["+task=gsm8k"]) == 128 + signum
    assert capsys.readouterr().err == f"interrupted after the run's end: {tmp_path} has all of it\n"


def test_a_run_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def train(*_: Any) -> NoReturn:
        raise RuntimeError("a worker died")

    monkeypatch.setattr(main, "train", train)
    saved(tmp_path, 5)
    assert main.launch(config(tmp_path), "id", ["+task=gsm8k"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: RuntimeError: a worker died. Details: {tmp_path}/verl.log\n")
    assert command_in(said) == ["+task=gsm8k", f"run_dir={tmp_path}", "trainer.resume_mode=auto"]


@pytest.mark.parametrize("fails", ["ending", "observe"])
def test_whatever_fails_at_the_end_the_run_is_cleaned_up_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    called: list[str] = []

    def calls(name: str) -> Any:
        def call(*_: Any) -> None:
            called.append(name)
            if name == fails:
                raise BrokenPipeError(name)

        return call

    here = SimpleNamespace(observe=calls("observe"))
    elsewhere = SimpleNamespace(clean_up_elsewhere=calls("clean_up_elsewhere"))
    monkeypatch.setenv("VCPO_HARDWARE", "cpu")
    monkeypatch.setattr(console, "screen", lambda: SimpleNamespace(stage=calls("stage"), ending=calls("ending")))
    monkeypatch.setattr(ray_access, "started", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(nodes, "RunOnNodes", lambda _: elsewhere)
    monkeypatch.setattr(session, "environment_of_workers", dict)
    monkeypatch.setattr("verl_vcpo.samplers.replica.register", lambda *_: None)
    monkeypatch.setattr("verl.trainer.constants_ppo.get_ppo_ray_runtime_env", lambda _: {})
    with sigterm_is_ctrl_c(), pytest.raises(BrokenPipeError), session._ray(config(tmp_path), here, None, sys.stdout):  # type: ignore[arg-type]
        called.clear()
    assert called == ["ending", "observe", "clean_up_elsewhere"]


@pytest.mark.parametrize("ending", [TimeoutError, KeyboardInterrupt])
def test_the_traceback_of_an_error_and_the_logs_of_rays_processes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: type[BaseException]
) -> None:
    """Of a start that fails. The folder of the run, in which Ray has its logs, is removed."""
    folders: list[Path] = []

    def no_ray(config: DictConfig, here: RunOnMachine, folder: Path, log: TextIO) -> NoReturn:
        logs = folder / "session_2026" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.out").write_text("no memory")
        (folder / "session_latest").symlink_to(logs.parent)
        folders.append(folder)
        raise ending("Ray does not start")

    monkeypatch.setattr(session, "_ray", no_ray)
    for name in ("TENSORBOARD_DIR", "WANDB_DIR", "VERL_FILE_LOGGER_PATH", RUN_ID_VARIABLE):
        monkeypatch.setenv(name, "")
    (tmp_path / "ray_logs").mkdir()
    (tmp_path / "ray_logs" / "of an earlier launch").touch()
    (tmp_path / "verl.log").write_text("why it ended")
    with pytest.raises(ending), session.ray_session(config(tmp_path), processes.new_run_id()):
        pass
    said = (tmp_path / "verl.log").read_text()
    assert f"{ending.__name__}: Ray does not start" in said
    failed = ending is TimeoutError
    assert (f"logs are in {tmp_path}/ray_logs" in said) == failed
    kept = {file.name: file.read_text() for file in tmp_path.glob("ray_logs/*")}
    assert kept == ({"raylet.out": "no memory"} if failed else {})
    assert (tmp_path / "ray_logs.1/of an earlier launch").is_file()
    assert (tmp_path / "verl.log.1").read_text() == "why it ended"
    assert not folders[0].exists()


@pytest.mark.parametrize("given", [None, "/proc/self/fd/3/verl_metrics.jsonl", "/mine"])
def test_the_places_of_a_run_are_not_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """Neither for Ray's processes, nor for the next run of this process, nor for a command in a tool of a run."""
    names = ("TENSORBOARD_DIR", "WANDB_DIR", "VERL_FILE_LOGGER_PATH")
    for name in (*names, RUN_ID_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv(names[-1], given)

    def found() -> list[str | None]:
        return [os.environ.get(name) for name in names]

    monkeypatch.setattr(session, "_ray", lambda *_: nullcontext(found()))
    for run_dir in (tmp_path / "first", tmp_path / "second"):
        run_dir.mkdir()
        with held_folders.held("run_dir", run_dir):
            folder = held_folders.through(run_dir)
            with session.ray_session(config(run_dir), processes.new_run_id()) as of_ray:
                metrics = given if given == "/mine" else f"{folder}/verl_metrics.jsonl"
                assert found() == [f"{folder}/tensorboard", str(run_dir), metrics]
        assert list(of_ray) == [None, str(run_dir), given] and found() == [None, None, given]  # type: ignore[call-overload]


@pytest.mark.parametrize("part", ["prepare_environment", "compose", "check"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_before_anything_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str, signum: int
) -> None:
    given = ["+task=countdown", f"run_dir={tmp_path}/my run"]
    for name in ("prepare_environment", "compose", "check"):
        monkeypatch.setattr(main, name, lambda *_, **__: None)
    monkeypatch.setattr(main, part, lambda *_, **__: signal.raise_signal(signum))
    assert main.main(given) == 128 + signum
    said = capsys.readouterr().err
    assert said.startswith("interrupted before the run started. To start it:\n")
    assert command_in(said) == given
    assert signal.getsignal(signal.SIGTERM) != processes._terminate


# Sends SIGTERM to itself when torch's extension has been loaded, and the rest of torch has not.
_TERMINATED_IN_TORCH = """
import importlib.util, os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "torch._C":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), os.kill(os.getpid(), signal.SIGTERM))
        return spec

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["+task=countdown"]
runpy.run_module("recipe.fully_async_policy.main", run_name="__main__")
"""


def test_interrupted_in_the_import_of_torch() -> None:
    """An interrupted import of torch that is begun again crashes the process."""
    command = [sys.executable, "-c", _TERMINATED_IN_TORCH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, command_in(done.stderr)) == (143, ["+task=countdown"]), done.stderr
    assert "Traceback" not in done.stderr


def test_an_import_that_fails_because_of_ctrl_c_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports(*_: Any) -> NoReturn:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interruption:
            raise ImportError("numpy's extension") from interruption

    monkeypatch.setattr(main, "prepare_environment", imports)
    assert main.main(["+task=countdown"]) == 130
    assert command_in(capsys.readouterr().err) == ["+task=countdown"]


class _Interrupting:
    def __init__(self, signum: signal.Signals) -> None:
        self.signum = signum

    def __repr__(self) -> str:
        signal.raise_signal(self.signum)
        raise AssertionError("not interrupted")


def model_of_pydantic(signum: signal.Signals) -> NoReturn:
    """A signal while pydantic makes a model, which becomes a SchemaError without a cause."""
    SchemaValidator(core_schema.literal_schema([_Interrupting(signum)]))
    raise AssertionError("not interrupted")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("part", ["compose", "check"])
def test_an_interruption_that_becomes_another_error_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str, signum: signal.Signals
) -> None:
    for name in ("prepare_environment", "compose", "check"):
        monkeypatch.setattr(main, name, lambda *_, **__: None)
    monkeypatch.setattr(main, part, lambda *_, **__: model_of_pydantic(signum))
    before = signal.getsignal(signal.SIGINT)
    assert main.main(["+task=countdown"]) == 128 + signum
    assert command_in(capsys.readouterr().err) == ["+task=countdown"]
    assert signal.getsignal(signal.SIGINT) == before


def swallowed(signum: signal.Signals) -> None:
    """A signal that a package drops, as pydantic-core does in a key's `__hash__`."""
    with contextlib.suppress(BaseException):
        signal.raise_signal(signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("part", ["compose", "check"])
def test_an_interruption_that_a_package_drops_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str, signum: signal.Signals
) -> None:
    for name in ("prepare_environment", "compose", "check", "_folders"):
        monkeypatch.setattr(main, name, lambda *_, **__: None)
    monkeypatch.setattr(main, part, lambda *_, **__: swallowed(signum))
    monkeypatch.setattr(main, "launch", lambda *_: pytest.fail("the run was started"))
    assert main.main(["+task=countdown"]) == 128 + signum
    assert command_in(capsys.readouterr().err) == ["+task=countdown"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_handles_it_keeps_its_exit_code(signum: signal.Signals) -> None:
    def handles_it() -> int:
        with processes.sigterm_is_ctrl_c():
            swallowed(signum)
        return 128 + signum

    with pytest.raises(SystemExit) as ended:
        run_command(handles_it)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert ended.value.code == 128 + signum


def test_so_it_is_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: model_of_pydantic(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a command's last act is to give the signal up
    assert (ended.value.code, capsys.readouterr().err) == (INTERRUPTED, "interrupted\n")


def test_an_error_without_a_signal_stays_that_error() -> None:
    with pytest.raises(ValueError, match="no signal"), interruption_kept():
        raise ValueError("no signal")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_package_that_catches_everything_does_not_lose_it(signum: signal.Signals) -> None:
    """Packages import some of their own parts so; the run would begin all the same."""
    loaded = []
    with processes.sigterm_is_ctrl_c(), pytest.raises(KeyboardInterrupt), processes.interrupted_afterwards():
        swallowed(signum)
        loaded.append("the rest of it")
    assert loaded
    with processes.sigterm_is_ctrl_c(), pytest.raises(KeyboardInterrupt), processes.interrupted_afterwards():
        signal.raise_signal(signum)
        signal.raise_signal(signum)
        loaded.append("a second signal is not waited with")
    assert len(loaded) == 1
