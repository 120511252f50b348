"""What a VCPO update costs beside a plain one: `python -m scripts.bench.step_overhead [--json]`.

The same mini-batch through verl's own packed update (GRPO), the packed VCPO update in each of its forms, and one
backward per sequence, on the real Megatron actor. Methods take turns; times are medians of ratios to the plain update
of the same round. One CPU process is timed by its processor time, which other programs on the machine don't take; more
processes by the clock.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from scripts.bench.layout_run import make_checkpoint, run_processes

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"enable": False},
    "packed, gradients": {"packed_keep": "gradients"},
    "packed, activations": {"packed_keep": "activations"},
    "packed, two backward passes": {"packed_keep": "nothing"},
    "per trajectory": {"gradient_norms": "per_trajectory"},
}

SLOW = ("packed, two backward passes", "per trajectory")
"""Measured in a third of the rounds: their ratios need no second digit."""

_STEPS_OF_A_ROUND_S = 600.0
"""A round that takes longer hangs."""


@dataclass(frozen=True)
class Case:
    """A model and a mini-batch."""

    model: str
    shortest: int
    longest: int
    groups: int
    group_size: int
    tp: int = 1
    micro_batch_tokens: int = 8192

    @property
    def name(self) -> str:
        return f"{self.model}, {self.shortest}-{self.longest} tokens" + (f", TP{self.tp}" if self.tp > 1 else "")

    @property
    def vocabulary(self) -> int:
        return int(MODELS[self.model]["vocab_size"])


def _shape(hidden: int, intermediate: int, layers: int, vocabulary: int) -> dict[str, int]:
    return dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        vocab_size=vocabulary,
        eos_token_id=vocabulary - 2,
        pad_token_id=vocabulary - 1,
        max_position_embeddings=4096,
    )


MODELS = {"d512": _shape(512, 1408, 4, 4096), "d1024": _shape(1024, 2816, 2, 4096)}

CASES = [
    Case(model, shortest, longest, groups, group_size, tp)
    for model in MODELS
    for shortest, longest, groups, group_size in ((64, 256, 2, 8), (256, 1024, 2, 4), (2048, 2048, 2, 2))
    for tp in (1, 2)
]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The row of one case: per method {seconds, ratio, peak_bytes, parts}."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint("untied", Path(folder), **MODELS[case.model])
        arguments, limit_s = (case, rounds, checkpoint), (rounds + 5) * _STEPS_OF_A_ROUND_S  # 5: warm-up, parts, peaks
        run_processes(case.name, case.tp, "scripts.bench.step_worker", arguments, Path(folder), limit_s)
        return {"case": asdict(case), "methods": torch.load(Path(folder) / "result", weights_only=True)}


def print_table(row: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "case", "method", "s/step", "time", "peak memory", "forward", "norms, sums", "accum.", "optimizer", "rest"
    )
    plain = row["methods"]["plain"]
    for name, result in row["methods"].items():
        total = sum(result["parts"].values())
        parts = ("forward", "norms and sums", "accumulation", "optimizer", "backward and rest")
        table.add_row(
            Case(**row["case"]).name,
            name,
            f"{result['seconds']:.2f}",
            f"{result['ratio']:.2f}",
            f"{result['peak_bytes'] / plain['peak_bytes']:.2f}",
            *(f"{result['parts'][part] / total:.0%}" for part in parts),
        )
    Console(width=150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--tp", type=int, choices=(1, 2), help="tensor-parallel processes; default: both")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of every method")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    cases = [case for case in CASES if (arguments.only or "") in case.name and arguments.tp in (None, case.tp)]
    if not cases or arguments.rounds < 1:
        parser.error(f"no such case, or no rounds; cases: {'; '.join(case.name for case in CASES)}")
    rows = []
    for case in tqdm(cases, file=sys.stderr):
        rows.append(measure(case, arguments.rounds))
        print_table(rows[-1])  # what is measured is seen, whatever becomes of the next case
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
