"""What is a baseline worth that is estimated from few sequences? `python -m lab.baselines.estimates [--json]`.

1. The variance of the update with three unbiased baselines, from the other sequences of a group of 8 or 64, above the
   variance with the best constant. Beside them the mean reward, if it were known. At four ESS ratios, and for rewards
   that depend on the weight not at all, somewhat and much (the slope of the log odds).
2. How much of the update is left by OPOB of the group itself, which knows each sequence's own reward.

The world is two numbers per sequence: log w is normal with variance -log(rho), so that w has the ESS ratio rho, cut at
`TRUNCATION`; and the reward is 0 or 1, the odds of 1 being e^(slope z) with z the standardised log w. A slope above 0
says that the policy has learned what is rewarded; at 0 the mean reward is the best constant.
Gradients are orthogonal and of one length. Then the variance of an update with a baseline b that does not know the
sequence's own reward is E[a^2 (R - b*)^2] + E[a^2] E[(b - b*)^2], b* being the best constant: the first term is a sum
over a grid of w, and only E[(b - b*)^2] is drawn. Which constant is best is the question of `lab.baselines.variance`.
"""

import itertools
import json
import math
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command, whole_number
from vcpo.baseline import group_sum, leave_one_out, optimal_off_policy

TRUNCATION, BLOCKS = 8.0, 20
INTERVAL = 2.09  # standard errors to each side of a 95 % confidence interval, from 20 blocks
RATIOS, SIZES, SLOPES = (0.95, 0.70, 0.45, 0.25), (8, 64), (0.0, 0.5, 1.0)
_GRID = torch.linspace(-8.0, 8.0, 20001, dtype=torch.float64)


@dataclass(frozen=True)
class World:
    """Expectations over one sequence, exact."""

    sigma: float
    """Standard deviation of log w."""
    slope: float
    """Of the log odds of a reward of 1, per standard deviation of log w."""
    optimum: float
    """b*, the constant baseline of least variance."""
    mean_reward: float
    """E[R], of the sampler."""
    policy_reward: float
    """E[w R], of the policy."""
    influence: float
    """E[a^2]."""
    variance: float
    """E[a^2 (R - b*)^2], per sequence."""


@dataclass(frozen=True)
class Excess:
    """A baseline computed from the other sequences of a group of `size`."""

    slope: float
    ess_ratio: float
    size: int
    baseline: str
    excess: float
    """Of the update's variance over that with the best constant, as a share of the latter."""
    standard_error: float
    above_mean: float
    """`excess` less that of the leave-one-out mean, of the same groups."""
    above_mean_error: float
    """Standard error of `above_mean`."""


@dataclass(frozen=True)
class Kept:
    """How much of the update group OPOB, which knows a sequence's own reward, leaves."""

    slope: float
    ess_ratio: float
    size: int
    signal: float
    """Mean of a (R - b) (R - E R) over that with the best constant."""
    of_largest: float
    """Mean of 1 - h of the sequence with the largest share h."""


def log_used(log_weight: Tensor) -> Tensor:
    return log_weight.clamp(max=math.log(TRUNCATION))


def make_world(ratio: float, slope: float) -> World:
    sigma = math.sqrt(-math.log(ratio))
    density = (-0.5 * _GRID.square()).exp()
    density = density / density.sum()
    log_weight = sigma * _GRID - sigma**2 / 2
    influence, solved = (2 * log_used(log_weight)).exp() * density, (slope * _GRID).sigmoid()
    optimum = ((influence * solved).sum() / influence.sum()).item()
    left = solved * (1 - optimum) ** 2 + (1 - solved) * optimum**2
    return World(
        sigma=sigma,
        slope=slope,
        optimum=optimum,
        mean_reward=(density * solved).sum().item(),
        policy_reward=(density * log_weight.exp() * solved).sum().item(),
        influence=influence.sum().item(),
        variance=(influence * left).sum().item(),
    )


