"""What a person can do next: the last lines on the console, however a run ended.

`config` is the run's, and `given` are the arguments that it was started with.
"""

import copy
import os
import shlex
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.tasks.rows import SINGLE_TURN
from verl_vcpo.common import held_folders
from verl_vcpo.loop.checkpoint import NoWholeCheckpoint, newest_whole
from verl_vcpo.report.run_log import MODEL_FOLDER, SUMMARY_FILE, command, last_step

LAUNCHER = "recipe.fully_async_policy.main"
GONE = "FOLDER"
"""What stands for a folder that was removed while the run went on."""
_SAVED = "trainer.default_local_dir"
_RESUMING = ("trainer.resume_mode", "trainer.resume_from_path")
_MODEL = "actor_rollout_ref.model.path"
_NOT_OF_AN_EVALUATION = (*_RESUMING, _SAVED, _MODEL, "run_dir", "trainer.val_only", "trainer.val_before_train")


def after_training(config: DictConfig, given: list[str]) -> str:
    """How to talk to the trained model and how to evaluate it; '' where the run has written none."""
    if not config.save_model or config.trainer.val_only:
        return ""
    model = Path(config.run_dir, MODEL_FOLDER)
    if not model.is_dir():
        return f"The trained model is in {model}, on the node of the trainer's first worker."
    folder = shlex.quote(str(model))
    if config.actor_rollout_ref.rollout.agent.default_agent_loop == SINGLE_TURN:
        run = shlex.quote(str(config.run_dir))
        evaluation = f"python -m recipe.evaluate {folder} --settings-of {run} --samples 8"
    else:
        kept = _without(_NOT_OF_AN_EVALUATION, given)
        evaluation = command(LAUNCHER, [*kept, f"{_MODEL}={model}", "trainer.val_only=true", "run_dir=FOLDER"])
    with_code = config.actor_rollout_ref.model.trust_remote_code
    serving = f"python -m recipe.vllm serve {folder}{' --trust-remote-code' if with_code else ''}"
    return "\n".join(
        [
            f"The trained model: {model}",
            f"  serve it     {serving}",
            "  talk to it   python -m recipe.vllm chat",
            f"  evaluate it  {evaluation}",
        ]
    )


def of_several_turns(task: str, model: Path, config_dir: str | Path | None) -> str:
    """The command that evaluates a model on a task with tools, for which recipe.evaluate has no agent loop."""
    presets = f"--config-dir {shlex.quote(str(config_dir))} " if config_dir else ""
    path = shlex.quote(f"{_MODEL}={model}")
    return f"python -m {LAUNCHER} {presets}+task={task} {path} trainer.val_only=true run_dir=FOLDER"


def after_interruption(config: DictConfig, given: list[str]) -> str:
    """What is kept of a run that was interrupted, how it goes on, and how to get the model of its newest checkpoint."""
    try:
        return _after_interruption(config, given)
    except OSError as unreadable:
        return f"interrupted; {_of_unreadable(unreadable, config, given)}"


def _after_interruption(config: DictConfig, given: list[str]) -> str:
    if moved := held_folders.moved_in_words():
        config, given = at_their_places(config, given)
        return f"interrupted; {moved}\n{to_go_on(config, given)}"
    step = last_step(config.run_dir)
    if Path(config.run_dir, SUMMARY_FILE).is_file():
        return f"interrupted after the run's end: {config.run_dir} has all of it"
    if step == 0:
        kept = f"before the first step: no step's metrics are in {config.run_dir}"
    else:
        kept = f"after step {step}; {config.run_dir} keeps the metrics of the steps that were done"
    saved = _newest(config)
    model = f"\nA model of it: python -m recipe.export {shlex.quote(str(saved))} OUT" if saved else ""
    return f"interrupted {kept}\n{to_go_on(config, given)}{model}"


def after_error(error: BaseException, config: DictConfig, given: list[str]) -> str:
    """What went wrong, where to look, and how the run goes on."""
    try:
        return _after_error(error, config, given)
    except OSError as unreadable:
        return f"error: {one_line(error)}; {_of_unreadable(unreadable, config, given)}"


