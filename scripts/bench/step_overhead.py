"""What a VCPO update costs beside a plain one: `python -m scripts.bench.step_overhead [--json]`.

The same mini-batch through verl's own packed update (GRPO), the packed VCPO update in each of its forms, and one
backward per sequence, on the real Megatron actor. Methods take turns; times are medians of ratios to the plain update
of the same round. One CPU process is timed by its processor time, which other programs on the machine don't take; more
processes, and a GPU, by the clock. Norms are checked against those of one backward per sequence, gradients against a
plain packed step with the same coefficients; exits with 1 where they differ by more than rounding.

Where there is a GPU it is measured, on the shapes of Qwen2.5-1.5B and 7B: with as many layers as fit.
"""

import argparse
import json
import sys
from typing import Any

import torch
from tqdm import tqdm

from scripts.bench.cost.steps import PLAIN, Case, cpu_cases, exact, gpu_cases, measure


def print_table(row: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("case", "method", "s/step", "time", "peak", "forward", "norms, sums", "accum.", "optimizer", "rest")
    table = Table(*columns, "norms' error", "gradient's", title=f"{row['case']['layers']} layers")
    plain = row["methods"][PLAIN]
    for name, result in row["methods"].items():
        total = sum(result["parts"].values())
        parts = ("forward", "norms and sums", "accumulation", "optimizer", "backward and rest")
        errors = [f"{error:.0e}" for error in result["errors"].values()] if "errors" in result else ["", ""]
        table.add_row(
            Case(**row["case"]).name,
            name,
            f"{result['seconds']:.2f}",
            f"{result['ratio']:.2f}",
            f"{result['peak_bytes'] / plain['peak_bytes']:.2f}",
            *(f"{result['parts'][part] / total:.0%}" for part in parts),
            *errors,
        )
    Console(width=170).print(table)


def main() -> int:
    on_gpu = torch.cuda.is_available()
    cases = cpu_cases()
    if on_gpu:
        cases = gpu_cases(torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--tp", type=int, choices=(1, 2), help="tensor-parallel processes; default: both")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of every method")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    chosen = [case for case in cases if (arguments.only or "") in case.name and arguments.tp in (None, case.tp)]
    if not chosen or arguments.rounds < 1:
        parser.error(f"no such case, or no rounds; cases: {'; '.join(case.name for case in cases)}")
    rows = []
    for row in tqdm(measure(chosen, arguments.rounds), total=len(chosen), file=sys.stderr):
        rows.append(row)
        print_table(row)  # what is measured is seen, whatever becomes of the next case
    if arguments.json:
        device = torch.cuda.get_device_name() if on_gpu else "CPU, one thread per process"
        print(json.dumps({"device": device, "torch": torch.__version__, "rounds": arguments.rounds, "rows": rows}))
    return 0 if all(map(exact, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
