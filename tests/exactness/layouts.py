"""Every parallel layout computes what one process computes: `python -m tests.exactness.layouts [--layers te] [--json]`.

Trains a few VCPO steps (group OPOB, truncation, ESS-scaled AdamW, gradient clipping) on each layout and on one process,
in real gloo processes on CPU, and compares per-sequence squared gradient norms, ESS ratio, baselines and the parameters
at the end. Norms are measured in every way that the layout allows, and compared with one process that makes one
backward per sequence on the same layers. Exits with 1 where a relative error exceeds 1e-5.

Layers are Megatron's own, or with `--layers te` Transformer Engine's, as a GPU would build them, with a stand-in in
plain torch for their kernels (tests/kit/te_on_cpu.py).
"""

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from tests.kit.layout_run import (
    PER_TRAJECTORY,
    PER_TRAJECTORY_MINI_BATCH,
    Method,
    ParallelLayout,
    Result,
    make_checkpoint,
    methods,
    run_layout,
)

LIMIT = 1e-5

_MODELS = ("untied", "tied", "qk_norms", "moe", "lora", "moe_lora")
REFERENCE = {model: ParallelLayout(f"one process, {model}", model=model) for model in _MODELS}

LAYOUTS = [
    ParallelLayout("padded", packed=False),
    ParallelLayout("dynamic batch by tokens", dynamic_batch=True),
    ParallelLayout("activation recompute", recompute=True),
    ParallelLayout("no distributed optimizer", distributed_optimizer=False),
    ParallelLayout("DP2", dp=2),
    ParallelLayout(
        "DP2, dynamic batch, no distributed optimizer", dp=2, dynamic_batch=True, distributed_optimizer=False
    ),
    ParallelLayout("TP2", tp=2),
    ParallelLayout("TP2 SP", tp=2, sequence_parallel=True),
    ParallelLayout("TP2 SP, tied, recompute", model="tied", tp=2, sequence_parallel=True, recompute=True),
    ParallelLayout("TP2 SP, q and k norms", model="qk_norms", tp=2, sequence_parallel=True),
    ParallelLayout("TP2 SP, padded", tp=2, sequence_parallel=True, packed=False),
    ParallelLayout("PP2", pp=2),
    ParallelLayout("PP2, tied", model="tied", pp=2),
    ParallelLayout("PP2, 2 virtual stages", pp=2, vpp=2),
    ParallelLayout("PP2, 2 virtual stages, tied", model="tied", pp=2, vpp=2),
    ParallelLayout("CP2", cp=2),
    ParallelLayout("CP2, tied, padded", model="tied", cp=2, packed=False),
    ParallelLayout("TP2 SP x DP2", tp=2, sequence_parallel=True, dp=2),
    ParallelLayout("TP2 SP x PP2, tied", model="tied", tp=2, sequence_parallel=True, pp=2),
    ParallelLayout("CP2 x DP2", cp=2, dp=2),
    ParallelLayout("MoE EP2 (DP2)", model="moe", dp=2, ep=2),
    ParallelLayout("MoE EP2 inside TP2 SP", model="moe", ep=2, etp=1, tp=2, sequence_parallel=True),
    ParallelLayout("MoE EP2 inside TP2 SP, x DP2", model="moe", dp=2, ep=2, etp=1, tp=2, sequence_parallel=True),
    ParallelLayout("MoE ETP2 (TP2 SP)", model="moe", tp=2, sequence_parallel=True),
    ParallelLayout("MoE EP2 x ETP2 over TP2 SP x DP2", model="moe", ep=2, tp=2, sequence_parallel=True, dp=2),
    ParallelLayout("MoE EP2 x CP2", model="moe", dp=2, ep=2, cp=2),
    ParallelLayout("MoE EP2 x PP2", model="moe", dp=2, ep=2, pp=2),
    ParallelLayout("LoRA, recompute", model="lora", recompute=True),
    ParallelLayout("LoRA, TP2", model="lora", tp=2),
    ParallelLayout("LoRA, TP2 SP x PP2", model="lora", tp=2, sequence_parallel=True, pp=2),
    ParallelLayout("LoRA, CP2 x DP2", model="lora", cp=2, dp=2),
    ParallelLayout("LoRA of attention, MoE EP2", model="moe_lora", dp=2, ep=2),
    ParallelLayout("LoRA of attention, MoE, TP2 SP", model="moe_lora", ep=2, etp=1, tp=2, sequence_parallel=True),
]


