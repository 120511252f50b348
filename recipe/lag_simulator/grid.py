"""Many runs, several side by side in processes. A grid that was interrupted goes on where it stopped.

Every run is one file, written under another name and renamed: it is whole or it is not there.
"""

import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from verl_vcpo.whole_file import whole_file, write_whole

TASK = "countdown_lag"
SETTINGS_FILE, RUNS = "settings.json", "runs"


@dataclass(frozen=True)
class GridRun:
    """One cell of a grid."""

    method: str
    """A file of config/method."""
    lag: int
    seed: int
    lr: float

    @property
    def name(self) -> str:
        return f"{self.method}-lag{self.lag}-seed{self.seed}-lr{self.lr:g}"


@dataclass(frozen=True)
class Folder:
    """Where a grid's runs are kept, and what they have in common.

    overrides: settings of all runs, on top of the preset.
    """

    path: Path
    overrides: tuple[str, ...] = ()

    def open(self, model: Path) -> None:
        """Make the folder, or check that it holds runs of the same settings and the same first policy.

        Raises:
            ValueError: it holds others.
        """
        (self.path / RUNS).mkdir(parents=True, exist_ok=True)
        record = json.loads((model / "warm_start.json").read_text())["settings"]
        settings = {"task": TASK, "overrides": list(self.overrides), "model": record}
        file = self.path / SETTINGS_FILE
        if not file.is_file():
            write_whole(file, json.dumps(settings, indent=2) + "\n")
        elif self.settings() != settings:
            raise ValueError(f"--out {self.path}: holds runs of other settings ({file}); choose another folder")

    def settings(self) -> dict[str, Any]:
        """What all runs of the opened folder have in common."""
        return json.loads((self.path / SETTINGS_FILE).read_text())

    def file(self, run: GridRun) -> Path:
        return self.path / RUNS / f"{run.name}.parquet"

    def has(self, run: GridRun) -> bool:
        """Whether the run is finished."""
        return self.file(run).is_file()

    def curves(self, runs: Iterable[GridRun]) -> pd.DataFrame:
        """The steps of finished runs, one below the other, with the run's settings in columns."""
        return pd.concat([pd.read_parquet(self.file(run)) for run in runs], ignore_index=True)

    def publish(self, curves: pd.DataFrame, file: Path) -> None:
        """Write curves as one compressed table that says which settings they are of."""
        curves.attrs["settings"] = self.settings()
        with whole_file(file) as partial:
            curves.to_parquet(partial, index=False, compression="zstd")

    def adopt(self, file: Path) -> None:
        """Have the runs of a published table, so that they are not made again.

        Raises:
            ValueError: they are of other settings.
        """
        curves = pd.read_parquet(file)
        if curves.attrs.get("settings") != self.settings():
            raise ValueError(
                f"--known {file}: holds runs of other settings, or was not written by scripts.bench.stability"
            )
        for cell, curve in curves.groupby(["method", "lag", "seed", "lr"], sort=False):
            method, lag, seed, lr = cell
            run = GridRun(str(method), int(lag), int(seed), float(lr))
            if not self.has(run):
                with whole_file(self.file(run)) as partial:
                    curve.to_parquet(partial, index=False, compression="zstd")


def run_all(runs: list[GridRun], folder: Folder, workers: int) -> Iterator[GridRun]:
    """Make the runs that are missing; yields each as it is there, those of before first."""
    missing = [run for run in runs if not folder.has(run)]
    yield from (run for run in runs if run not in set(missing))
    if not missing:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # a run uses one core; read when the processes import torch
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recipe.lag_simulator.simulator"])
    with ProcessPoolExecutor(min(workers, len(missing)), mp_context=context) as pool:
        waiting = {pool.submit(_make, run, folder): run for run in missing}
        try:
            for done in as_completed(waiting):
                done.result()
                yield waiting[done]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _make(run: GridRun, folder: Folder) -> None:
    import torch

    from recipe.lag_simulator.simulator import Simulator

    torch.set_num_threads(1)
    config = _config(run.method, folder.overrides).copy()
    config["async"].lag, config.data.seed = run.lag, run.seed
    config.actor_rollout_ref.actor.optim.lr = run.lr
    write_run(folder.file(run), run, Simulator(config).run())


def write_run(file: Path, run: GridRun, rows: list[dict[str, Any]]) -> None:
    """The curve of one run as a compressed table."""
    table = pd.DataFrame(rows)
    for position, name in enumerate(("method", "lag", "seed", "lr")):
        table.insert(position, name, getattr(run, name))
    with whole_file(file) as partial:
        table.to_parquet(partial, index=False, compression="zstd")


@lru_cache
def _config(method: str, overrides: tuple[str, ...]) -> DictConfig:
    """The configuration of a method; lag, seed and learning rate come from the run."""
    from recipe.lag_simulator.main import compose

    return compose([f"+task={TASK}", f"method={method}", *overrides])
