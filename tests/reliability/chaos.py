"""An hour of chaos: `python -m tests.reliability.chaos [--seed N] [--minutes M] [--out FOLDER] [--json]`.

The real stack trains on a CPU (a small model, two samplers, tools, group filtering, a checkpoint every three steps).
Meanwhile its processes are killed and stopped, its files spoilt, its disk filled, its clock set wrong, its rewards made
to fail and its weights held up. After each end the same run is resumed with another lag, batch and learning rate. The
seed decides the faults and their order; the moments depend on the machine.

In the end a reader that shares no code with the product counts the mistakes in the files (see chaos_reader.py). Exit
code 0: no mistake, 1 otherwise.
"""

import argparse
import json
import signal
import sys
from datetime import datetime
from pathlib import Path

from recipe.command_line import OneLineParser, positive_number, run_command, whole_number
from recipe.fully_async_policy.launch.processes import sigterm_is_ctrl_c
from tests.reliability.chaos_reader import KINDS, count, lineage, read
from tests.reliability.chaos_run import Hour
from tests.reliability.chaos_watch import LEDGER

_SHOWN = 5


def main() -> int:
    arguments = _arguments()
    folder = arguments.out or Path("outputs", f"chaos-{arguments.seed}-{datetime.now():%Y%m%d-%H%M%S}")
    if not arguments.read:
        folder = folder.absolute()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C
        print(f"Everything of this hour is in {folder}", file=sys.stderr, flush=True)
        with sigterm_is_ctrl_c():
            Hour(folder, arguments.seed, arguments.minutes, lambda text: print(text, file=sys.stderr, flush=True)).run()
    found = count(folder)
    done = _done(folder)
    _print_table(found, done)
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, **done, **{kind: len(lines) for kind, lines in found.items()}}))
    return 1 if any(found.values()) else 0


def _arguments() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--seed", type=whole_number(0), default=1, help="of what is done (default: %(default)s)")
    parser.add_argument("--minutes", type=positive_number, default=60.0, help="default: 60; 10 is a short form")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="new; default: outputs/chaos-SEED-TIME")
    parser.add_argument("--read", action="store_true", help="only count again what is in --out")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON line, last")
    arguments = parser.parse_args()
    if arguments.read and not (arguments.out and arguments.out.is_dir()):
        parser.error("--read: give --out, the folder of an hour")
    if not arguments.read and arguments.out and arguments.out.exists():
        parser.error(f"--out {arguments.out}: is there already; give a new folder")
    return arguments


def _done(folder: Path) -> dict[str, int]:
    """Count the opportunities for mistakes: launches, faults, steps, prompts, programs."""
    steps = lineage(read(folder / LEDGER))
    faults = [fault for fault in read(folder / "faults.jsonl") if fault["target"]]
    return {
        "launches": len(read(folder / "launches.jsonl")),
        "faults": len(faults),
        "kinds of faults": len({fault["fault"] for fault in faults}),
        "steps": max(steps, default=0),
        "steps made": len(read(folder / LEDGER)),
        "prompts": sum(len(line["rows"]) for line in steps.values()),
        "groups filtered": int(sum(line["filtered"] for line in steps.values())),
        "programs": int(sum(line["calls"] for line in steps.values())),
    }


def _print_table(found: dict[str, list[str]], done: dict[str, int]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("mistake", "count", "the first")
    for kind in KINDS:
        shown = [line if len(line) < 300 else f"{line[:150]} ... {line[-150:]}" for line in found[kind][:_SHOWN]]
        table.add_row(kind, str(len(found[kind])), "\n".join(shown))
    Console(width=120).print(", ".join(f"{number} {name}" for name, number in done.items()), table)


if __name__ == "__main__":
    run_command(main)
