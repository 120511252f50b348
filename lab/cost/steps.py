"""What a VCPO update costs beside a plain one: `python -m lab.cost.steps [--json]`.

The same mini-batch through verl's own packed update (GRPO), VCPO's without norms (vcpo_half_mean), the packed one with
OPOB, the one with a second backward, and one backward per sequence, on the real Megatron actor: of 2 groups, of 16 and
of 32, and of a laptop's shape, as `+task=countdown` trains it. Methods take turns; times are medians of ratios to the
plain update of the same round. One CPU process is timed by its processor time, which other programs don't take; more
processes, and a GPU, by the clock. "work" is the ratio of the processor time of all processes. "units" are
passes over the mini-batch's tokens: 1 for a forward, 2 for a backward, without what norms take. Norms are checked
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command, whole_number
from tests.kit.layout_run import make_checkpoint, run_processes

PLAIN, NO_NORMS, PACKED = "plain", "without norms", "packed"
TWICE, PER_TRAJECTORY = "packed, two backwards", "per trajectory"
PADDED = "packed, padded products"
"""`PACKED` with padded products in the place of the kernel of the Gram form; measured on a GPU alone."""

METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {"enable": False},
    NO_NORMS: {"baseline": "half_mean"},
    PACKED: {},
    TWICE: {"norms": {"how": "two_backwards"}},
    PER_TRAJECTORY: {"norms": {"how": "per_trajectory"}},
}
if torch.cuda.is_available():
    METHODS[PADDED] = {}

SLOW = (PER_TRAJECTORY,)
"""Measured in a third of the rounds: their ratios need no second digit."""

ERROR_LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}
"""Of squared norms and of the whole gradient, relative; or `NOISE_LIMIT`, if that is more."""

TF32_LIMIT = 2e-3
"""The same of float32 on Transformer Engine's layers on a GPU, whose products have the 10 bits of TF32."""

NOISE_LIMIT = 2.0
"""In bfloat16, times what `TWICE` differs by from itself with other micro-batches: as much is rounding."""

_STEPS_OF_A_ROUND_S = 600.0
"""A round that takes longer hangs."""


@dataclass(frozen=True)
class Case:
    """A model and a mini-batch."""

    model: str
    layers: int
    shortest: int
    longest: int
    groups: int
    group_size: int
    tp: int = 1
    dtype: str = "float32"
    micro_batch_tokens: int = 8192
    layers_of: str = "local"
    """Whose layers: Megatron's own (local), or Transformer Engine's (te)."""

    @property
    def name(self) -> str:
        tp, dtype = (f", TP{self.tp}" if self.tp > 1 else ""), ("" if self.dtype == "float32" else f", {self.dtype}")
        groups = f"{self.groups} groups of {self.group_size}"
        layers = "" if self.layers_of == "local" else ", Transformer Engine's layers"
        return f"{self.model}, {self.shortest}-{self.longest} tokens, {groups}{tp}{dtype}{layers}"

    @property
    def vocabulary(self) -> int:
        return int(MODELS[self.model]["vocab_size"])

    @property
    def cost(self) -> float:
        """Of a plain step: operations, nearly, beside those of other cases of the same precision."""
        hidden, width = (MODELS[self.model][name] for name in ("hidden_size", "intermediate_size"))
        weights = self.layers * hidden * (2.5 * hidden + 3 * width) + hidden * self.vocabulary
        return weights * self.groups * self.group_size * (self.shortest + self.longest) / self.tp


def _shape(hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        eos_token_id=vocabulary - 2,
        pad_token_id=vocabulary - 1,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
    )


MODELS = {
    "d128": _shape(128, 512, 4, 2, 512, tied=False),
    "d512": _shape(512, 1408, 8, 2, 4096, tied=False),
    "d1024": _shape(1024, 2816, 16, 4, 4096, tied=False),
    "Qwen2.5-1.5B": _shape(1536, 8960, 12, 2, 151936, tied=True) | {"initializer_range": 0.02},
    "Qwen2.5-7B": _shape(3584, 18944, 28, 4, 152064, tied=False) | {"initializer_range": 0.02},
}
_LENGTHS = ((64, 256), (256, 1024), (2048, 2048))


