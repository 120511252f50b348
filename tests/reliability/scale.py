"""The control loop at the paper's scale, without GPUs: `python -m tests.reliability.scale [--only TEXT] [--json]`.

The layouts of the launch scripts, up to 66,048 trajectories in flight, run through the real feeding code, replay
buffer, TransferQueue, agent-loop and reward workers, load balancer, servers' gates and keeper. Stand-ins: engines that
only count tokens by a clock, and an update that is a pause. The table has for each layout: processor seconds of the
driver for a step; seconds of the longest poll, of a weight update, of submitting late prompts again (with stopped
samplers, and while the agent-loop workers, which share the two cores with all others, are busy), and until the workers
have begun these prompts; samplers that were declared dead although none died; runs that hung. Responses are short,
except in the last row, which no script has: 16,384 a step, each of 8,192 tokens. Then come the seconds of a poll with
140,000 keys in TransferQueue, ours and verl's. A layout takes two to six minutes on 2 cores, and up to 16 GiB.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command, whole_number
from tests.kit.small_run import make_assets
from tests.reliability import scale_layouts as scale

_COLUMNS = {
    "script": "launch script",
    "in_flight": "in flight",
    "trajectories_per_step": "a step",
    "submit_s": "submit k batches, s",
    "step_s": "step, s",
    "driver_s_per_step": "driver, processor s",
    "poll_s": "longest poll, s",
    "update_s": "weight update, s",
    "reissued": "prompts again",
    "reissue_s": "in s",
    "begun_again_s": "begun, s",
    "reissue_busy_s": "while busy, s",
    "trajectories_per_s": "trajectories/s",
    "declared_dead": "declared dead",
    "hung": "hung",
}


def print_table(results: list[scale.ScaleResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*_COLUMNS.values())
    for result in results:
        values = [getattr(result, name) for name in _COLUMNS]
        table.add_row(*[f"{v:.2f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v for v in values])
    Console(width=180).print(table)


def summary(results: list[scale.ScaleResult]) -> dict[str, Any]:
    """Return the counts over all layouts, the longest times, and the rows."""
    counts = {name: sum(getattr(result, name) for result in results) for name in ("declared_dead", "hung")}
    times = ("driver_s_per_step", "reissue_s")
    longest = {name: max(getattr(result, name) for result in results) for name in times}
    return {"layouts": len(results), **counts, **longest, "rows": [asdict(result) for result in results]}


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains TEXT")
    parser.add_argument(
        "--steps", type=whole_number(1), default=4, help="make this number of steps with each launch script (default 4)"
    )
    parser.add_argument(
        "--keys", type=whole_number(1), default=140_000, help="poll this number of keys (default 140,000)"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    cases = [(scale.read_layout(script), scale.Responses(), arguments.steps) for script in scale.launch_scripts()]
    cases = [case for case in [*cases, (scale.LONG, scale.LONG_RESPONSES, 1)] if arguments.only in case[0].script]
    if not cases:
        parser.error(f"--only {arguments.only}: no such row")
    folder, results = Path(tempfile.mkdtemp(prefix="vcpo-scale-")), []
    assets = make_assets(folder, train=max(layout.batch_size for layout, _, _ in cases))
    for i, (layout, responses, steps) in enumerate(tqdm(cases, desc="layouts")):
        overrides = scale.settings(layout, assets, folder / f"run{i}", steps, responses)
        results.append(scale.run(layout, overrides, folder / f"{i}.json", responses))
        tqdm.write(f"{results[-1]}", file=sys.stderr)
    print_table(results)
    from tests.reliability import scale_polls

    polls = scale_polls.measure(arguments.keys)
    listing = f"verl's, which lists them, {polls['poll_by_listing_s']:.3f} s"
    print(f"a poll with {arguments.keys:,} keys: {polls['poll_s']:.3f} s; {listing}")
    failed = any(result.hung or result.declared_dead for result in results)
    if not failed:
        shutil.rmtree(folder)
    if arguments.json:
        print(json.dumps({**summary(results), **polls}))
    return int(failed)


if __name__ == "__main__":
    run_command(main)
