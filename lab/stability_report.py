"""Tables and figures from runs that are there: `python -m lab.stability_report FILE... --out DIR`.

Makes no run. Without files: the published ones, docs/measurements/stability/*.parquet. Runs of several tasks are
compared task by task.

methods.png      accuracy over the steps at the largest lag, a panel per task
lags.png         points ahead of `vcpo_ess` by lag, a panel per task
predictors.png   accuracy, ESS ratio, KL and gradient norm of the first task: synchronous, TIS and VCPO at the largest
                 lag (the paper's)
tables.md        all tables
"""

import sys
from pathlib import Path

from lab.stability.report import make_report, of_all_tasks, read_curves, show, show_tables, write
from recipe.command_line import OneLineParser, run_command, whole_number

PUBLISHED = Path("docs/measurements/stability")


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="*.parquet, by lab.stability")
    parser.add_argument("--lags", nargs="+", type=whole_number(0), metavar="K", help="only these (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures and tables.md there")
    arguments = parser.parse_args(argv)
    files = arguments.files or sorted(PUBLISHED.glob("*.parquet"))
    if not files:
        parser.error(f"no file in {PUBLISHED}: run this in the repository's root, or name the files")
    try:
        curves = read_curves(files, arguments.lags)
        reports = {task: make_report(of, int(of["step"].max())) for task, of in curves.items()}
    except ValueError as error:
        print(f"stability_report: {error}", file=sys.stderr)
        return 2
    for task, report in reports.items():
        print(f"\n{task}")
        show(report)
    show_tables(of_all_tasks(reports))
    if arguments.out:
        for file in write(reports, arguments.out):
            print(file)
    return 0


if __name__ == "__main__":
    run_command(main)
