"""What a VCPO update costs beside a plain one: `python -m lab.step_overhead [--json]`.

The same mini-batch through verl's own packed update (GRPO), the packed VCPO update as it is set by default ("auto") and
in each of its forms, and one backward per sequence, on the real Megatron actor: of two groups, of 16 and of 32, and of
a laptop's shape, as `+task=countdown` trains it. Methods take turns; times are medians of ratios to the plain update
of the same round. One CPU process is timed by its processor time, which other programs on the machine don't take; more
processes, and a GPU, by the clock. "work" is the ratio of the processor time of all processes. Norms are checked
against those of one backward per sequence, gradients against a plain packed step with the same coefficients; exits with
1 where they differ by more than rounding, or a case failed.

Where there is a GPU it is measured, on the shapes of Qwen2.5-1.5B and 7B: with as many layers as fit, bfloat16 before
float32, the quickest case first. A case that fails does not end the others.
"""

import importlib.util
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lab.cost.steps import PLAIN, SMALLEST, Case, Checkpoints, cpu_cases, exact, gpu_cases, measure
from recipe.command_line import OneLineParser, run_command, whole_number


def print_table(row: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    times = ("s/step", "time", "work", "peak", "forward", "norms, sums", "accum.", "optimizer", "rest")
    table = Table("case", "method", *times, "norms' error", "gradient's", title=f"{row['case']['layers']} layers")
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
            f"{result['processor_ratio']:.2f}",
            f"{result['peak_bytes'] / plain['peak_bytes']:.2f}" if "peak_bytes" in result else "",
            *(f"{result['parts'][part] / total:.0%}" for part in parts),
            *errors,
        )
    Console(width=180).print(table)


def device_and_torch() -> dict[str, str]:
    """What the numbers of a row are of."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, one thread per process"
    return {"device": device, "torch": torch.__version__}


def measure_all(
    cases: list[Case], rounds: int, out: Path | None, minutes: float, quick: bool = False
) -> tuple[list[dict[str, Any]], int]:
    """The rows, and the number of cases that failed or had no time left; each row is in `out` once it is measured."""
    end, rows, failed = time.monotonic() + 60 * minutes, [], 0
    with tempfile.TemporaryDirectory() as root:
        checkpoints = Checkpoints(Path(root))
        for case in tqdm(cases, file=sys.stderr):
            left = end - time.monotonic()
            try:
                if left <= 0:
                    raise RuntimeError(f"{case.name!r}: not begun, --minutes={minutes:g} are over")
                row = measure(case, rounds, checkpoints, left, quick)
            except RuntimeError as error:
                failed += 1
                tqdm.write(f"error: {error}", file=sys.stderr)
                continue
            rows.append(row)
            print_table(row)  # what is measured is seen, and kept, whatever becomes of the next case
            if out:
                with out.open("a") as file:
                    file.write(json.dumps({**device_and_torch(), **row}) + "\n")
    return rows, failed


def main() -> int:
    on_gpu = torch.cuda.is_available()
    cases = cpu_cases()
    if on_gpu:
        has_te = importlib.util.find_spec("transformer_engine") is not None
        cases = gpu_cases(torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory, has_te)
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: both, where there is a GPU")
    parser.add_argument(
        "--layers",
        choices=("local", "te"),
        help="Megatron's own, or Transformer Engine's, of which a CPU runs the Python alone; default: on a GPU both, "
        "where Transformer Engine is installed, on a CPU Megatron's",
    )
    parser.add_argument("--tp", type=int, choices=(1, 2), help="tensor-parallel processes; default: both")
    parser.add_argument("--smallest", action="store_true", help="one case only, of one small layer")
    parser.add_argument("--quick", action="store_true", help="the plain update and the default alone, not checked")
    parser.add_argument("--rounds", type=whole_number(1), default=10, help="timed steps of every method")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no case begins later, or goes on longer")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add a JSON line for each case once it is measured")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    if arguments.smallest:
        cases = [SMALLEST]
    if arguments.layers and (arguments.smallest or not on_gpu):
        cases = [replace(case, layers_of=arguments.layers) for case in cases]
    chosen = [
        case
        for case in cases
        if (arguments.only or "") in case.name
        and arguments.tp in (None, case.tp)
        and arguments.dtype in (None, case.dtype)
        and arguments.layers in (None, case.layers_of)
    ]
    if not chosen:
        parser.error(f"no such case; cases: {'; '.join(case.name for case in cases)}")
    rows, failed = measure_all(chosen, arguments.rounds, arguments.out, arguments.minutes, arguments.quick)
    if arguments.json:
        print(json.dumps({**device_and_torch(), "rounds": arguments.rounds, "rows": rows}))
    return 0 if not failed and all(map(exact, rows)) else 1


if __name__ == "__main__":
    run_command(main)