@dataclass(frozen=True)
class Comparison:
    """A layout against one process: largest relative errors, and seconds per step."""

    layout: str
    method: str
    processes: int
    norms: float
    ess_ratio: float
    baselines: float
    parameters: float
    step_s: float

    @property
    def ok(self) -> bool:
        # NaN compares false, so it fails
        return all(error <= LIMIT for error in (self.norms, self.ess_ratio, self.baselines, self.parameters))


def compare(layout: ParallelLayout, method: Method, result: Result, reference: Result) -> Comparison:
    """Errors are relative to the value itself; a parameter's to the largest entry of its tensor."""
    missing = reference.parameters.keys() ^ result.parameters.keys()
    if missing:
        raise RuntimeError(f"layout {layout.name!r}: parameters {sorted(missing)} are exported on one side only")
    return Comparison(
        layout=layout.name,
        method=method.name,
        processes=layout.world_size,
        norms=_relative(result.squared_norm, reference.squared_norm),
        ess_ratio=_relative(result.ess_ratio, reference.ess_ratio),
        baselines=_relative(result.baseline, reference.baseline),
        parameters=max(
            ((result.parameters[name] - p).abs().max() / p.abs().max()).item()
            for name, p in reference.parameters.items()
        ),
        step_s=result.step_s,
    )


def _relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value - reference).abs() / reference.abs()).max().item()


def run_reference(model: str, checkpoint: Path, layers: str = "local") -> dict[str, Result]:
    """One process, one backward per sequence: its result for each scope of the baseline."""
    layout = replace(REFERENCE[model], layers=layers)
    results = run_layout(layout, checkpoint, [PER_TRAJECTORY, PER_TRAJECTORY_MINI_BATCH])
    return {method.scope: results[method.name] for method in (PER_TRAJECTORY, PER_TRAJECTORY_MINI_BATCH)}


def compare_all(
    layout: ParallelLayout, checkpoint: Path, reference: dict[str, Result], wanted: list[Method]
) -> list[Comparison]:
    """Those of the methods `wanted` that the layout allows."""
    able = [method for method in methods(layout) if method in wanted]
    results = run_layout(layout, checkpoint, able)
    return [compare(layout, method, results[method.name], reference[method.scope]) for method in able]


def comparisons(layouts: list[ParallelLayout]) -> Iterator[list[Comparison]]:
    """Run each layout, and one process per model that they use, on the same layers.

    All layouts must have the same `layers`: worker processes are forks of one process that has imported one of both.
    """
    with tempfile.TemporaryDirectory() as folder:
        checkpoints: dict[str, Path] = {}
        references: dict[str, dict[str, Result]] = {}
        for layout in layouts:
            if layout.model not in references:
                checkpoints[layout.model] = make_checkpoint(layout.model, Path(folder))
                references[layout.model] = run_reference(layout.model, checkpoints[layout.model], layout.layers)
            try:
                yield compare_all(layout, checkpoints[layout.model], references[layout.model], methods(layout))
            except RuntimeError as error:  # the other layouts are still worth knowing
                tqdm.write(str(error), file=sys.stderr)
                errors = dict.fromkeys(("norms", "ess_ratio", "baselines", "parameters"), math.inf)
                yield [Comparison(layout.name, "", layout.world_size, **errors, step_s=math.nan)]


def print_table(rows: list[Comparison]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("layout", "method", "procs", "norms", "ESS ratio", "baselines", "parameters", "s/step", "")
    for row in rows:
        errors = (f"{e:.1e}" for e in (row.norms, row.ess_ratio, row.baselines, row.parameters))
        table.add_row(
            row.layout, row.method, str(row.processes), *errors, f"{row.step_s:.2f}", "ok" if row.ok else "WRONG"
        )
    Console(width=150).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="layouts whose name contains TEXT")
    parser.add_argument(
        "--layers", choices=["local", "te"], default="local", help="Megatron's, or Transformer Engine's"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    layouts = [replace(x, layers=arguments.layers) for x in LAYOUTS if (arguments.only or "") in x.name]
    if not layouts:
        parser.error(f"--only {arguments.only}: no such layout; choose from {', '.join(x.name for x in LAYOUTS)}")
    progress = tqdm(comparisons(layouts), total=len(layouts), desc="layouts", file=sys.stderr)
    rows = [row for of_layout in progress for row in of_layout]
    print_table(rows)
    if arguments.json:
        print(json.dumps({"limit": LIMIT, "layers": arguments.layers, "layouts": [asdict(row) for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    run_command(main)
