"""Is OPOB the baseline of least variance? `python -m lab.baselines.variance [--json]`.

A softmax policy over sequences of 6 tokens from 5, small enough that every expectation is an exact sum over all 15625
sequences. The update G(b) = mean over a group of min(w, c) (R - b) g is drawn many times from a sampler whose logits
differ from the policy's, and its total variance tr Cov G is measured:

1. for constant baselines: where is the minimum of the measured variance, and what does each formula's constant cost?
2. for baselines as training uses them, computed from the group itself. They take some of the group's own signal away;
   how much is kept is printed beside the variance.

"w counted twice" is the weight of the published implementation, w^2 times a norm that holds min(w, c) already.
"""

import itertools
import json
import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from recipe.command_line import OneLineParser, run_command, whole_number
from vcpo import Baseline, VCPOConfig, estimate
from vcpo.baseline import optimal_off_policy
from vcpo.ess import ess_ratio

TOKENS, LENGTH, GROUP_SIZE, BLOCKS = 5, 6, 16, 20
INTERVAL = 2.09  # standard errors to each side of a 95 % confidence interval, from 20 blocks
# name, how far the sampler's logits are from the policy's, truncation
SETTINGS = [
    ("on policy", 0.0, None),
    ("off policy", 0.5, None),
    ("heavy-tailed", 0.8, None),
    ("heavier, truncated at 8", 1.2, 8.0),
]


@dataclass(frozen=True)
class World:
    """Every sequence there is, N of them: float64."""

    log_policy: Tensor
    """[N] log pi"""
    log_sampler: Tensor
    """[N] log mu"""
    score: Tensor
    """[N, P] g = grad of (1/L) sum_t log pi(t)"""
    reward: Tensor
    """[N]"""

    @property
    def log_weight(self) -> Tensor:
        return self.log_policy - self.log_sampler

    @property
    def squared_norm(self) -> Tensor:
        return self.score.square().sum(-1)


def make_world(distance: float, seed: int = 0) -> World:
    """A random policy, a sampler `distance` (standard deviations of the logits) away, and a reward for rare tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits, noise = (torch.randn(LENGTH, TOKENS, generator=generator, dtype=torch.float64) for _ in range(2))
    sequences = torch.tensor(list(itertools.product(range(TOKENS), repeat=LENGTH)))  # [N, L]
    one_hot = torch.nn.functional.one_hot(sequences, TOKENS).double()  # [N, L, V]
    log_policy, log_sampler = ((one_hot * x.log_softmax(-1)).sum((1, 2)) for x in (logits, logits + distance * noise))
    rare = torch.zeros(LENGTH, TOKENS, dtype=torch.float64).scatter_(1, logits.topk(2, largest=False).indices, 1.0)
    return World(
        log_policy=log_policy,
        log_sampler=log_sampler,
        score=((one_hot - logits.softmax(-1)) / LENGTH).flatten(1),
        reward=((one_hot * rare).sum((1, 2)) >= 2).double(),
    )


def constants(world: World, truncation: float | None) -> dict[str, float]:
    """Each formula's baseline where it is an expectation over the sampler, exactly."""
    w = world.log_weight.exp()
    used = w if truncation is None else w.clamp(max=truncation)

    def weighted_mean(weight: Tensor) -> float:
        weight = weight * world.log_sampler.exp()
        return ((weight * world.reward).sum() / weight.sum()).item()

    norm = world.squared_norm
    return {
        "none": 0.0,
        "mean": weighted_mean(torch.ones_like(w)),
        "opob, w counted twice": weighted_mean(w**2 * used**2 * norm),
        "opob, untruncated weights": weighted_mean(w**2 * norm),
        "opob": weighted_mean(used**2 * norm),
    }


def exact_minimum(world: World, truncation: float | None) -> float:
    """The constant b of least variance, as a sum. It differs from OPOB by the mean of min(w, c) g: 0 untruncated."""
    w = world.log_weight.exp()
    used = w if truncation is None else w.clamp(max=truncation)
    mu, (x, y) = world.log_sampler.exp(), (used * world.reward, used)
    mean_x, mean_y = ((mu * a) @ world.score for a in (x, y))
    norm = world.squared_norm
    return (((mu * x * y * norm).sum() - mean_x @ mean_y) / ((mu * y * y * norm).sum() - mean_y @ mean_y)).item()


@dataclass(frozen=True)
class Groups:
    """M groups drawn from the sampler: rows [M, n] of a world."""

    log_weight: Tensor
    weight: Tensor
    """min(w, c)"""
    reward: Tensor
    score: Tensor
    """[M, n, P]"""


def draw(world: World, truncation: float | None, groups: int, seed: int) -> Groups:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.multinomial(world.log_sampler.exp(), groups * GROUP_SIZE, replacement=True, generator=generator).view(
        groups, GROUP_SIZE
    )
    weight = world.log_weight[rows].exp()
    used = weight if truncation is None else weight.clamp(max=truncation)
    return Groups(world.log_weight[rows], used, world.reward[rows], world.score[rows])


def updates(groups: Groups, baseline: Tensor | float) -> Tensor:
    """[M, P] G of every group; `baseline` [M, n] or one number."""
    coefficient = groups.weight * (groups.reward - baseline) / GROUP_SIZE
    return torch.einsum("mn,mnp->mp", coefficient, groups.score)


def total_variance(update: Tensor) -> tuple[float, float]:
    """tr Cov of the rows, and its standard error over blocks of rows."""
    blocks = torch.tensor([block.var(dim=0).sum().item() for block in update.chunk(BLOCKS)])
    return blocks.mean().item(), (blocks.std() / math.sqrt(BLOCKS)).item()