def cpu_cases() -> list[Case]:
    """Small models, in float32: mini-batches of two groups, of many, and a laptop's of `+task=countdown`."""
    of_two_groups = [
        Case(model, layers, *lengths, groups=2, group_size=size, tp=tp)
        for model, layers in (("d512", 4), ("d1024", 2))
        for lengths, size in zip(_LENGTHS, (8, 4, 2), strict=True)
        for tp in ((1, 2) if model == "d512" else (1,))
    ]
    of_many = [
        Case("d512", 2, *lengths, groups=groups, group_size=size, tp=tp)
        for lengths, size in zip(_LENGTHS[:2], (4, 2), strict=True)
        for groups in (16, 32)
        for tp in (1, 2)
    ]
    return of_two_groups + of_many + [LAPTOP]


LAPTOP = Case("d128", layers=4, shortest=40, longest=80, groups=16, group_size=8)


SMALLEST = Case("d512", layers=1, shortest=20, longest=40, groups=2, group_size=2)
"""Fails within a minute where the stack does not run; a rehearsal on a CPU has no other case."""


def gpu_cases(gpus: int, memory_bytes: int, transformer_engine: bool) -> list[Case]:
    """Real shapes, on one GPU and on two if there are: bfloat16 before float32, the quickest first.

    Args:
        transformer_engine: whether it is installed; each shape is then measured on its layers too.
    """
    cases = [
        Case(
            model,
            layers_that_fit(model, 28, memory_bytes),
            *lengths,
            groups,
            group_size=8,
            tp=tp,
            dtype=dtype,
            layers_of=layers_of,
        )
        for model in ("Qwen2.5-1.5B", "Qwen2.5-7B")
        for dtype in ("bfloat16", "float32")
        for lengths, groups in zip(_LENGTHS, (8, 4, 2), strict=True)
        for tp in (1, 2)
        if tp <= gpus
        for layers_of in (("te", "local") if transformer_engine else ("local",))
    ]
    # float32 attention keeps all its scores: of half as many tokens they take a quarter of the memory
    cases = [replace(case, micro_batch_tokens=4096) if case.dtype == "float32" else case for case in cases]
    return sorted(cases, key=lambda case: (case.dtype, case.cost))


