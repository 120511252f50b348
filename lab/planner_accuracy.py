"""How far to trust the planner? `python -m lab.planner_accuracy [--runs DIR] [--json]`.

Calibrates lab.planner on one run at lag 0, forecasts the same work at other lags, makes these runs on the
real stack, and prints both: the workload of lab.overlap at lags 1, 2, 4 and 8; long responses in 2 slots,
which the samplers bind; the quickstart's sizes, in fewer steps, at lag 32; and short responses without a tool, with
all slots, 2 and 1. Thirteen runs of one to four minutes each on 2 cores; run it alone. With --runs it can be continued.
No policy learns anything: one that does gives responses of other lengths in each run, which no forecast from another
run foresees.

Below: the paper's own GPU hours, divided by its steps, beside a guess for the launch scripts' layouts from a data
sheet. The paper does not give response lengths or the number of GPUs, so that only the ratios can be compared.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.planner.forecasts.published import published
from lab.planner.forecasts.runs import (
    CALIBRATIONS,
    CASES,
    errors,
    folder_of,
    forecast,
    is_done,
    make_models,
    measured,
    run_once,
    worst,
)
from lab.planner.rates import PlanError
from recipe.command_line import OneLineParser, run_command


def print_rows(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "", "s per step", "forecast", "trainer idle", "forecast", "samplers idle", "forecast", "lag", "forecast"
    )
    for row in rows:
        real, said = row["measured"], row["forecast"]
        table.add_row(
            row["case"],
            *(f"{real['step_s']:.2f}", f"{said['step_s']:.2f}"),
            *(f"{real['trainer_idle']:.0%}", f"{said['trainer_idle']:.0%}"),
            *(f"{real['sampler_idle']:.0%}", f"{said['sampler_idle']:.0%}"),
            *(f"{real['lag_mean']:.2f}", f"{said['lag_mean']:.2f}"),
        )
    Console(width=130).print(table)


def print_published(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "lag", "GPU hours a step, lag 0", "with lag", "ratio", "forecast's ratio")
    for row in rows:
        hours = (f"{row['synchronous_hours']:.3f}", f"{row['lag_hours']:.3f}")
        table.add_row(row["task"], str(row["lag"]), *hours, f"{row['ratio']:.2f}", f"{row['forecast_ratio']:.2f}")
    Console(width=130).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs; those that it has are not made again")
    names = [case.name for case in (*CALIBRATIONS, *CASES)]
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=names, help="make no other runs; print what is done"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, last")
    arguments = parser.parse_args()
    if arguments.runs and arguments.runs.is_file():
        parser.error(f"--runs {arguments.runs}: is a file; give a folder")
    folder = arguments.runs or Path(tempfile.mkdtemp(prefix="vcpo-planner-"))
    folder.mkdir(parents=True, exist_ok=True)
    make_models(folder)
    rows = []
    try:
        for case in (*CALIBRATIONS, *CASES):
            if arguments.only is None or case.name in arguments.only:
                run_once(case, folder)
        for case in (*CALIBRATIONS, *CASES):
            if is_done(case, folder) and is_done(case.calibration, folder):
                real, said = measured(folder_of(case, folder)), forecast(case, folder_of(case.calibration, folder))
                wrong = errors(real, said)
                rows.append({"case": case.name, "measured": asdict(real), "forecast": asdict(said), "errors": wrong})
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.runs is None:
        shutil.rmtree(folder)
    print_rows(rows)
    compared = published()
    print_published(compared)
    checked = [row for row in rows if row["case"] not in {case.name for case in CALIBRATIONS}]
    worsts = {f"worst_{name}_error": worst(checked, name) for name in ("step", "idle", "lag")} if checked else {}
    for name, value in worsts.items():
        print(f"{name} {value:.3f}")
    if arguments.json:
        print(json.dumps({"rows": rows, "published": compared, **worsts}))
    return 0


if __name__ == "__main__":
    run_command(main)
