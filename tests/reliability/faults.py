"""Faults injected into the real stack on CPU: `python -m tests.reliability.faults [--only TEXT] [--json]`.

Each fault hits a run of its own (lag 2, a small model) after its third step, or inside the weight update or the
checkpoint that follows; the last fault hits the largest layout of the launch scripts around engines that only count
tokens. Samplers are replaced while the run goes on; any other fault ends the run with one line, and the same command
with trainer.resume_mode=auto goes on. In the end every due prompt has been trained on once, nothing was older than its
bound, no failure became a reward, and no process, shared memory, semaphore, socket or folder is left. A fault takes
about two and a half minutes on 2 cores.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from tests.kit.small_run import make_assets
from tests.reliability import fault_at_scale
from tests.reliability.injected_faults import FAULTS, FaultVerdict, try_fault


def print_table(verdicts: list[FaultVerdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("fault", "lost", "duplicated", "lag > k", "seconds", "")
    for v in verdicts:
        outcome = "ok" if v.ok else v.complaint or "WRONG"
        table.add_row(v.fault, str(v.lost), str(v.duplicated), str(v.lag_violations), f"{v.seconds:.0f}", outcome)
    Console(width=120).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="faults whose name contains TEXT")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    names = [*(fault.name for fault in FAULTS), fault_at_scale.NAME]
    chosen = [name for name in names if (arguments.only or "") in name]
    if not chosen:
        parser.error(f"--only {arguments.only}: no such fault; choose from {'; '.join(names)}")
    folder = Path(tempfile.mkdtemp(prefix="vcpo-faults-"))
    make_assets(folder)
    all_of_them: dict[str, Callable[[], FaultVerdict]] = {
        fault.name: partial(try_fault, fault, folder, folder / f"run{i}") for i, fault in enumerate(FAULTS)
    }
    all_of_them[fault_at_scale.NAME] = partial(fault_at_scale.try_at_scale, folder)
    verdicts = []
    for name in tqdm(chosen, desc="faults"):
        try:
            verdicts.append(all_of_them[name]())
        except RuntimeError as error:
            verdicts.append(FaultVerdict(name, 0, 0, 0, str(error)[-400:], 0.0))
        tqdm.write(f"{verdicts[-1]}", file=sys.stderr)
    print_table(verdicts)
    for disk in folder.glob("*-disk"):
        subprocess.run(["umount", str(disk)], check=True)
    if all(verdict.ok for verdict in verdicts):
        shutil.rmtree(folder)
    else:
        print(f"The runs and their outputs are in {folder}")
    if arguments.json:
        totals = {name: sum(getattr(v, name) for v in verdicts) for name in ("lost", "duplicated", "lag_violations")}
        rows = [asdict(verdict) for verdict in verdicts]
        print(json.dumps({"faults": len(verdicts), **totals, "rows": rows}))
    return 0 if all(verdict.ok for verdict in verdicts) else 1


if __name__ == "__main__":
    run_command(main)
