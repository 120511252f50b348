"""Do truncated responses carry a collapse, and what cures it? `python -m lab.truncated`, on the lag simulator.

The task (lab/truncated/search.py) pays for longer responses, until the limit cuts them; a truncated response is never
right. Compared at lag 8: GRPO without a correction, truncated weights and VCPO; each `async.truncated`; and a limit
that responses reach late. A run takes 20 to 30 seconds of a core, with the wide limit two minutes. Runs are kept
in --out: the same command goes on where it was stopped. --out gets

truncated.csv    a line for each evaluation of each run
truncated.png    accuracy, length and share of truncated responses over the steps

--report shows the published runs, or those of a file, and makes none. lab/truncated/predictions.md says what was
expected.
"""

import argparse
import os
import sys
from pathlib import Path

import pandas as pd

from lab.simulator.grid import Folder, GridRun, make_all
from lab.stability.report import show_tables
from lab.truncated import search
from lab.truncated.report import CASES, STEPS, TIGHT, Case, draw, tables
from recipe.command_line import OneLineParser, run_command, whole_number
from recipe.warm_start.rows import load_answered_rows
from recipe.warm_start.train import Settings
from recipe.warm_start.train import run as teach
from verl_vcpo.common.whole_file import write_whole

DATA, MODEL = Path("data/search"), Path("models/search")
LR, SEEDS = 3e-4, (11, 12, 13, 14, 15, 16)
BUFFER = TIGHT // 3
"""The last tokens of a response that fits, which `async.truncated=penalty` makes dearer and dearer."""
PUBLISHED = Path("docs/measurements/truncated.csv")


def prepare() -> None:
    """Write the rows and train the first policy, unless they are there."""
    if not DATA.exists():
        search.write_rows(DATA)
    rows = load_answered_rows(DATA / "train.parquet", search.ANSWERS)
    settings = Settings.model_validate({"layers": 2, "heads": 2, "steps": 200, "correct_fraction": 1.0, "samples": 4})
    teach(search.Lists(rows.taught, rows.held_out), MODEL, settings)


def folder_of(case: Case, out: Path) -> Folder:
    """Return the folder of all runs with a limit and a treatment of truncated responses, in the sizes of Countdown."""
    overrides = (
        f"trainer.total_training_steps={STEPS}",
        f"data.train_files={DATA}/train.parquet",
        f"data.val_files={DATA}/val.parquet",
        "data.max_prompt_length=32",
        f"data.max_response_length={case.limit}",
        f"actor_rollout_ref.rollout.max_model_len={case.limit + 64}",
        f"actor_rollout_ref.model.path={MODEL}",
        "reward.custom_reward_function.path=pkg://lab.truncated.search",
        f"async.truncated={case.truncated}",
        *([f"async.overlong_buffer_len={BUFFER}"] if case.truncated == "penalty" else []),
    )
    return Folder(out / f"limit{case.limit}-{case.truncated}", "countdown_lag", overrides)


def make(out: Path, seeds: list[int], workers: int) -> None:
    """Make the runs that are missing, under a progress bar: all cases with one seed, then the next."""
    folders = {case: folder_of(case, out) for case in CASES}
    for folder in folders.values():
        folder.open(MODEL)
    runs = [(GridRun(case.method, case.lag, seed, LR), folders[case]) for seed in seeds for case in CASES]
    make_all(runs, workers)


def collected(out: Path) -> pd.DataFrame:
    """Return a row for each evaluation of each finished run; lengths and shares are means since the one before."""
    parts = []
    for case in CASES:
        folder = folder_of(case, out)
        for file in sorted((folder.path / "runs").glob(f"{case.method}-lag{case.lag}-*.parquet")):
            steps = pd.read_parquet(file)
            evaluation = steps["val_accuracy"].notna()[::-1].cumsum()[::-1]
            means = steps.groupby(evaluation)[["response_length", "vcpo/truncated/share", "ess_ratio"]].mean()
            rows = steps.dropna(subset="val_accuracy")
            means = means.loc[evaluation[rows.index]].reset_index(drop=True).round(4)
            means.columns = ["response_length", "truncated_share", "ess_ratio"]
            known = rows[["seed", "step", "val_accuracy", "finite"]].reset_index(drop=True)
            part = pd.concat([known, means], axis=1)
            parts.append(part.assign(limit=case.limit, truncated=case.truncated, method=case.method, lag=case.lag))
    if not parts:
        raise ValueError("--so-far: no run is finished; leave it out")
    return pd.concat(parts, ignore_index=True)


def main(argv: list[str] | None = None) -> int:
    """Make, show and write. Return the exit code: 2 where a folder or a file cannot be used."""
    parser = OneLineParser(prog="python -m lab.truncated", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=whole_number(0), metavar="N", default=SEEDS, help="%(default)s")
    parser.add_argument("--workers", type=whole_number(1), default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--out", type=Path, default=Path("outputs/truncated"), help="default: %(default)s")
    parser.add_argument("--so-far", action="store_true", help="show the runs that are there; make none")
    parser.add_argument("--report", type=Path, nargs="?", const=PUBLISHED, help="a truncated.csv; make no run")
    arguments = parser.parse_args(argv)
    try:
        runs = pd.read_csv(arguments.report) if arguments.report else _made(arguments)
    except (OSError, ValueError) as error:
        print(f"truncated: {error}", file=sys.stderr)
        return 2
    show_tables(tables(runs))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.out / "truncated.csv", runs.to_csv(index=False, lineterminator="\n"))
    print(draw(runs, arguments.out / "truncated.png"))
    return 0


def _made(arguments: argparse.Namespace) -> pd.DataFrame:
    if not arguments.so_far:
        prepare()
        make(arguments.out, list(arguments.seeds), arguments.workers)
    return collected(arguments.out)


if __name__ == "__main__":
    run_command(main)
