"""The time that norms and sums of a linear layer take: operations and bytes, divided by the rates of a kind of device.

The rates are constants, not measured when a run starts. So every run of a seed chooses the same forms and adds numbers
in the same order. Only ratios of rates matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

TILE = 64
"""The tokens of a tile: a CPU forms a long sequence's Gram matrices in tiles on and right of the diagonal only."""

_FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Rates:
    """The speed of one kind of device."""

    operations: float
    """Operations per second in products of many tokens."""
    of_one_sequence: float
    """The share of `operations` that products of one sequence's tokens with each other reach."""
    memory: float
    """Bytes per second of data used long ago."""
    nearby: float
    """Bytes per second of data that the operation before has written."""
    call: float
    """The fixed seconds of each sequence, in each layer and form."""
    own_call: float
    """The fixed seconds of a sequence that has a product of its own, where others share one."""
    symmetric: bool
    """True: only half of a long sequence's symmetric matrices is formed."""


CPU = Rates(95e9, 0.75, memory=25e9, nearby=50e9, call=8e-6, own_call=8e-6, symmetric=True)
"""One thread of the machine that docs/measurements/README.md was measured on (`lab.cost.layers`)."""

GPU_BFLOAT16 = Rates(450e12, 0.75, memory=3e12, nearby=3e12, call=0.0, own_call=15e-6, symmetric=False)
"""An H100's rates in bfloat16: those of large products, and 90 % of the memory's. Estimated, not measured."""

GPU_FLOAT32 = Rates(50e12, 0.75, memory=3e12, nearby=3e12, call=0.0, own_call=15e-6, symmetric=False)
"""An H100's rates in float32 without TF32. Estimated, not measured."""


def rates(device: str, number_bytes: int = _FLOAT32) -> Rates:
    """Return the rates of a kind of device (`cpu`, `cuda`) for products of numbers of this size."""
    if device == "cpu":
        return CPU
    return GPU_FLOAT32 if number_bytes >= _FLOAT32 else GPU_BFLOAT16


def plain(tokens: int, inputs: int, outputs: int, of: Rates) -> float:
    """Return the seconds of the packed weight-gradient product of a layer of `inputs` x `outputs`."""
    return 2 * tokens * inputs * outputs / of.operations


def gram(lengths: Sequence[int], inputs: int, outputs: int, of: Rates) -> float:
    """Return the seconds of all sequences' norms, in the Gram form."""
    pairs = sum(_pairs(length, of) for length in lengths)
    operations = 2 * pairs * (inputs + outputs) / (of.operations * of.of_one_sequence)
    return operations + 4 * _FLOAT32 * pairs / of.nearby + len(lengths) * of.call


def _pairs(length: int, of: Rates) -> float:
    """Return the number of pairs of tokens whose products are formed."""
    if not of.symmetric or length < 1.5 * TILE:
        return length * length
    tops = [*list(range(0, length, TILE)), length]
    return sum((end - top) * (length - top) for top, end in pairwise(tops))


def direct(lengths: Sequence[int], inputs: int, outputs: int, of: Rates, number_bytes: int = _FLOAT32) -> float:
    """Return the seconds of all sequences' norms, in the direct form: each gradient is written, and read once."""
    written_and_read = 2 * len(lengths) * inputs * outputs * number_bytes / of.nearby
    return plain(sum(lengths), inputs, outputs, of) + written_and_read + len(lengths) * of.call


def norm(lengths: Sequence[int], inputs: int, outputs: int, of: Rates, number_bytes: int = _FLOAT32) -> float:
    """Return the seconds of all sequences' norms, in the cheaper form."""
    return min(gram(lengths, inputs, outputs, of), direct(lengths, inputs, outputs, of, number_bytes))


def own_product(buffers: int, inputs: int, outputs: int, of: Rates, number_bytes: int = _FLOAT32) -> float:
    """Return the seconds that a sequence's own product takes more than a part of a shared product: the gradient is
    written, read for the norm, and added to each buffer."""
    return (2 * number_bytes + buffers * (number_bytes + 2 * _FLOAT32)) * inputs * outputs / of.memory + of.own_call
