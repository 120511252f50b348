"""Runs over two Ray nodes, made of this machine: `python -m tests.reliability.nodes [--only TEXT] [--json]`.

Each case is a run of the real stack on CPU with a small model: trainer and samplers on different nodes, equal at lag 0
to the same run on one node, within the bound at lag 2; a node whose raylet is killed, or whose link is cut; a driver
that is killed. After each case nothing of the run is left on either node. The command needs root. A case takes three to
eight minutes on 2 busy cores.
"""

import functools
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from tests.kit.nodes import why_not
from tests.kit.small_run import TrainerRun, make_assets
from tests.reliability.node_runs import CASES, REPEATABLE, NodesVerdict, try_case


def print_table(verdicts: list[NodesVerdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "trainer", "samplers", "steps", "lag", "sync s", "MB", "difference", "outcome", "wrong")
    for v in verdicts:
        difference = "" if v.difference is None else f"{v.difference:.0e}"
        numbers = (str(v.steps), str(v.lag_max), f"{v.weight_sync_s:.2f}", f"{v.network_mb:.0f}", difference)
        table.add_row(
            v.case, v.trainer, " ".join(v.samplers), *numbers, v.outcome, "; ".join(v.complaints) or "nothing"
        )
    Console(width=160).print(table)


def run_on_one_node(assets: Path, run_dir: Path) -> Path:
    """Make the run that runs at lag 0 are compared with, and return its folder."""
    run = TrainerRun(assets, run_dir, *REPEATABLE)
    if run.wait():
        raise RuntimeError(f"the run on one node fails: {run.tail()[-500:]}")
    return run_dir


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    cases = [case for case in CASES if (arguments.only or "") in case.name]
    if not cases:
        parser.error(f"--only {arguments.only}: no such case; choose from {'; '.join(case.name for case in CASES)}")
    if reason := why_not():
        parser.error(f"this machine cannot be two: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="vcpo-nodes-bench-"))
    assets, verdicts = make_assets(folder), []
    one_node = functools.cache(lambda: run_on_one_node(assets, folder / "one"))
    for i, case in enumerate(tqdm(cases, desc="cases")):
        try:
            verdicts.append(try_case(case, assets, folder / f"run{i}", one_node))
        except RuntimeError as error:
            verdicts.append(NodesVerdict(case.name, complaints=[str(error)[-500:]]))
    print_table(verdicts)
    if all(verdict.ok for verdict in verdicts):
        shutil.rmtree(folder)
    else:
        print(f"The runs and their outputs are in {folder}")
    if arguments.json:
        print(json.dumps({"cases": len(verdicts), "rows": [asdict(verdict) for verdict in verdicts]}))
    return 0 if all(verdict.ok for verdict in verdicts) else 1


if __name__ == "__main__":
    run_command(main)