def draw(world: World, size: int, groups: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log a, reward, group) of `groups` groups of `size` sequences, each [groups * size]."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(groups * size, generator=generator, dtype=torch.float64)
    solved = torch.rand(groups * size, generator=generator, dtype=torch.float64) < (world.slope * normal).sigmoid()
    log_weight = world.sigma * normal - world.sigma**2 / 2
    return log_used(log_weight), solved.double(), torch.arange(groups).repeat_interleave(size)


def measure(slope: float, ratio: float, size: int, groups: int, seed: int = 0) -> tuple[list[Excess], Kept]:
    """Every baseline at one slope, ESS ratio and group size, from `groups` groups."""
    world = make_world(ratio, slope)
    log_a, reward, group = draw(world, size, groups, seed)
    norm = torch.ones_like(reward)
    baselines = {
        "leave-one-out mean": leave_one_out(reward, group),
        "leave-one-out OPOB": optimal_off_policy(reward, log_a, norm, group, leave_out_own=True),
    }
    cost = world.influence / world.variance
    squared = {name: cost * (b - world.optimum).square().view(groups, size).mean(1) for name, b in baselines.items()}
    known = cost * (world.mean_reward - world.optimum) ** 2
    mean = squared["leave-one-out mean"]
    rows = [Excess(slope, ratio, size, "constant mean", known, 0.0, *_with_error(known - mean))]
    rows += [Excess(slope, ratio, size, n, *_with_error(x), *_with_error(x - mean)) for n, x in squared.items()]

    influence = (2 * log_a).exp()  # all gradients have norm 1
    kept = 1 - influence / group_sum(influence, group)  # 1 - h
    own = log_a.exp() * (reward - world.policy_reward)
    best, of_group = (own * (reward - b) for b in (world.optimum, optimal_off_policy(reward, log_a, norm, group)))
    smallest = kept.view(groups, size).amin(dim=1)
    return rows, Kept(slope, ratio, size, (of_group.mean() / best.mean()).item(), smallest.mean().item())


def _with_error(values: Tensor) -> tuple[float, float]:
    """The mean of [groups] values, and its standard error."""
    blocks = torch.stack([block.mean() for block in values.chunk(BLOCKS)])
    return values.mean().item(), (blocks.std() / math.sqrt(BLOCKS)).item()


def print_tables(rows: list[Excess], kept: list[Kept]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    names = list(dict.fromkeys(row.baseline for row in rows))
    table = Table("slope", "ESS ratio", "sequences", *names, title="variance above that of the best constant")
    for where in dict.fromkeys((row.slope, row.ess_ratio, row.size) for row in rows):
        cells = [row for row in rows if (row.slope, row.ess_ratio, row.size) == where]
        shown = [f"{row.excess:+.1%} ± {INTERVAL * row.standard_error:.1%}" for row in cells]
        table.add_row(f"{where[0]:g}", f"{where[1]:.2f}", str(where[2]), *shown)
    console.print(table)
    table = Table("slope", "ESS ratio", "sequences", "signal", "of the largest", title="kept by OPOB of the group")
    for row in kept:
        numbers = (f"{row.slope:g}", f"{row.ess_ratio:.2f}", str(row.size))
        table.add_row(*numbers, f"{row.signal:.0%}", f"{row.of_largest:.0%}")
    console.print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--groups", type=whole_number(1), default=4000, help="groups drawn of each kind (default 4000)")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON line, last")
    arguments = parser.parse_args()
    if arguments.groups < 2 * BLOCKS:
        parser.error(f"--groups {arguments.groups}: give at least {2 * BLOCKS}")
    kinds = list(itertools.product(SLOPES, RATIOS, SIZES))
    progress = tqdm(kinds, file=sys.stderr)
    measured = [measure(slope, ratio, size, arguments.groups) for slope, ratio, size in progress]
    rows, kept = [row for part, _ in measured for row in part], [row for _, row in measured]
    print_tables(rows, kept)
    if arguments.json:
        print(json.dumps({"excess": [asdict(row) for row in rows], "kept": [asdict(row) for row in kept]}))
    return 0


if __name__ == "__main__":
    run_command(main)