def measured_minimum(groups: Groups) -> tuple[float, float]:
    """The constant b at which the measured variance is least, and its standard error.

    G(b) = X - b Y is linear in b, so its variance is a parabola with its minimum at tr Cov(X, Y) / tr Cov(Y).
    """
    x = updates(groups, 0.0)
    y = x - updates(groups, 1.0)
    x, y = x - x.mean(0), y - y.mean(0)
    covariance, variance = (torch.stack([part.sum() for part in z.chunk(BLOCKS)]) for z in (x * y, y * y))
    whole = covariance.sum() / variance.sum()
    # jackknife: a ratio of sums is biased where a few draws make up the sums, and this takes most of the bias away
    without = (covariance.sum() - covariance) / (variance.sum() - variance)  # [BLOCKS]
    corrected = BLOCKS * whole - (BLOCKS - 1) * without.mean()
    error = (without - without.mean()).square().sum().mul((BLOCKS - 1) / BLOCKS).sqrt()
    return corrected.item(), error.item()


def from_the_group(groups: Groups, truncation: float | None) -> dict[str, Tensor]:
    """[M, n] baselines as training computes them, by vcpo's own functions."""
    group = torch.arange(len(groups.reward)).repeat_interleave(GROUP_SIZE)
    log_weight, reward = groups.log_weight.flatten(), groups.reward.flatten()
    norm = groups.score.square().sum(-1).flatten()
    baselines = {}
    for name in Baseline:
        config = VCPOConfig(baseline=name, truncation=truncation, norm_by_std=False)
        baselines[str(name)] = estimate(config, log_weight, reward, group, squared_norm=norm).baseline
    published = groups.log_weight + groups.weight.log()
    baselines["opob, w counted twice"] = optimal_off_policy(reward, published.flatten(), norm, group)
    return {name: baseline.view_as(groups.reward) for name, baseline in baselines.items()}


@dataclass(frozen=True)
class BaselineFigures:
    """One baseline in one setting. Variances are relative to no baseline."""

    setting: str
    ess_ratio: float
    """Of a group, the mean."""
    baseline: str
    constant: float | None
    """Its value, where it is a constant."""
    variance: float
    standard_error: float
    signal: float
    """Component of the mean update along the true gradient, relative to that: 1 is unbiased."""


@dataclass(frozen=True)
class Minimum:
    """Where the variance is least, and OPOB's formula."""

    setting: str
    measured: float
    standard_error: float
    exact: float
    opob: float

    @property
    def agrees(self) -> bool:
        """Within the 95 % confidence interval."""
        return abs(self.measured - self.opob) <= INTERVAL * self.standard_error


def measure(
    setting: str, distance: float, truncation: float | None, groups: int
) -> tuple[Minimum, list[BaselineFigures]]:
    """Both parts of the comparison in one setting, from `groups` groups."""
    world = make_world(distance)
    drawn = draw(world, truncation, groups, seed=1)
    ratio = sum(ess_ratio(row) for row in drawn.log_weight[:1000]) / min(groups, 1000)
    scale, _ = total_variance(updates(drawn, 0.0))
    gradient = (world.log_policy.exp() * world.reward) @ world.score  # [P]

    def row(name: str, baseline: Tensor | float) -> BaselineFigures:
        update = updates(drawn, baseline)
        variance, error = total_variance(update)
        constant = baseline if isinstance(baseline, float) else None
        signal = (update.mean(0) @ gradient / gradient.square().sum()).item()
        return BaselineFigures(setting, ratio, name, constant, variance / scale, error / scale, signal)

    fixed = constants(world, truncation)
    rows = [row(name, value) for name, value in fixed.items()]
    rows += [row(name, baseline) for name, baseline in from_the_group(drawn, truncation).items()]
    return Minimum(setting, *measured_minimum(drawn), exact_minimum(world, truncation), fixed["opob"]), rows


def print_tables(minima: list[Minimum], rows: list[BaselineFigures]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    table = Table("setting", "variance is least at b: measured", "exact", "OPOB's formula", "")
    for m in minima:
        interval = f"{m.measured:.4f} ± {INTERVAL * m.standard_error:.4f}"
        table.add_row(m.setting, interval, f"{m.exact:.4f}", f"{m.opob:.4f}", "agrees" if m.agrees else "DIFFERS")
    console.print(table)
    for title, constant in (("constant baselines", True), (f"computed from a group of {GROUP_SIZE}", False)):
        columns = ("setting", "ESS", "baseline", "b", "variance / that of none", "signal")
        table = Table(*columns, title=title)
        for r in rows:
            if (r.constant is not None) == constant:
                value = "" if r.constant is None else f"{r.constant:.3f}"
                error = f"{r.variance:.3f} ± {INTERVAL * r.standard_error:.3f}"
                table.add_row(r.setting, f"{r.ess_ratio:.2f}", r.baseline, value, error, f"{r.signal:.2f}")
        console.print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--groups", type=whole_number(1), default=20000, help="groups drawn in each setting (default 20000)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON line, last")
    arguments = parser.parse_args()
    if arguments.groups < 2 * BLOCKS:
        parser.error(f"--groups {arguments.groups}: give at least {2 * BLOCKS}")
    results = [measure(*setting, arguments.groups) for setting in SETTINGS]
    minima, rows = [m for m, _ in results], [row for _, part in results for row in part]
    print_tables(minima, rows)
    if arguments.json:
        print(
            json.dumps(
                {"minima": [asdict(m) | {"agrees": m.agrees} for m in minima], "rows": [asdict(r) for r in rows]}
            )
        )
    return 0 if all(m.agrees for m in minima) else 1


if __name__ == "__main__":
    run_command(main)
