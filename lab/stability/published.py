"""The runs of one comparison in one small file, which holds what a report reads of them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab.simulator.analysis import LAST, shift
from lab.simulator.grid import Folder, GridRun, difference
from lab.stability.alarm import VANISHED, vanished
from lab.stability.cells import RUN
from verl_vcpo.common.whole_file import whole_file

PUBLISHED = Path("docs/measurements/runs")
_ESS_STEPS, _KL_STEPS = 1600, 500
"""The ESS ratio is kept to 1/1600, the middle of its interval, and KL to 1/500: as coarse as leaves every number of
docs/measurements/stability.md what it is with whole numbers."""


def publish(curves: Mapping[str, pd.DataFrame], file: Path) -> None:
    """Write one table.

    Args:
        curves: by task, steps of runs, one below the other; `attrs["settings"]` says what the runs have in common.
        file: where to.
    """
    parts = [_small(of).assign(task=task) for task, of in curves.items()]
    table = pd.concat(parts, ignore_index=True).astype({"task": "category", "method": "category"})
    table.attrs["settings"] = {task: settings(of) for task, of in curves.items()}
    with whole_file(file) as partial:
        table.to_parquet(partial, index=False, compression="zstd", compression_level=19, row_group_size=len(table))


def _small(curves: pd.DataFrame) -> pd.DataFrame:
    table = curves[[*RUN, "step"]].astype({"lag": "int16", "seed": "int16", "step": "int16"})
    table[["finite", "val_accuracy"]] = curves[["finite", "val_accuracy"]].astype("float32")
    for name in (name for name in LAST if name in curves):
        table[name] = curves[name].astype("float32")
    if "shift" in curves or {"baseline", "reward"} <= set(curves.columns):
        table["shift"] = _shift(curves).astype("float32")
    if "ess_ratio" not in curves:
        return table[table["val_accuracy"].notna()]
    ess = (np.floor(_ESS_STEPS * curves["ess_ratio"] + 1e-9) + 0.5) / _ESS_STEPS
    table["ess_ratio"] = ess.clip(upper=1).astype("float32")
    table["kl"] = ((_KL_STEPS * curves["kl"]).round() / _KL_STEPS).astype("float32")
    told = vanished(curves)
    table[VANISHED] = curves[VANISHED].astype("boolean").fillna(told).astype(bool) if VANISHED in curves else told
    largest = curves["method"].isin(["tis_seq", "vcpo"]) & (curves["lag"] == curves["lag"].max())
    drawn = largest | ((curves["method"] == "none") & (curves["lag"] == 0))  # of others no gradient norm is shown
    table["grad_norm"] = curves["grad_norm"].where(drawn).astype("float16").astype("float32")
    return table


def _shift(curves: pd.DataFrame) -> "pd.Series[float]":
    """The mean over a run's steps of its baseline less the mean reward, in the run's last row."""
    if "shift" in curves:
        return curves["shift"]
    run = [curves[name] for name in RUN]
    mean = shift(curves).groupby(run, sort=False).transform("mean")
    return mean.where(curves["step"] == curves["step"].groupby(run, sort=False).transform("max"))


def settings(curves: pd.DataFrame) -> dict[str, Any]:
    """What the runs of one task have in common."""
    return curves.attrs.get("settings", {})


def adopt(folder: Folder, file: Path) -> None:
    """Have the runs of a published table in a folder, so that they are not made again.

    Raises:
        ValueError: the table cannot be read, or its runs are of other settings or another first policy.
    """
    for curves in read_curves([file]).values():
        if different := difference(settings(curves), folder.settings()):
            raise ValueError(f"--known {file}: holds runs of {different}; leave it out")
        for (method, lag, lr, seed), curve in curves.groupby(RUN, sort=False):
            run = GridRun(str(method), int(lag), int(seed), float(lr))
            if not folder.has(run):
                folder.write(run, curve)


def read_curves(files: Iterable[Path], lags: Sequence[int] | None = None) -> dict[str, pd.DataFrame]:
    """The runs of published tables by task, one below the other.

    Args:
        files: as `publish` writes them.
        lags: leaves out the runs at others.

    Raises:
        ValueError: a file is not there or has no runs of the simulator, or two of them have the same run, or runs of
            one task with other settings or another first policy, or no run at one of `lags`.
    """
    of: dict[str, list[tuple[Path, pd.DataFrame]]] = {}
    for file in files:
        for task, curves in _read(file).items():
            of.setdefault(task, []).append((file, curves))
    joined = {task: _joined(parts) for task, parts in of.items()}
    return joined if lags is None else {task: _at_lags(curves, lags) for task, curves in joined.items()}


def _read(file: Path) -> dict[str, pd.DataFrame]:
    try:
        table = pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); lab.stability writes such files") from None
    if lacking := {"task", *RUN, "step", "val_accuracy", "finite"} - set(table.columns):
        raise ValueError(f"{file}: no column {', '.join(sorted(lacking))}; lab.stability writes such files")
    found = {}
    for task, curves in table.astype({"task": "str", "method": "str"}).groupby("task", sort=False):
        found[str(task)] = curves.drop(columns="task").reset_index(drop=True)
        found[str(task)].attrs["settings"] = table.attrs.get("settings", {}).get(task, {})
    return found


def _joined(parts: Sequence[tuple[Path, pd.DataFrame]]) -> pd.DataFrame:
    first_file, first = parts[0]
    for file, curves in parts[1:]:
        if different := difference(settings(curves), settings(first)):
            raise ValueError(f"{file}: holds runs of {different}; {first_file} is another comparison: name one of them")
    joined = pd.concat([curves for _, curves in parts], ignore_index=True)
    joined.attrs = first.attrs
    if joined.duplicated([*RUN, "step"]).any():
        raise ValueError("the files have the same run twice: name each once")
    return joined


def _at_lags(curves: pd.DataFrame, lags: Sequence[int]) -> pd.DataFrame:
    if lacking := set(lags) - (known := set(curves["lag"])):
        raise ValueError(f"--lags {min(lacking)}: the files have runs at {', '.join(map(str, sorted(known)))} only")
    return curves[curves["lag"].isin(lags)]
