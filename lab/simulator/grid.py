"""Many runs, several side by side in processes. A grid that was interrupted goes on where it stopped.

Every run is one file, written under another name and renamed: it is whole or it is not there.
"""

import hashlib
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from tqdm import tqdm

from verl_vcpo.common.whole_file import whole_file, write_whole

SETTINGS_FILE, RUNS = "settings.json", "runs"
WEIGHTS, PRESETS = "first_policy", "presets"
"""The keys of fingerprints among a folder's settings: of the weights, and of each file of `config_dir`."""


@dataclass(frozen=True)
class GridRun:
    """One cell of a grid."""

    method: str
    """A file of config/method or of the folder's `config_dir`."""
    lag: int
    seed: int
    lr: float

    @property
    def name(self) -> str:
        return f"{self.method}-lag{self.lag}-seed{self.seed}-lr{self.lr:g}"


@dataclass(frozen=True)
class Folder:
    """Where a grid's runs are kept, and what they have in common.

    task: the preset, a file of config/task.
    overrides: settings of all runs, on top of the preset.
    config_dir: presets of the user's own, tasks and methods.
    """

    path: Path
    task: str
    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None

    def open(self, model: Path) -> None:
        """Make the folder, or check that it holds runs of the same settings and the same first policy.

        Raises:
            ValueError: it holds others.
        """
        (self.path / RUNS).mkdir(parents=True, exist_ok=True)
        warm_start = model / "warm_start.json"
        record = json.loads(warm_start.read_text())["settings"] if warm_start.is_file() else None
        settings = {"task": self.task, "overrides": list(self.overrides), "model": record, WEIGHTS: fingerprint(model)}
        presets = _digests(self.config_dir) if self.config_dir else {}
        file = self.path / SETTINGS_FILE
        if file.is_file():
            theirs = self.settings()
            changed = [name for name, digest in theirs.pop(PRESETS, {}).items() if presets.get(name) != digest]
            different = f"another {changed[0]}" if changed else difference(theirs, settings)
            if different:
                raise ValueError(f"--out {self.path}: holds runs of {different} ({file}); choose another folder")
        if presets:
            settings[PRESETS] = presets
        write_whole(file, json.dumps(settings, indent=2) + "\n")

    def settings(self) -> dict[str, Any]:
        """What all runs of the opened folder have in common."""
        return json.loads((self.path / SETTINGS_FILE).read_text())

    def file(self, run: GridRun) -> Path:
        return self.path / RUNS / f"{run.name}.parquet"

    def has(self, run: GridRun) -> bool:
        """Whether the run is finished."""
        return self.file(run).is_file()

    def curves(self, runs: Iterable[GridRun]) -> pd.DataFrame:
        """The steps of finished runs, one below the other, with the run's settings in columns.

        `attrs["settings"]` says what they have in common.
        """
        steps = pd.concat([pd.read_parquet(self.file(run)) for run in runs], ignore_index=True)
        steps.attrs["settings"] = self.settings()
        return steps

    def write(self, run: GridRun, steps: pd.DataFrame) -> None:
        """Keep the steps of a finished run as a compressed table."""
        named = steps.assign(method=run.method, lag=run.lag, seed=run.seed, lr=run.lr)
        with whole_file(self.file(run)) as partial:
            named.to_parquet(partial, index=False, compression="zstd")


def fingerprint(model: Path) -> str:
    """Of a checkpoint's weights: the first 16 hexadecimal digits of their SHA-256."""
    return _digest(model / "model.safetensors")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _digests(config_dir: Path) -> dict[str, str]:
    """By name, of each file that a method or task of the user's own is made of."""
    files = (file for kind in ("yaml", "py") for file in config_dir.rglob(f"*.{kind}"))
    return {str(file.relative_to(config_dir)): _digest(file) for file in sorted(files)}


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """What sets runs of `theirs` apart from runs of `ours`, both a folder's settings; None: nothing."""
    if theirs == ours:
        return None
    if {**theirs, WEIGHTS: None} != {**ours, WEIGHTS: None} or WEIGHTS not in theirs:
        return "other settings"
    return f"another first policy: its weights are {theirs[WEIGHTS]}, those here {ours[WEIGHTS]}"


def run_all(runs: Iterable[tuple[GridRun, Folder]], workers: int) -> Iterator[GridRun]:
    """Make the runs that are missing, each in its folder; yields each as it is there, those of before first."""
    missing = []
    for run, folder in runs:
        if folder.has(run):
            yield run
        else:
            missing.append((run, folder))
    if not missing:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # a run uses one core; read when the processes import torch
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.simulator.simulator"])
    with ProcessPoolExecutor(min(workers, len(missing)), mp_context=context) as pool:
        waiting = {pool.submit(_make, run, folder): run for run, folder in missing}
        try:
            for done in as_completed(waiting):
                done.result()
                yield waiting[done]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def make_all(runs: Sequence[tuple[GridRun, Folder]], workers: int) -> None:
    """Make the runs that are missing, as `run_all` does, under a progress bar."""
    for _ in tqdm(run_all(runs, workers), total=len(runs), desc="runs", unit="run", file=sys.stderr):
        pass


def _make(run: GridRun, folder: Folder) -> None:
    import torch

    from lab.simulator.simulator import Simulator

    torch.set_num_threads(1)
    folder.write(run, pd.DataFrame(Simulator(config_of(run, folder)).run()))


def config_of(run: GridRun, folder: Folder) -> DictConfig:
    """The whole configuration of a run."""
    of_method = ("vcpo.ess_part=whole",) if run.method == "vcpo" else ()  # as when its published runs were made
    config = _config(folder.task, run.method, (*folder.overrides, *of_method), folder.config_dir).copy()
    config["async"].lag, config.data.seed = run.lag, run.seed
    config.actor_rollout_ref.actor.optim.lr = run.lr
    return config


@lru_cache
def _config(task: str, method: str, overrides: tuple[str, ...], config_dir: Path | None) -> DictConfig:
    """The configuration of a method; lag, seed and learning rate come from the run."""
    from lab.simulator.main import compose

    return compose([f"+task={task}", f"method={method}", *overrides], config_dir)
