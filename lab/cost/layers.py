"""Per-sequence norms and sums of one linear layer, beside its plain weight gradient, on a CPU or a GPU.

    python -m lab.cost.layers [--device cuda] [--dtype bfloat16] [--json]

Needs torch alone. Every form is checked against one float64 product per sequence before it is timed; exits with 1 where
norms differ by more than 1e-5 (float32) or 1e-2 (bfloat16). Forms take turns; times are medians of ratios to the plain
product of the same round. A layer's whole step, forward and input gradient included, takes about three plain products.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe.command_line import OneLineParser, run_command, whole_number
from vcpo.gradnorm import Segments, WeightedSums, squared_norms

# (in, out) of the linear layers of Qwen2.5-1.5B and -7B, and of a model for a CPU
MODELS = {
    "d512": {"qkv": (512, 768), "o": (512, 512), "fc1": (512, 2816), "fc2": (1408, 512)},
    "Qwen2.5-1.5B": {"qkv": (1536, 2048), "o": (1536, 1536), "fc1": (1536, 17920), "fc2": (8960, 1536)},
    "Qwen2.5-7B": {"qkv": (3584, 4608), "o": (3584, 3584), "fc1": (3584, 37888), "fc2": (18944, 3584)},
}
LENGTHS = {"64-256": (64, 256, 16), "256-1024": (256, 1024, 8), "2048": (2048, 2048, 4)}
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()  # other programs on the machine don't take it


def _forms(x: Tensor, dy: Tensor, segments: Segments) -> dict[str, Callable[[], Tensor | None]]:
    shape = dy.shape[1], x.shape[1]
    main, second = torch.zeros(2, *shape, device=x.device).unbind()
    of_rewards = [float(i % 2) for i in range(len(segments))]  # two values, as most rewards have
    sums = WeightedSums(segments, [of_rewards, [1.0] * len(segments)])

    def plain() -> None:
        main.add_(dy.T @ x)

    def norms_and_two_sums() -> Tensor:
        norms = torch.zeros(len(segments), device=x.device)
        sums.add(x, dy, [main, second], norms)
        return norms

    return {
        "plain": plain,
        "norms and two sums": norms_and_two_sums,
        "norms": lambda: squared_norms(x, dy, segments),
    }


def _expected(x: Tensor, dy: Tensor, segments: Segments) -> Tensor:
    parts = zip(x.double().split(segments.lengths), dy.double().split(segments.lengths), strict=True)
    return torch.stack([(b.T @ a).square().sum() for a, b in parts])


def measure(
    model: str, lengths: str, layer: str, device: torch.device, dtype: torch.dtype, rounds: int
) -> dict[str, Any]:
    """The row of one layer: error of the norms and time relative to the plain product, by form."""
    generator = torch.Generator(device).manual_seed(0)
    low, high, sequences = LENGTHS[lengths]
    picked = torch.randint(low, high + 1, (sequences,), generator=torch.Generator().manual_seed(0)).tolist()
    segments = Segments.of_lengths(picked, device)
    inputs, outputs = MODELS[model][layer]
    x, dy = (torch.randn(sum(picked), d, device=device, generator=generator).to(dtype) for d in (inputs, outputs))
    expected = _expected(x, dy, segments)
    forms = _forms(x, dy, segments)
    errors = {name: ((n / expected) - 1).abs().max().item() for name, f in forms.items() if (n := f()) is not None}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            start = _now(device)
            form()
            seconds[name].append(_now(device) - start)
    ratio = {
        name: statistics.median(a / b for a, b in zip(times, seconds["plain"], strict=True))
        for name, times in seconds.items()
    }
    shape = {"model": model, "lengths": lengths, "layer": layer}
    return {**shape, "plain_s": statistics.median(seconds["plain"]), "errors": errors, "ratio": ratio}


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
    print(f"{'model':14} {'tokens':9} {'layer':5} {'plain ms':>9} {'two sums':>9} {'norms':>9} {'error':>8}")
    for model in arguments.model or ["d512"]:
        for lengths in arguments.lengths or LENGTHS:
            for layer in MODELS[model]:
                row = measure(model, lengths, layer, device, dtype, arguments.rounds)
                rows.append(row)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(run | row) + "\n")
                two, one = row["ratio"]["norms and two sums"], row["ratio"]["norms"]
                error = max(row["errors"].values())
                plain = f"{row['plain_s'] * 1e3:9.2f}"
                print(f"{model:14} {lengths:9} {layer:5} {plain} {two:9.2f} {one:9.2f} {error:8.0e}")
    if arguments.json:
        print(json.dumps({**run, "rows": rows}))
    return 0 if all(max(row["errors"].values()) <= LIMIT[dtype] for row in rows) else 1


if __name__ == "__main__":
    run_command(main)
