"""The evaluation of a run's models beside the run: `python -m recipe.evaluate --follow RUN`.

Each model has a process of its own, whose memory is free again while the run is between two models.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from recipe.evaluate import results
from recipe.evaluate.settings import deciding, of_run
from recipe.fully_async_policy.launch import processes
from recipe.fully_async_policy.settings.errors import SettingError, first_line
from recipe.fully_async_policy.settings.run_folder import LOCK
from verl_vcpo.common import console
from verl_vcpo.common.run_id import run_in
from verl_vcpo.common.whole_file import whole_folder
from verl_vcpo.report.run_log import (
    CONFIG_FILE,
    EVALUATIONS_FOLDER,
    MODEL_FOLDER,
    SUMMARY_FILE,
    WEIGHTS_FOLDER,
    command,
    last_step,
)

_POLL_S, _END_S, _NICE = 2.0, 10.0, 10
_REFUSED = 2
"""The exit code of `recipe.evaluate` where settings, data or a model are wrong."""
_PR_SET_PDEATHSIG = 1


def follow(run: Path, samples: int | None, overrides: list[str]) -> int:
    """Evaluate the models of `run` until the run has ended. Return the exit code: 2 for what is refused."""
    more = [*(["--samples", str(samples)] if samples else []), *overrides]
    with processes.sigterm_is_ctrl_c():
        try:
            _wait_for_start(run)
            with _alone(run):
                return _Follower(run, samples, overrides, more).run()
        except SettingError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as error:
            again = command("recipe.evaluate", ["--follow", str(run), *more])
            print(f"interrupted. Results that are there stay; to go on:\n  {again}", file=sys.stderr)
            return processes.code_of_interruption(error) or 1


def goes_on(run: Path) -> bool:
    """Return True while a process holds the run's folder, as a trainer does from its start to its end."""
    try:
        lock = os.open(run / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _wait_for_start(run: Path) -> None:
    """Wait until the run has written its settings, which it does at its start. Raises SettingError for no run."""
    if not run.is_dir():
        raise SettingError(f"--follow {run}: no such folder; start the run first")
    while goes_on(run) and not (run / CONFIG_FILE).is_file():
        time.sleep(_POLL_S)
    if not (run / CONFIG_FILE).is_file():
        raise SettingError(f"--follow {run}: no {CONFIG_FILE}; give the folder (run_dir) of a run")


@contextlib.contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Keep other followers of the run out for the block."""
    lock = FileLock(run / EVALUATIONS_FOLDER / LOCK, timeout=0)
    try:
        (run / EVALUATIONS_FOLDER).mkdir(exist_ok=True)
        lock.acquire()
    except Timeout:
        raise SettingError(f"--follow {run}: another `vcpo evaluate --follow` writes there; wait for its end") from None
    except OSError as error:
        raise SettingError(f"--follow {run}: cannot be written ({first_line(error)}); mend that") from None
    try:
        yield
    finally:
        lock.release()


class _Model(NamedTuple):
    step: int
    path: Path

    @property
    def written(self) -> int | None:
        """Changes where the model is written again; None where it is gone."""
        try:
            return (self.path / "config.json").stat().st_mtime_ns
        except FileNotFoundError:
            return None


class _Follower:
    """Evaluates the models of a run.

    Args:
        run: the run's folder.
        samples: of each problem; None: as many as the run draws.
        overrides: settings that differ from the run's.
        more: both, as arguments.
    """

    def __init__(self, run: Path, samples: int | None, overrides: list[str], more: list[str]) -> None:
        config = of_run(run, samples, overrides)
        if not (config.save_weights or config.save_model):
            raise SettingError(f"--follow {run}: with save_weights=false and save_model=false it writes no model")
        self._run, self._more, self._id = run, more, run_in(run)
        self._samples, self._overrides = samples, overrides
        self._first, self._writes_weights = Path(config.actor_rollout_ref.model.path), config.save_weights
        self._saves_model = config.save_model
        self._settings = self._decide()
        self._done = {result.step: result for result in results.read(run)}
        self._failed: dict[int, int] = {}  # step -> `written` of the model
        self._screen = console.Screen(sys.stdout)
        self._log = run / EVALUATIONS_FOLDER / "evaluate.log"

    def run(self) -> int:
        """Evaluate until the run has ended and nothing is left. Return the exit code."""
        try:
            return self._all()
        finally:
            self._screen.unfinished()
            self._screen.close()

    def _all(self) -> int:
        self._screen.line(f"Evaluates the models of {self._run} as they appear, into {self._run / EVALUATIONS_FOLDER}.")
        if not self._writes_weights:
            self._screen.line("The run has save_weights=false: it writes one model, at its end.")
        for result in self._done.values():
            self._tell_of_other_settings(result)
        while True:
            there = goes_on(self._run)  # asked first: of a run that has ended, all models are there
            due = next((model for model in self._models(there) if self._is_due(model)), None)
            if due:
                self._evaluate(due)
            elif there:
                self._wait()
            else:
                return self._ended()

    def _models(self, going: bool) -> Iterator[_Model]:
        """The first policy and those that the run has written, in the order of their steps."""
        if run_in(self._run) != self._id:
            raise SettingError(f"--follow {self._run}: was moved, or another run has begun there; follow that anew")
        written = (self._run / WEIGHTS_FOLDER).glob("step_*/config.json")
        named = {p.parent.name.removeprefix("step_"): p.parent for p in written}
        steps = {int(step): path for step, path in named.items() if step.isdigit()}
        ended = not going and (self._run / SUMMARY_FILE).is_file()
        if ended and self._saves_model:  # before a resumed run has ended, its model is that of an earlier end
            steps.setdefault(last_step(self._run), self._run / MODEL_FOLDER)
        for step, path in sorted({0: self._first, **steps}.items()):
            if (path / "config.json").is_file():
                yield _Model(step, path)

    def _is_due(self, model: _Model) -> bool:
        done, written = self._done.get(model.step), model.written
        return written is not None and written not in (done and done.model_written, self._failed.get(model.step))

    def _evaluate(self, model: _Model) -> None:
        """Evaluate a model in a process of its own. Raises SettingError where that would fail for every model."""
        written = model.written
        if written is None:
            return
        self._settings = self._decide()  # a resumed run may have others
        self._screen.begin(f"Evaluating step {model.step}")
        try:
            with whole_folder(results.folder(self._run, model.step)) as place:
                result = self._result(model, written, place)
        except _Failed as failed:
            self._failed[model.step] = written
            self._screen.finish()
            self._screen.line(f"step {model.step}: failed, {failed}. Details: {self._log}")
            return
        except _Changed:
            self._screen.finish()
            self._screen.line(f"step {model.step}: the run was resumed meanwhile; its model is looked for again")
            return
        self._done[model.step] = result
        self._failed.pop(model.step, None)
        self._screen.finish()
        sources = [f"{name} {share:.1%}" for name, share in result.accuracies.items()]
        of_each = f" ({', '.join(sources)})" if len(sources) > 1 else ""
        accuracy = f"{result.accuracy:.1%}{of_each}"
        self._screen.line(f"step {model.step}: held-out accuracy {accuracy}, {result.answers} answers")

    def _result(self, model: _Model, written: int, place: Path) -> results.Evaluation:
        answers = place / results.ANSWERS
        how = ["--settings-of", str(self._run), "--json", str(answers), *self._more]
        code, last_words = _run([sys.executable, "-m", "recipe.evaluate", str(model.path), *how], self._log)
        if model.written != written or self._decide() != self._settings:
            raise _Changed
        if code == _REFUSED:
            raise SettingError(last_words.removeprefix("error: "))
        if code:
            raise _Failed(last_words.removeprefix("error: ") or f"exit code {code}")
        accuracies, count = results.accuracies_of(answers)
        return results.write(
            results.Evaluation(
                step=model.step,
                accuracies=accuracies,
                answers=count,
                as_the_run=not self._more or self._settings == deciding(of_run(self._run, None, [])),
                settings=self._settings,
                model=str(model.path),
                model_written=written,
            ),
            place,
        )

    def _decide(self) -> dict[str, Any]:
        """Return the settings by which results differ, as the run and the command have them now."""
        return deciding(of_run(self._run, self._samples, self._overrides))

    def _tell_of_other_settings(self, result: results.Evaluation) -> None:
        others = {name: value for name, value in self._settings.items() if result.settings.get(name) != value}
        if others:
            said = ", ".join(f"{name} {result.settings.get(name)}, now {value}" for name, value in others.items())
            folder = results.folder(self._run, result.step)
            self._screen.line(f"step {result.step}: evaluated with {said}. Kept; without {folder} it is done again.")

    def _wait(self) -> None:
        """Wait until the run has ended or has written another model."""
        self._screen.begin(f"Waiting for the next model (the run is at step {last_step(self._run)})")
        while goes_on(self._run) and not any(map(self._is_due, self._models(going=True))):
            time.sleep(_POLL_S)
        self._screen.finish()

    def _ended(self) -> int:
        """Say how it ended. Return the exit code."""
        if not (self._run / SUMMARY_FILE).is_file():
            self._screen.line("The run ended before its last step: if it is resumed, so can this command be.")
        failed = f", {len(self._failed)} failed: {self._log}" if self._failed else ""
        self._screen.line(f"{len(self._done)} models evaluated{failed}. To see it: vcpo report {self._run}")
        return 1 if self._failed else 0


class _Changed(Exception):
    """The run's settings, or the model, are others than when its evaluation began."""


class _Failed(Exception):
    """The evaluation of one model failed. The message is one line."""


def _run(arguments: list[str], log: Path) -> tuple[int, str]:
    """Run a command, whose output goes to the end of `log`. Return the exit code, and the last line of the output."""
    with log.open("a") as out:
        begin = out.tell()
        # a process group of its own: Ctrl-C is for this process, which ends the other
        process = subprocess.Popen(arguments, stdout=out, stderr=out, preexec_fn=_beside, start_new_session=True)
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    said = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
    return code, said[-1] if said else ""


def _beside() -> None:
    """Let the run go first on cores that both use, and end with the process that waits."""
    os.nice(_NICE)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):  # of a model on several devices too
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
