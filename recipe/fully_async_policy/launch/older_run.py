"""What an earlier run has left in a run's folders is gone on with, refused or moved aside, never overwritten."""

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from recipe.fully_async_policy.settings.errors import SettingError, first_line
from verl_vcpo.common.run_id import RUN_ID_FILE, run_in
from verl_vcpo.common.whole_file import write_whole
from verl_vcpo.loop import checkpoint
from verl_vcpo.report import run_log
from verl_vcpo.report.metrics_file import METRICS_FILE, SAVE_S, read_metrics

VERL_LOG, TENSORBOARD, FILE_LOGGER = "verl.log", "tensorboard", "verl_metrics.jsonl"
RAY_LOGS = "ray_logs"
"""After an error: the logs of the processes of a Ray of the run's own."""
_WANDB = "wandb"
_OF_STEPS = (run_log.WEIGHTS_FOLDER, run_log.EVALUATIONS_FOLDER)
"""Folders in the run's folder with a folder for each step that has a model, `step_N`."""
_RECORDS = (run_log.SAMPLES_FILE, run_log.SKIPPED_FILE, run_log.SUMMARY_FILE, run_log.CONFIG_FILE, run_log.COMMAND_FILE)


def take_over(config: DictConfig, launch: str) -> str:
    """Make the folders those of this run, which goes on with the run in them or begins anew. The caller holds them.

    `launch`: the id of this launch, which a run that begins anew gets.

    Returns:
        What was moved aside, in one line; '' where nothing was.

    Raises:
        SettingError: the checkpoints are another run's, or are not there to go on from; files cannot be moved.
    """
    if config.trainer.val_only:
        return set_aside(config)
    try:
        return _taken_over(config, launch)
    except OSError as error:
        raise SettingError(
            f"run_dir={config.run_dir}: cannot be read or written ({first_line(error)}); mend that, or give another"
        ) from None


def _taken_over(config: DictConfig, launch: str) -> str:
    """`take_over` of a run that trains. Raises OSError besides."""
    chosen, moved, run = _gone_on_from(config), "", launch
    if chosen is None:
        moved = set_aside(config)
    else:
        _refuse_other_runs(config)
        run = checkpoint.written_by(chosen) or launch
        if config.trainer.resume_mode == "resume_path":
            moved = _later_set_aside(config, chosen)
    checkpoint.remove_unfinished(_saved(config))
    write_whole(Path(config.run_dir, RUN_ID_FILE), f"{run}\n")
    return moved


def set_aside(config: DictConfig) -> str:
    """Move what an earlier run wrote from `run_dir` to `run_dir.N`: this run begins anew.

    Checkpoints in a folder outside `run_dir` get a folder with the same ending. Files that no run writes stay.

    Returns:
        One line that says so; '' where there was no earlier run.

    Raises:
        SettingError: the files cannot be moved, or the model is among them.
    """
    places = _moved(config, _of_run(Path(config.run_dir), _saved(config), config.trainer.val_only))
    return "; ".join(f"{place} had an earlier run's files: they are now in {aside}" for place, aside in places.items())


def _gone_on_from(config: DictConfig) -> Path | None:
    """The checkpoint of the run in the folders that this run goes on from; None where it begins anew.

    Raises:
        SettingError: `trainer.resume_mode=auto` has none that is whole, and that run has written some.
    """
    trainer, run_dir, saved = config.trainer, Path(config.run_dir).resolve(), _saved(config)
    if trainer.resume_mode == "resume_path":
        chosen, own = Path(trainer.resume_from_path), run_in(run_dir)
        inside = any(chosen.resolve().is_relative_to(folder) for folder in (run_dir, saved.resolve()))
        return chosen if inside or (own and checkpoint.written_by(chosen) == own) else None
    if trainer.resume_mode == "disable":
        return None
    newest, damaged = checkpoint.newest_whole(saved, contents=False)
    if newest is None and damaged:
        raise SettingError(checkpoint.none_whole(saved, damaged))
    if newest is None and (step := _last_saved(run_dir)):
        raise SettingError(
            f"trainer.default_local_dir={trainer.default_local_dir}: has no checkpoint, and the run in "
            f"run_dir={config.run_dir} wrote one after step {step}; mount or restore that folder, or begin anew with "
            "trainer.resume_mode=disable, which moves all files of that run aside"
        )
    return newest


def _last_saved(run_dir: Path) -> int | None:
    """The last step that wrote a checkpoint, by the metrics."""
    lines = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    return next((line["step"] for line in reversed(lines) if line.get(SAVE_S)), None)