def _after_error(error: BaseException, config: DictConfig, given: list[str]) -> str:
    said = f"error: {one_line(error)}"
    if moved := held_folders.moved_in_words():
        follows = isinstance(getattr(error, "cause", None) or error, (held_folders.FolderMoved, FileNotFoundError))
        said = f"error: {moved}" if follows else f"error: {moved} ({one_line(error)})"
    config, given = at_their_places(config, given)
    said += "." if config.run_dir == GONE else f". Details: {config.run_dir}/verl.log"
    return said if isinstance(error, NoWholeCheckpoint) else f"{said}\n{to_go_on(config, given)}"


def after_death(config: DictConfig, given: list[str]) -> str:
    """What another process says of a launcher that ended without a word. It is written when the run starts."""
    return (
        "error: the launcher was killed, or Ray's raylet on its machine, without which it cannot live: SIGTERM to all "
        f"of a run's processes, as from scancel, ends both. Details: {config.run_dir}/verl.log\n"
        f"{_from_the_newest(config, given)}"
    )


def _of_unreadable(error: OSError, config: DictConfig, given: list[str]) -> str:
    """What is said of a run whose folders are on a file system that does not answer."""
    return f"its folder cannot be read ({one_line(error)}): mend that first\n{_from_the_newest(config, given)}"


def _from_the_newest(config: DictConfig, given: list[str]) -> str:
    """The command with which a run goes on from a checkpoint that is not looked for."""
    kept = _without((*_RESUMING, "run_dir"), given)
    again = _started([*kept, f"run_dir={config.run_dir}", "trainer.resume_mode=auto"])
    return f"To go on from the newest checkpoint, if there is one:\n  {again}"


def at_their_places(config: DictConfig, given: list[str]) -> tuple[DictConfig, list[str]]:
    """Return `config` and `given` with the paths that folders of the run have now; `GONE` for one that has none."""
    now = {setting: str(place or GONE) for setting, place in held_folders.moved().items()}
    if not now:
        return config, given
    config = copy.deepcopy(config)
    for setting, path in now.items():
        below = f"={OmegaConf.select(config, setting)}/"
        given = [argument.replace(below, f"={path}/", 1) for argument in given]
        OmegaConf.update(config, setting, path)
    if "run_dir" in now and _SAVED not in map(_name, given):
        now.pop(_SAVED, None)  # its usual place is below run_dir
    return config, [*_without(tuple(now), given), *(f"{setting}={path}" for setting, path in now.items())]


def one_line(error: BaseException) -> str:
    """What went wrong, without the traceback: that is in the run's verl.log."""
    text = str(getattr(error, "cause", None) or error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[-1].strip().rstrip('.')}"


def to_go_on(config: DictConfig, given: list[str]) -> str:
    """The command with which a run that has not ended goes on: from its newest checkpoint, if it has one."""
    names = set(map(_name, given))
    # The folder's usual name has the time of the start in it.
    more = [] if names & {"run_dir", "trainer.experiment_name"} else [f"run_dir={config.run_dir}"]
    gone, saved = GONE in (config.run_dir, config.trainer.default_local_dir), _newest(config)
    if gone or saved:
        given = _without(_RESUMING, given)
        how = f"To go on from {saved.name}:" if saved else f"To go on from a copy in {GONE}, or to begin anew there:"
        more.append("trainer.resume_mode=auto")
    elif config.trainer.val_only:
        how = "To evaluate again:"
    elif config.trainer.save_freq > 0:
        how = f"It has no checkpoint yet (trainer.save_freq={config.trainer.save_freq}). To begin anew:"
    else:
        how = "It has no checkpoint: trainer.save_freq=10 writes one every 10 steps. To begin anew:"
    return f"{how}\n  {_started([*given, *more])}"


def _started(given: list[str]) -> str:
    """The command that starts a run: on the cluster that the environment names, as this run."""
    address = os.environ.get("RAY_ADDRESS")
    return f"{f'RAY_ADDRESS={shlex.quote(address)} ' if address else ''}{command(LAUNCHER, given)}"


def _without(names: tuple[str, ...], given: list[str]) -> list[str]:
    """Return the arguments that are not of these settings."""
    return [argument for argument in given if _name(argument) not in names]


def _name(argument: str) -> str:
    """Return the setting that an argument of the command line gives."""
    return argument.partition("=")[0].lstrip("+")


def _newest(config: DictConfig) -> Path | None:
    return newest_whole(Path(config.trainer.default_local_dir), contents=False)[0]
