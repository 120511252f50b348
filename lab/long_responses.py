"""Is the step long enough, and never too long, where responses are long? `python -m lab.long_responses`, two minutes.

Log-weights are made of two parts that are known: arithmetic, a difference at every token, and a lag part. The estimator
of `vcpo.mismatch` gets their sum, and its factor of the learning rate (told) is compared with the right one: the root
of the ESS ratio that the lag part alone has at the same lengths. Told over right should be at most 1.1 and at least
0.7: a step that is too short costs time, and one that is too long costs the control.

`worlds.py` has the cases. Tokens of a response with the same variance are drawn as their sum and their sum of squares,
which is exact for normal ones and thousands of times as fast.
"""

import json
import math
from dataclasses import asdict, dataclass

import torch
from torch import Generator, Tensor

from lab.worlds import PROMPT, Cells, World, worlds
from recipe.command_line import OneLineParser, run_command, whole_number
from vcpo import Mismatch, VCPOConfig, estimate
from vcpo.ess import ess_ratio

MOST, LEAST = 1.1, 0.7
"""The bounds of told / right."""
DRAWS = 32  # of the lag part alone


@dataclass(frozen=True)
class Row:
    """One case: means over the last steps of several runs."""

    case: str
    tokens: int
    right: float
    """The right factor of the learning rate."""
    whole: float
    """The factor of `ess_part=whole`."""
    told: float
    """The factor of `ess_part=lag`."""
    spread: float
    """Standard deviation of the told factor between runs and steps."""

    @property
    def ratio(self) -> float:
        return self.told / self.right

    @property
    def holds(self) -> bool:
        return LEAST <= self.ratio <= MOST


@dataclass(frozen=True)
class Drawn:
    """B sequences, as an engine has them after its forward pass, and the law of the lag part, which nobody measures."""

    log_weight: Tensor
    """[B], NaN for masked sequences."""
    jump: Tensor
    tokens: Tensor
    squares: Tensor
    fresh: Tensor
    """[B, 2], see `vcpo.mismatch.Mismatch.update`."""
    again: Tensor
    """[B, 2, 3], see there."""
    variance: Tensor
    """[B] of the lag part."""


def _sums(variance: Tensor, count: Tensor, generator: Generator) -> Tensor:
    """Sums of `count` normal numbers of this variance whose weights have the mean 1."""
    total = variance * count
    return torch.randn(count.shape, generator=generator, dtype=torch.float64) * total.sqrt() - total / 2


def _chi_squared(degrees: Tensor, generator: Generator) -> Tensor:
    """Wilson and Hilferty's cube from 8 degrees of freedom, sums of squares below."""
    z = torch.randn((*degrees.shape, 8), generator=generator, dtype=torch.float64)
    few = (z.square() * (torch.arange(8) < degrees[..., None])).sum(dim=-1)
    part = 2 / (9 * degrees.clamp(min=1))
    return torch.where(degrees < 8, few, degrees * (1 - part + part.sqrt() * z[..., 0]).clamp(min=0) ** 3)


def draw(world: World, step: int, generator: Generator) -> Drawn:
    """Draw the batch of a step. A cell [B, C] is a run of tokens with one version and one variance."""
    length = world.lengths(step, generator)
    cells = world.cells(step, length)
    count, u = cells.count.double(), world.of_lag(length, cells)
    v, of_lag = cells.arithmetic, _sums(u, count, generator)
    if world.shared_lag:
        total = (u * count).sum(dim=1, keepdim=True)
        of_lag = _sums(total, torch.ones_like(total), generator) * count / length[:, None]
        u = torch.zeros_like(u)
    of_arithmetic = _sums(v, count, generator)
    spread = (v + u) * _chi_squared(count - 1, generator)
    if world.heavy:  # 2 % of the tokens have 90 % of the square
        tails = torch.binomial(count, torch.full_like(count, 0.02), generator=generator)
        rest = count - tails
        of_arithmetic = _sums(45 * v, tails, generator) + _sums(v * 0.1 / 0.98, rest, generator)
        spread = 45 * v * _chi_squared(tails, generator) + (v * 0.1 / 0.98 + u) * _chi_squared(rest - 1, generator)
    if world.shared_arithmetic:
        both = world.shared_arithmetic
        shared = torch.randn(len(length), 1, generator=generator, dtype=torch.float64)
        shared = shared * (both * (v * count).sum(dim=1, keepdim=True)).sqrt() * count / length[:, None]
        of_arithmetic = math.sqrt(1 - both) * of_arithmetic + shared
        spread = spread * (1 - both * v / (v + u))
    sums = of_lag + of_arithmetic
    squares = torch.where(count > 0, spread + sums.square() / count.clamp(min=1), 0.0)
    jump, probability = world.jump
    jumps = torch.zeros(len(length), dtype=torch.float64)
    if jump and step:
        jumps = jump * (torch.rand(len(length), generator=generator) < probability).double()
    fresh = _of_cells(cells.lag == 0, count, squares)
    again = _again(world, cells, squares, generator)
    log_weight = (sums.sum(dim=1) + jumps).masked_fill(world.masked(length), torch.nan)
    total = squares.sum(dim=1)
    if world.jump_tokens > 1:
        jumps, total = torch.zeros_like(jumps), total + jumps.square() / world.jump_tokens
    return Drawn(log_weight, jumps, length, total, fresh, again, world.variance(length, cells))


