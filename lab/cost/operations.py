"""What packed norms and sums add to an update of a GPU: counted from the operations that the code runs, not measured.

    python -m lab.cost.operations [--json]

One prompt's samples of each published task pass through the real `Collector` on the meta device, at the sizes of one
GPU of the trainer, for which it takes the forms that it takes on a GPU. Every operation counts as the longest of its
bytes at `MEMORY`, its products at `BFLOAT16` or `FLOAT32`, and `LEAST`. A plain forward and backward counts as 6
operations for each parameter and token, 8 where activations are recomputed, at `BFLOAT16`. Not counted: communication,
attention, the optimizer, idle time. Needs no GPU: a few seconds.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from tests.kit.actor import join_processes  # applies the environment first

import torch  # isort: skip
from megatron.core import parallel_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipe.command_line import OneLineParser, run_command, whole_number
from recipe.fully_async_policy.plan.model_shape import KNOWN_SHAPES, ModelShape
from vcpo.gradnorm import Segments
from verl_vcpo.actor.norms.collector import Collector
from verl_vcpo.actor.norms.layout import MicroBatch
from verl_vcpo.actor.norms.settings import NormsHow
from verl_vcpo.actor.norms.sums import Sums, make_room

MEMORY, BFLOAT16, FLOAT32, LEAST = 3e12, 450e12, 50e12, 2.5e-6
"""An H100's: bytes per second, operations per second of large products, seconds of the smallest operation."""
HOST = 6e-6
"""Seconds of the host for each operation."""

_VIEWS = {
    *("view", "t", "transpose", "slice", "select", "expand", "detach", "alias", "unsqueeze", "squeeze", "as_strided"),
    *("permute", "split", "split_with_sizes", "unbind", "_unsafe_view", "lift_fresh", "empty", "new_empty", "squeeze_"),
}


@dataclass(frozen=True)
class Case:
    """One prompt's samples on one tensor-parallel rank, in micro-batches."""

    task: str
    model: str
    """Of `KNOWN_SHAPES`."""
    tp: int
    samples: int
    mean_tokens: int
    """Of a sample; lengths are those of a log-normal distribution's quantiles."""
    micro_batch_tokens: int
    """The most of a micro-batch, if it has several sequences."""
    recomputed: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, in an order without meaning."""
        quantiles = [NormalDist().inv_cdf((i + 0.5) / self.samples) for i in range(self.samples)]
        sizes = [2.0 ** (0.6 * z) for z in quantiles]
        scale = self.mean_tokens * self.samples / sum(sizes)
        lengths = [max(self.tp, round(scale * size / self.tp) * self.tp) for size in sizes]
        return lengths[::2] + lengths[1::2]

    @property
    def micro_batches(self) -> list[list[int]]:
        """The numbers of the samples of each, about equally many tokens in all."""
        lengths = self.lengths
        number = -(-sum(lengths) // self.micro_batch_tokens)
        rows: list[list[int]] = [[] for _ in range(number)]
        for i in sorted(range(self.samples), key=lambda i: -lengths[i]):
            min(rows, key=lambda of_one: sum(lengths[j] for j in of_one)).append(i)
        return [sorted(of_one) for of_one in rows]


CASES = (
    Case("math", "Qwen2.5-7B", 4, 16, 700, 12288),
    Case("countdown", "Qwen2.5-7B", 4, 16, 300, 12288),
    Case("gsm8k", "Qwen2-1.5B", 2, 8, 400, 12288),
    Case("multi-turn", "Qwen2.5-7B", 2, 16, 4000, 16384, recomputed=True),
)
"""The published sizes; how long responses are is our assumption."""


class Operations(TorchDispatchMode):
    """Counts the operations of a block that a GPU would launch."""

    launches: int = 0
    seconds: float = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_meta]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_meta]
        if name in _VIEWS or not inputs + outputs:
            return out
        written = [x for x in outputs if not any(x is y for y in inputs)]
        moved = sum(x.numel() * x.element_size() for x in inputs + written)
        if name in ("index", "index_select", "masked_fill_", "index_put_", "_to_copy"):
            moved = 2 * sum(x.numel() * x.element_size() for x in outputs[:1])
        flops, rate = 0.0, BFLOAT16
        if name in ("mm", "bmm", "addmm", "addmm_"):
            a, b = inputs[-2:]
            flops = 2.0 * a.numel() * b.shape[-1]
            rate = BFLOAT16 if a.element_size() == 2 else FLOAT32
        self.launches += 1
        self.seconds += max(moved / MEMORY, flops / rate, LEAST)
        return out


@dataclass(frozen=True)
class Count:
    """Of all micro-batches of a case."""

    case: Case
    how: NormsHow
    rewards: int
    """How many values the rewards of the prompt have."""
    micro_batches: int
    plain_s: float
    """Forward and backward without norms and sums."""
    added_s: float
    launches: float
    """The collector's, for a micro-batch."""

    @property
    def added(self) -> float:
        """Relative to a plain forward and backward."""
        return self.added_s / self.plain_s

    @property
    def host(self) -> float:
        """The host's seconds for the collector's launches, relative to the seconds of the device."""
        return self.launches * self.micro_batches * HOST / (self.plain_s + self.added_s)


