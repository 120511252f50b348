"""Tables and figures from runs that are there: `python -m scripts.bench.stability_report FILE... --out DIR`.

Makes no run. Without files: the published ones, docs/measurements/stability/**/*.parquet. Prints every
table of docs/measurements/stability.md.

methods.png      accuracy over the steps at the largest lag
predictors.png   accuracy, ESS ratio, KL and gradient norm: synchronous, TIS and VCPO at the largest lag (the paper's)
tables.md        all tables
"""

import sys
from pathlib import Path

from recipe.command_line import OneLineParser, run_command
from scripts.bench.stability.report import make_report, read_curves, show, write

PUBLISHED = Path("docs/measurements/stability")


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="*.parquet, by scripts.bench.stability")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures and tables.md there")
    arguments = parser.parse_args(argv)
    files = arguments.files or sorted(PUBLISHED.rglob("*.parquet"))
    if not files:
        parser.error(f"no file in {PUBLISHED}: run this in the repository's root, or name the files")
    try:
        curves = read_curves(files)
        report = make_report(curves, int(curves["step"].max()))
    except ValueError as error:
        print(f"stability_report: {error}", file=sys.stderr)
        return 2
    show(report)
    if arguments.out:
        for file in write(report, curves, arguments.out):
            print(file)
    return 0


if __name__ == "__main__":
    run_command(main)
