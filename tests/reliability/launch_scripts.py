"""Every launch script, executed: `python -m tests.reliability.launch_scripts [--json]`.

The scripts run one after another with CPU=1: the script's own settings with a small model and small sizes through the
real stack, 2 steps. A script takes about two minutes on 2 cores. Exit code 1: a script failed, or exceeded its lag.
"""

import json
import signal
import sys
from dataclasses import asdict

from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from tests.reliability.published_scripts import SHELL, STEPS, ScriptExecution, executions


def print_table(rows: list[ScriptExecution]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("script", "exit code", "steps", "lag", "largest lag", "seconds", "")
    for row in rows:
        values = (str(row.exit_code), str(row.steps), str(row.lag), str(row.max_lag), f"{row.seconds:.0f}")
        table.add_row(row.script, *values, "ok" if row.ok else "WRONG")
    Console(width=110).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="overrides for every script")
    parser.add_argument("--only", metavar="TEXT", default="", help="scripts whose path contains TEXT")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    scripts = [s for s in sorted(SHELL.glob("*/*.sh")) if arguments.only in str(s.relative_to(SHELL))]
    if not scripts:
        parser.error(f"--only {arguments.only}: no such script in {SHELL}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the script that runs, too
    rows = list(tqdm(executions(scripts, arguments.settings), total=len(scripts), desc="scripts", file=sys.stderr))
    print_table(rows)
    if arguments.json:
        print(json.dumps({"steps": STEPS, "scripts": [asdict(row) for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    run_command(main)
