"""What a lag that governs itself costs and gains: `python -m scripts.bench.lag_auto [--json]`.

The lag simulator on Countdown at a learning rate that is too high for lag 128, with `async.lag=auto async.max_lag=128`
and with fixed lags: accuracy, collapses, the lag that was trained at, and the time that a step would take by a model of
the waiting. With --real three runs on Ray, vLLM and Megatron instead, and the time that they waited (10 minutes on 2
cores; run it alone). Runs are kept in --out: the same command goes on where it was stopped.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import pandas as pd
from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from recipe.lag_simulator.analysis import accuracy_after, collapse_step
from scripts.bench.stability.inference import holm, welch
from scripts.bench.stability.preset import TASKS, prepare
from verl_vcpo.trainer.ppo.v1.lag_setting import AUTO
from verl_vcpo.whole_file import whole_file

METHODS, SEEDS = ("vcpo_ess", "tis_seq"), (1, 2, 3, 4)
MAX_LAG, LAGS, LEARNING_RATE, STEPS = 128, (AUTO, "6", "32", "128"), 3e-4, 300
LATENCIES = (8, 64)
"""Times that a batch takes from its registration to its last response; the trainer's work for a step takes 1."""


@dataclass(frozen=True)
class Row:
    """Means over the seeds of a method at a lag."""

    method: str
    lag: str
    finals: tuple[float, ...]
    """By seed: the mean of the evaluations in the last tenth of the steps."""
    accuracy: float
    """Of all evaluations after step `MAX_LAG`."""
    collapsed: int
    runs: int
    mean_lag: float
    largest_lag: int
    step_times: tuple[float, ...]
    """By latency; the trainer's work for a step takes 1."""


def step_time(lags: Sequence[int], latency: float) -> float:
    """The mean time of a step where every batch takes `latency` to sample, however many are on their way.

    Args:
        lags: of each step's batch, which was registered at the beginning of the step so many steps before.
        latency: as a multiple of the trainer's work for a step.
    """
    begins = [0.0]
    for step, lag in enumerate(lags):
        begins.append(max(begins[step], begins[step - lag] + latency) + 1)
    return begins[-1] / len(lags)


def summary(method: str, lag: str, curves: pd.DataFrame) -> Row:
    """Of the runs of one method at one lag, which differ in their `seed`."""
    runs = [curve for _, curve in curves.groupby("seed")]
    lags = [curve["lag_max"].dropna().astype(int).tolist() for curve in runs]
    return Row(
        method=method,
        lag=f"{AUTO} (max {MAX_LAG})" if lag == AUTO else lag,
        finals=tuple(accuracy_after(curve, int(0.9 * STEPS), STEPS) for curve in runs),
        accuracy=mean(accuracy_after(curve, MAX_LAG, STEPS) for curve in runs),
        collapsed=sum(collapse_step(curve) is not None for curve in runs),
        runs=len(runs),
        mean_lag=mean(map(mean, lags)),
        largest_lag=max(map(max, lags)),
        step_times=tuple(mean(step_time(of_run, latency) for of_run in lags) for latency in LATENCIES),
    )


def made(method: str, lag: str, out: Path) -> pd.DataFrame:
    """The curves of all seeds; they are made, side by side, where they are missing."""
    from recipe.lag_simulator.main import compose
    from recipe.lag_simulator.simulator import Simulator

    file = out / f"{method}-{lag}.parquet"
    if not file.is_file():
        settings = [f"+task={TASKS['countdown'].preset}", f"method={method}", f"async.lag={lag}"]
        settings += [f"async.max_lag={MAX_LAG}"] if lag == AUTO else []
        settings += [f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}", f"trainer.total_training_steps={STEPS}"]
        curves = Simulator([compose([*settings, f"data.seed={seed}"]) for seed in SEEDS]).run()
        of_seeds = [pd.DataFrame(rows).assign(seed=seed) for seed, rows in zip(SEEDS, curves, strict=True)]
        with whole_file(file) as partial:
            pd.concat(of_seeds, ignore_index=True).to_parquet(partial, index=False)
    return pd.read_parquet(file)


def comparisons(rows: Sequence[Row]) -> dict[Row, tuple[str, str]]:
    """By row of a fixed lag: the final accuracy of `auto` less the row's, in points with its interval; p after Holm."""
    governed = {row.method: row for row in rows if row.lag.startswith(AUTO)}
    fixed = [row for row in rows if row not in governed.values()]
    found = [welch(governed[row.method].finals, row.finals) for row in fixed]
    corrected = holm([difference.p for difference in found])
    return {
        row: (f"{100 * d.mean:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f})", f"{p:.2f}")
        for row, d, p in zip(fixed, found, corrected, strict=True)
    }


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/measurements/lag-auto.md."""
    compared = comparisons(rows)
    columns = ["method", "`async.lag`", "final accuracy", "`auto` less this", "p (Holm)"]
    columns += [f"after step {MAX_LAG}", "collapsed"]
    columns += ["mean lag", "largest lag"]
    columns += [f"step time, latency {latency}" for latency in LATENCIES]
    lines = [columns, ["--"] * len(columns)]
    for row in rows:
        cells = [f"`{row.method}`", row.lag, f"{mean(row.finals):.1%}", *compared.get(row, ("-", "-"))]
        cells += [f"{row.accuracy:.1%}"]
        cells += [f"{row.collapsed} of {row.runs}", f"{row.mean_lag:.1f}", str(row.largest_lag)]
        lines.append([*cells, *(f"{time:.2f}" for time in row.step_times)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def on_the_real_stack(out: Path, as_json: bool) -> int:
    """Run and print; the exit code."""
    from scripts.bench.stability import lag_auto_real

    try:
        rows = lag_auto_real.measure(out)
    except RuntimeError as error:
        print(f"lag_auto: {error}", file=sys.stderr)
        return 2
    print(lag_auto_real.table(rows).markdown())
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


def main() -> int:
    import torch

    parser = OneLineParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/lag_auto"), help="default: %(default)s")
    parser.add_argument("--real", action="store_true", help="on the real stack: what is waited, measured")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, last")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        prepare(TASKS["countdown"])
    except ValueError as error:
        print(f"lag_auto: {error}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.real:
        return on_the_real_stack(arguments.out, arguments.json)
    cells = [(method, lag) for method in METHODS for lag in LAGS]
    rows = [summary(method, lag, made(method, lag, arguments.out)) for method, lag in tqdm(cells, file=sys.stderr)]
    print(markdown(rows))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    run_command(main)