class _Rank:
    """The parameters of one tensor-parallel rank."""

    def __init__(self, shape: ModelShape, tp: int) -> None:
        h, qkv, inner = shape.hidden, (shape.queries + 2 * shape.keys) // tp, shape.intermediate // tp
        layer = [(qkv, h), (h, shape.queries // tp), (2 * inner, h), (h, inner)]
        self.tied = shape.tied
        self.linear = [_parameter(*size) for _ in range(shape.layers) for size in layer]
        self.head = _parameter(shape.vocabulary // tp, h)
        self.embedding = self.head if shape.tied else _parameter(shape.vocabulary // tp, h)
        norms, biases = 2 * shape.layers + 1, shape.layers * shape.qkv_bias
        self.vectors = [_parameter(h) for _ in range(norms)] + [_parameter(qkv) for _ in range(biases)]
        tables = [self.head] if self.tied else [self.head, self.embedding]
        self.parameters = torch.nn.ParameterList([*self.linear, *tables, *self.vectors])
        sizes = [parameter.numel() for parameter in self.parameters]
        of_all = torch.empty(sum(sizes), device="meta")  # as Megatron's: one buffer of all gradients
        for parameter, part in zip(self.parameters, of_all.split(sizes), strict=True):
            parameter.main_grad = part.view_as(parameter)

    def backward(self, collector: Collector) -> None:
        """What the modules of this rank give to the collector in a backward."""
        token = collector.current().token
        collector.linear(self.head, None, *_activations(token, self.head), head=True)
        for weight in self.linear:
            collector.linear(weight, None, *_activations(token, weight))
        for vector in self.vectors:
            collector.vector(vector, _activation(token, len(vector)))
        collector.embedding(self.embedding, token[None].T, _activation(token, self.embedding.shape[1]))

    def plain_backward(self, token: Tensor) -> None:
        """The products that a plain backward has in place of these."""
        for weight in [self.head, *self.linear]:
            x, dy = _activations(token, weight)
            weight.main_grad.add_(dy[:, 0].T @ x[:, 0])  # type: ignore[attr-defined]


def _parameter(*size: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*size, device="meta", dtype=torch.bfloat16))


def _activation(token: Tensor, width: int) -> Tensor:
    return torch.empty(len(token), 1, width, device="meta", dtype=torch.bfloat16)


def _activations(token: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _activation(token, weight.shape[1]), _activation(token, weight.shape[0])


def join_alone(folder: Path) -> None:
    """Megatron's parallel state, of this process alone."""
    join_processes(0, 1, folder)
    parallel_state.initialize_model_parallel()


@torch.no_grad()
def count(case: Case, how: NormsHow, rewards: int = 2) -> Count:
    """What a prompt's samples add, all in one pass. After `join_alone`."""
    shape = KNOWN_SHAPES[case.model]
    rank = _Rank(shape, case.tp)
    sums = None
    if how is NormsHow.PACKED:
        coefficient = torch.stack([torch.arange(case.samples) * rewards // case.samples, torch.ones(case.samples)])
        second: dict[Tensor, Tensor] = {}
        make_room(second, [rank.parameters], 1)
        sums = Sums(coefficient, torch.zeros(case.samples, dtype=torch.long), second)
    collector = Collector(case.samples, tied=shape.tied, device="meta", sums=sums)
    micro_batches = [_micro_batch(rows, [case.lengths[i] for i in rows]) for rows in case.micro_batches]
    with Operations() as plain:
        for micro_batch in micro_batches:
            rank.plain_backward(micro_batch.token)
    with Operations() as taken:
        for micro_batch in micro_batches:
            collector.micro_batch = micro_batch
            rank.backward(collector)
        collector.squared_norms()
        if sums is not None:
            sums.subtract([0.5])
    operations = (8 if case.recomputed else 6) * shape.parameters / case.tp * sum(case.lengths)
    # without sums a forward and a backward of inputs' gradients alone come first
    first = 0.0 if sums is not None else operations - 2 * shape.parameters / case.tp * sum(case.lengths)
    number = len(micro_batches)
    return Count(
        case,
        how,
        rewards,
        micro_batches=number,
        plain_s=operations / BFLOAT16,
        added_s=taken.seconds - (plain.seconds if sums is not None else 0.0) + first / BFLOAT16,
        launches=taken.launches / number,
    )


def _micro_batch(numbers: list[int], lengths: list[int]) -> MicroBatch:
    device = torch.device("meta")
    segments = Segments.of_lengths(lengths, device)
    token = torch.empty(sum(lengths), dtype=torch.long, device=device)
    return MicroBatch(tuple(numbers), segments, segments, None, segments.sequence[:, None], token)


def print_table(rows: list[Count]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "tokens", "micro-batches", "how", "plain ms", "added", "launches", "host")
    for row in rows:
        tokens = f"{row.case.samples} of {row.case.mean_tokens}"
        values = (f"{row.plain_s * 1e3:.0f}", f"{row.added:+.0%}", f"{row.launches:,.0f}", f"{row.host:.0%}")
        table.add_row(row.case.task, tokens, str(row.micro_batches), row.how.value, *values)
    Console(width=110).print(table)
    print("added: device time, relative to a plain forward and backward. launches: the collector's in a micro-batch;")
    print("host: the host's time for them, relative to the device's. Counted operations, not measured times.")


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--rewards", type=whole_number(1), default=2, help="values that a prompt's rewards have (2)")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        join_alone(Path(folder))
        ways = (NormsHow.PACKED, NormsHow.TWO_BACKWARDS)
        rows = [count(case, how, arguments.rewards) for case in CASES for how in ways]
    print_table(rows)
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) | {"added": row.added, "host": row.host} for row in rows]}))
    return 0


if __name__ == "__main__":
    run_command(main)