def _of_cells(chosen: Tensor, *columns: Tensor) -> Tensor:
    """Return [B, columns] sums over the chosen cells of each sequence."""
    return torch.stack([torch.where(chosen, column.double(), 0.0).sum(dim=1) for column in columns], dim=1)


def _again(world: World, cells: Cells, squares: Tensor, generator: Generator) -> Tensor:
    """Tokens of some sequences that samplers compute again, by a pass of `PROMPT`'s error.

    What is computed again has the variance of the step, not of the version that sampled.
    """
    again = torch.zeros(len(squares), 2, 3, dtype=torch.float64)
    if not world.asks(cells.step):
        return again
    count = cells.count
    now = PROMPT * world.now(cells) * _chi_squared(count.double(), generator)
    rows = torch.linspace(0, len(count) - 1, world.asked).long()
    for kind, of_kind in enumerate((cells.lag == 0, cells.lag != 0)):
        again[rows, kind] = _of_cells(cells.asked & of_kind, count, squares, now)[rows]
    return again


def right_factor(world: World, drawn: Drawn, step: int, generator: Generator) -> float:
    """The factor of a batch whose weights are the lag part alone."""
    kept = drawn.log_weight.isfinite()
    variance = drawn.variance[kept]
    part = torch.randn(DRAWS, len(variance), generator=generator, dtype=torch.float64) * variance.sqrt() - variance / 2
    jump, probability = world.jump
    part += jump * (torch.rand(part.shape, generator=generator) < probability)
    return math.sqrt(sum(map(ess_ratio, part)) / DRAWS)


def told(log_weight: Tensor, part: str, lag: float | None) -> float:
    """The factor of the learning rate by [B] log-weights, and the ESS ratio of their lag part where it is known."""
    config = VCPOConfig(baseline="mean", ess_part=part)  # type: ignore[arg-type]  # it takes strings as well
    rewards, group = torch.arange(len(log_weight)) % 2, torch.arange(len(log_weight)) // 8
    return estimate(config, log_weight, rewards, group, lag_ess_ratio=lag).step_size_multiplier


def measure(world: World, runs: int) -> Row:
    """Follow runs of the world; their last steps are compared."""
    found = []
    for seed in range(runs):
        generator, mismatch = torch.Generator().manual_seed(seed), Mismatch()
        for step in range(world.steps + 1):
            drawn = draw(world, step, generator)
            parts = mismatch.update(drawn.log_weight, drawn.jump, drawn.tokens, drawn.squares, drawn.fresh, drawn.again)
            if step > world.steps - world.compared:
                lag = parts.lag if parts else None
                factors = (told(drawn.log_weight, part, lag) for part in ("whole", "lag"))
                found.append((right_factor(world, drawn, step, generator), *factors))
    right, whole, of_lag = torch.tensor(found, dtype=torch.float64).unbind(dim=1)
    means = right.mean().item(), whole.mean().item(), of_lag.mean().item()
    return Row(world.name, world.tokens, *means, of_lag.std().item())


def print_table(rows: list[Row]) -> None:
    """Right, told and both bounds."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"factor of the learning rate; told / right from {LEAST} to {MOST}")
    for column in ("case", "tokens", "right", "whole", "told", "± a step", "told / right", "holds"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        factors = (f"{value:.2f}" for value in (row.right, row.whole, row.told, row.spread, row.ratio))
        table.add_row(row.case, f"{row.tokens:,}", *factors, "yes" if row.holds else "NO")
    Console(width=140).print(table)


def main(argv: list[str] | None = None) -> int:
    """Print the table. Returns the exit code, 0."""
    parser = OneLineParser(prog="python -m lab.long_responses", description=__doc__)
    parser.add_argument("--runs", type=whole_number(1), default=8, help="runs of each case")
    parser.add_argument("--batch", type=whole_number(2), default=256, help="sequences in a batch")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [measure(world, arguments.runs) for world in worlds(arguments.batch) if arguments.only in world.name]
    if arguments.json:
        print(json.dumps([{**asdict(row), "ratio": row.ratio, "holds": row.holds} for row in rows]))
    else:
        print_table(rows)
    return 0


if __name__ == "__main__":
    run_command(main)