def _refuse_other_runs(config: DictConfig) -> None:
    """Refuse checkpoints of another run than that in `run_dir`, which without an id has all that are in `run_dir`."""
    saved, own = _saved(config), run_in(config.run_dir)
    if own is None and saved.is_relative_to(Path(config.run_dir).absolute()):
        return
    for folder in checkpoint.checkpoints(saved):
        if checkpoint.written_by(folder) not in (None, own):
            raise SettingError(
                f"trainer.default_local_dir={config.trainer.default_local_dir}: {folder.name} is of another run than "
                f"that of run_dir={config.run_dir}; give the run_dir that it goes with, or another default_local_dir"
            )


def _later_set_aside(config: DictConfig, chosen: Path) -> str:
    """Move what is of steps after that of `chosen`, and copy the records, which lose those steps."""
    step, run_dir = checkpoint.step_of(chosen), Path(config.run_dir)
    of_steps = (p for name in _OF_STEPS for p in run_dir.glob(f"{name}/step_*"))
    weights = [p for p in of_steps if p.name.removeprefix("step_").isdigit()]
    later = [p for p in (*checkpoint.checkpoints(_saved(config)), *weights) if checkpoint.step_of(p) > step]
    places = _moved(config, later, copied=[run_dir / name for name in (METRICS_FILE, *_RECORDS)])
    return "; ".join(
        f"{place} had steps after {step}: their checkpoints are now in {aside}, with a copy of the metrics"
        for place, aside in places.items()
    )


def _moved(config: DictConfig, found: list[Path], copied: Sequence[Path] = ()) -> dict[str, Path]:
    """Move files in `run_dir`, or in the folder of checkpoints, to folders with the names of these and the ending .N.

    `copied` files that are there are copied into each of the new folders.

    Returns:
        Where the files are now, by the folder that they were in, as its setting names it.
    """
    run_dir, saved = Path(config.run_dir).absolute(), _saved(config)
    number = next(n for n in itertools.count(1) if not any(os.path.lexists(f"{path}.{n}") for path in (run_dir, saved)))
    model = Path(config.actor_rollout_ref.model.path).absolute()
    if any(model.is_relative_to(path.absolute()) for path in found):
        raise SettingError(
            f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}: an earlier run wrote it into the "
            f"folder of this run, run_dir={config.run_dir}; give this run a folder of its own"
        )
    places: dict[str, Path] = {}
    try:
        for path in map(Path.absolute, found):
            of_run = path.is_relative_to(run_dir)
            above, given = (run_dir, config.run_dir) if of_run else (saved, config.trainer.default_local_dir)
            places[given] = Path(f"{given}.{number}")
            aside = Path(f"{above}.{number}") / path.relative_to(above)
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, aside)
        for file, place in itertools.product(copied, places.values()):
            if file.is_file():
                shutil.copy2(file, place)
    except OSError as error:
        raise SettingError(
            f"run_dir={config.run_dir}: has an earlier run, which cannot be moved to {config.run_dir}.{number} "
            f"({first_line(error)}); give another folder, or go on with that run: trainer.resume_mode=auto"
        ) from None
    return places


def _saved(config: DictConfig) -> Path:
    """The folder of checkpoints."""
    return Path(config.trainer.default_local_dir).absolute()


def _of_run(run_dir: Path, saved: Path, val_only: bool) -> list[Path]:
    """What an earlier run has written, and this run would write: the metrics last, which say that there is more.

    Nothing of a run that has measured nothing. Where no run has been, files of these names are a user's.
    """
    checkpoints = [] if val_only else checkpoint.checkpoints(saved)
    metrics, of_a_run = run_dir / METRICS_FILE, run_in(run_dir) or (run_dir / run_log.COMMAND_FILE).is_file()
    if of_a_run and not checkpoints and not (metrics.is_file() and metrics.stat().st_size):
        return []
    names = (*_RECORDS, VERL_LOG, RAY_LOGS, FILE_LOGGER, TENSORBOARD, _WANDB, *_OF_STEPS, run_log.MODEL_FOLDER)
    of_checkpoints = [] if val_only else [*checkpoints, saved / checkpoint.TRACKER]
    logs = (file for name in (VERL_LOG, RAY_LOGS) for file in run_dir.glob(f"{name}.[0-9]*"))
    written = (*of_checkpoints, *(run_dir / name for name in (*names, RUN_ID_FILE)), *logs, metrics)
    return [path for path in written if path.exists()]