def layers_that_fit(model: str, layers: int, memory_bytes: int) -> int:
    """At most `layers`: weights, gradients, a second buffer and Adam's state may fill a third of the memory.

    The same for both precisions, which then have one checkpoint.
    """
    shape = MODELS[model]
    hidden, heads, kv_heads = (shape[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    attention = hidden * hidden * 2 * (1 + kv_heads / heads)  # q and o; k and v
    of_a_layer = attention + 3 * hidden * shape["intermediate_size"]
    of_embeddings = hidden * shape["vocab_size"] * (1 if shape["tie_word_embeddings"] else 2)
    # two gradients and Adam's two moments in float32; a bfloat16 weight has a float32 copy
    bytes_each = 16 + 6
    return max(1, min(layers, int((memory_bytes / 3 / bytes_each - of_embeddings) / of_a_layer)))


class Checkpoints:
    """The models of the cases, each written once, in a folder that the caller removes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: dict[tuple[str, int], Path] = {}

    def of(self, case: Case) -> Path:
        """The case's model."""
        if (key := (case.model, case.layers)) not in self._written:
            folder, shape = self._root / f"{case.model}-{case.layers}", MODELS[case.model]
            kind = "tied" if shape["tie_word_embeddings"] else "untied"
            # a GPU draws billions of numbers at once
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                self._written[key] = make_checkpoint(kind, folder, num_hidden_layers=case.layers, **shape)
            torch.cuda.empty_cache()
        return self._written[key]


def measure(case: Case, rounds: int, checkpoints: Checkpoints, limit_s: float = math.inf) -> dict[str, Any]:
    """The row of a case: per method {seconds, ratio, units, peak_bytes, errors}, of two backwards also {noise}.

    Raises:
        RuntimeError: the case failed, or has not ended after `limit_s`.
    """
    checkpoint = checkpoints.of(case)
    with tempfile.TemporaryDirectory() as name:
        folder, limit_s = Path(name), min(limit_s, (rounds + 5) * _STEPS_OF_A_ROUND_S)
        stand_in = case.layers_of == "te" and not torch.cuda.is_available()
        worker = f"lab.cost.{'te_step_worker' if stand_in else 'step_worker'}"
        run_processes(case.name, case.tp, worker, (case, rounds, checkpoint), folder, limit_s)
        methods = torch.load(folder / "result", weights_only=True)
    return {**device_and_torch(), "case": asdict(case), "rounds": rounds, "methods": methods}


def exact(row: dict[str, Any]) -> bool:
    """Whether norms and gradients differ from the reference by no more than rounding."""
    dtype, noise = row["case"]["dtype"], row["methods"][TWICE]["noise"]
    tf32 = dtype == "float32" and row["case"]["layers_of"] == "te" and not row["device"].startswith("CPU")
    limits = dict.fromkeys(noise, TF32_LIMIT if tf32 else ERROR_LIMITS[dtype])
    if dtype == "bfloat16":
        limits = {name: max(limit, NOISE_LIMIT * noise[name]) for name, limit in limits.items()}
    errors = [result["errors"] for result in row["methods"].values() if "errors" in result]
    return all(error[name] <= limit for error in errors for name, limit in limits.items())


def print_table(row: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "case",
        "method",
        "units",
        "s/step",
        "time",
        "work",
        "peak",
        "norms' error",
        "gradient's",
        title=f"{row['case']['layers']} layers",
    )
    plain = row["methods"][PLAIN]
    for name, result in row["methods"].items():
        errors = [f"{error:.0e}" for error in result.get("errors", {}).values()]
        table.add_row(
            Case(**row["case"]).name,
            name,
            f"{result['units']:g}",
            f"{result['seconds']:.2f}",
            f"{result['ratio']:.2f}",
            f"{result['processor_ratio']:.2f}",
            f"{result['peak_bytes'] / plain['peak_bytes']:.2f}",
            *errors,
        )
    Console(width=180).print(table)


def device_and_torch() -> dict[str, str]:
    """What the numbers of a row are of."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, one thread per process"
    return {"device": device, "torch": torch.__version__}


def measure_all(cases: list[Case], rounds: int, out: Path | None, minutes: float) -> tuple[list[dict[str, Any]], int]:
    """The rows, and the number of cases that failed or had no time left; each row is in `out` once it is measured."""
    end, rows, failed = time.monotonic() + 60 * minutes, [], 0
    with tempfile.TemporaryDirectory() as root:
        checkpoints = Checkpoints(Path(root))
        for case in tqdm(cases, file=sys.stderr):
            left = end - time.monotonic()
            try:
                if left <= 0:
                    raise RuntimeError(f"{case.name!r}: not begun, --minutes={minutes:g} are over")
                row = measure(case, rounds, checkpoints, left)
            except RuntimeError as error:
                failed += 1
                tqdm.write(f"error: {error}", file=sys.stderr)
                continue
            rows.append(row)
            print_table(row)  # what is measured is seen, and kept, whatever becomes of the next case
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
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
    parser.add_argument("--smallest", action="store_true", help="one case only, of one small layer")
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
        and arguments.dtype in (None, case.dtype)
        and arguments.layers in (None, case.layers_of)
    ]
    if not chosen:
        parser.error(f"no such case; cases: {'; '.join(case.name for case in cases)}")
    rows, failed = measure_all(chosen, arguments.rounds, arguments.out, arguments.minutes)
    if arguments.json:
        print(json.dumps({**device_and_torch(), "rounds": arguments.rounds, "rows": rows}))
    return 0 if not failed and all(map(exact, rows)) else 1


if __name__ == "__main__":
    from lab.cost.steps import main as imported  # the workers know the cases by this name

    run_command(imported)
