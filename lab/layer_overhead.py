"""Per-sequence norms and sums of one linear layer, beside its plain weight gradient, on a CPU or a GPU.

    python -m lab.layer_overhead [--device cuda] [--dtype bfloat16] [--json]

Needs torch alone. Every form is checked against one float64 product per sequence before it is timed; exits with 1 where
norms differ by more than 1e-5 (float32) or 1e-2 (bfloat16). Forms take turns; times are medians of ratios to the plain
product of the same round. A layer's whole step, forward and input gradient included, takes about three plain products.
"""

import json
from pathlib import Path

import torch

from lab.cost.layers import LENGTHS, LIMIT, MODELS, measure
from recipe.command_line import OneLineParser, run_command, whole_number


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--model", choices=MODELS, action="append", help="may be repeated; default: d512")
    parser.add_argument("--lengths", choices=LENGTHS, action="append", help="in tokens; may be repeated; default: all")
    parser.add_argument("--rounds", type=whole_number(1), default=10)
    parser.add_argument("--out", type=Path, metavar="FILE", help="add a JSON line for each layer once it is measured")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, 1 thread"
    run = {"device": name, "torch": torch.__version__, "dtype": arguments.dtype}
    rows = []
    print(
        f"{'model':14} {'tokens':9} {'layer':5} {'norms':7} {'plain ms':>9} {'two sums':>9} {'one sum':>9} {'error':>8}"
    )
    for model in arguments.model or ["d512"]:
        for lengths in arguments.lengths or LENGTHS:
            for layer in MODELS[model]:
                row = measure(model, lengths, layer, device, dtype, arguments.rounds)
                rows.append(row)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(run | row) + "\n")
                two, one = row["ratio"]["norms and two sums"], row["ratio"]["norms, then one sum"]
                error = max(row["errors"].values())
                plain = f"{row['plain_s'] * 1e3:9.2f}"
                print(f"{model:14} {lengths:9} {layer:5} {row['form']:7} {plain} {two:9.2f} {one:9.2f} {error:8.0e}")
    if arguments.json:
        print(json.dumps({**run, "rows": rows}))
    return 0 if all(max(row["errors"].values()) <= LIMIT[dtype] for row in rows) else 1


if __name__ == "__main__":
    run_command(main)
