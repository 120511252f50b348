"""How much of what training gains is sharpening? `python -m lab.stability.first_policy [--out FILE]`, 2 minutes.

The first policy of each task without any training: greedy, drawn (8 answers to each problem), and how much larger the
gradients of wrong answers are. Beside it the published runs that end above its greedy answers.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from lab.simulator.analysis import LAST, LAST_SAMPLES
from lab.simulator.grid import Folder, GridRun, config_of
from lab.simulator.policy import HEAD
from lab.simulator.simulator import Simulator
from lab.stability.cells import Cell, summarise
from lab.stability.preset import TASKS, BenchTask, prepare
from lab.stability.published import PUBLISHED, read_curves
from lab.stability.report import show_tables
from lab.stability.tables import Table, short
from recipe.command_line import OneLineParser, run_command
from verl_vcpo.common.whole_file import write_whole

TEMPERATURES = (0.5, 0.4, 0.3, 0.2)


def measured(task: BenchTask) -> dict[str, float]:
    """The first policy's accuracies, by how its answers are drawn."""
    simulator = Simulator(config_of(GridRun("vcpo_ess", 0, 1, 1e-4), Folder(Path("unused"), task.preset)))
    drawn, greedy, one_of_eight, _ = simulator.last().values()
    found = {"greedy": greedy, f"one of {LAST_SAMPLES} right": one_of_eight, "drawn": drawn}
    head = simulator.policy.parameters[HEAD].detach()
    for temperature in TEMPERATURES:
        head.div_(temperature)
        found[f"drawn at {temperature:g}"] = simulator.last()[LAST[0]]
        head.mul_(temperature)
    return found


def norms_of_wrong_answers(task: BenchTask) -> float:
    """The mean squared gradient norm of wrong answers over that of right ones, over 100 batches.

    All are drawn by the first policy: the learning rate moves no answer. Every weight is 1, so OPOB of a batch is its
    mean reward weighted by those norms.
    """
    folder = Folder(Path("unused"), task.preset, ("trainer.total_training_steps=100", "trainer.test_freq=-1"))
    _, *steps = Simulator(config_of(GridRun("vcpo_minibatch", 0, 1, 1e-9), folder)).run()
    reward, opob = (statistics.mean(row[name] for row in steps) for name in ("reward", "baseline"))
    return reward / (1 - reward) * (1 - opob) / opob


def of_runs(cells: Sequence[Cell], greedy: float) -> dict[str, str]:
    """How far the runs came by their last tenth: the best cell, and those above the first policy's greedy answers."""
    ends = [[run.final_accuracy for run in cell.runs.values()] for cell in cells]
    runs = [end for cell in ends for end in cell]
    above = f"{sum(end > greedy for end in runs)} of {len(runs)}"
    return {"best cell, last tenth": f"{100 * max(map(statistics.mean, ends)):.1f} %", "runs above greedy": above}


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m lab.stability.first_policy", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, for a spreadsheet")
    arguments = parser.parse_args(argv)
    try:
        curves = read_curves([PUBLISHED / "stability.parquet"])
        for task in TASKS.values():
            prepare(task)
    except ValueError as error:
        print(f"stability.first_policy: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    rows = []
    for task in TASKS.values():
        found = measured(task)
        shown = {name: f"{100 * value:.1f} %" for name, value in found.items()}
        published = of_runs(summarise(curves[task.preset], 300), found["greedy"])
        shown["squared gradient norm, wrong over right"] = f"{norms_of_wrong_answers(task):.1f}"
        rows.append({"task": short(task.preset)} | shown | published)
    show_tables([Table("The first policy, untrained", list(rows[0]), [list(row.values()) for row in rows])])
    if arguments.out:
        write_whole(arguments.out, pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
    return 0


if __name__ == "__main__":
    run_command(main)
