"""Show runs: `python -m scripts.report RUN... [--out DIR]`, or while they go on: `--live RUN...`.

A run is the folder (run_dir) that it wrote: metrics.jsonl and config.yaml are enough, so that a run that is still
going, or was interrupted, is shown as far as it got. Writes table.md, table.csv, figure.png and report.html into
--out, and prints the table and a sentence that says what came out. report.html is interactive, begins with that
sentence, and needs no other file and no network (5 MB: plotly.js).
--live writes nothing: it serves that page to a browser on this machine, and the page follows the runs.
"""

import sys
from pathlib import Path

from recipe.command_line import OneLineParser, run_command, whole_number
from scripts.report import figure, page, payload, table
from scripts.report.outcome import outcome
from scripts.report.runs import RunError, read_run

_LAST_PORT = 65535


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 2 where a folder holds no run."""
    parser = OneLineParser(prog="python -m scripts.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--out", type=Path, help="folder to write into (default: the run's own, where there is one run)"
    )
    parser.add_argument("--live", action="store_true", help="serve the page instead, and follow the runs")
    parser.add_argument(
        "--port", type=whole_number(0), help="serve --live on this port, as for `ssh -L` (default: a free one)"
    )
    arguments = parser.parse_args(argv)
    if (arguments.port or 0) > _LAST_PORT:
        parser.error(f"--port {arguments.port}: give {_LAST_PORT} or less")
    if arguments.live and arguments.out:
        parser.error("--out: --live writes no files; leave one of them out")
    if arguments.live:
        from scripts.report import live

        return live.serve(arguments.runs, arguments.port or 0)
    if arguments.port is not None:
        parser.error("--port: is for --live, which serves the page; add --live, or leave --port out")
    if len(arguments.runs) > 1 and arguments.out is None:
        print("error: --out: name the folder that gets the files for these runs", file=sys.stderr)
        return 2
    out: Path = arguments.out or arguments.runs[0]
    try:
        runs = [read_run(folder) for folder in arguments.runs]
        out.mkdir(parents=True, exist_ok=True)
        rows = table.make_table(runs)
        table.write(rows, out)
        picture = figure.draw(runs, out / "figure.png")
        page.write(payload.make(runs), out / "report.html")
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or out}: {error.strerror}", file=sys.stderr)
        return 2
    table.show(rows)
    print(outcome(runs))
    print(f"Figure: {picture}\nTable: {out / 'table.md'}, {out / 'table.csv'}; all in one page: {out / 'report.html'}")
    return 0


if __name__ == "__main__":
    run_command(main)
