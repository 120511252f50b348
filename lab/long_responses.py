"""Does the step follow the lag where responses are long? `python -m lab.long_responses [--json]`, a few minutes.

Log-probs are made of two parts that are known: arithmetic, a difference of a given RMS at every token, and a lag part
of a given ESS ratio. The estimator of `vcpo.mismatch` gets their sum, token by token, and its factor of the learning
rate is compared with the right one: the square root of the ESS ratio that the lag part alone has at the same lengths,
as a mean over draws.
"""

import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum

import torch
from torch import Generator, Tensor

from recipe.command_line import OneLineParser, run_command, whole_number
from vcpo import Mismatch, VCPOConfig, estimate
from vcpo.ess import ess_ratio
from vcpo.mismatch import Span, squared_log_ratios

RMS = 0.031  # of Qwen3-4B: a bfloat16 sampler beside a bfloat16 trainer
LENGTHS = (32, 512, 2048, 6332, 16384)
RATIOS = (1.0, 0.8, 0.5, 0.3)
LAG = 8
DRAWS = 200  # of the lag part alone
SETTLED = 4  # batches that are not compared: the windows begin empty


class Case(StrEnum):
    """What the tokens of a batch are like."""

    INDEPENDENT = "independent"
    """Both parts are independent from token to token, and normal. v is known from the first batch, which is fresh."""
    HEAVY = "heavy tails"
    """2 % of the tokens have 90 % of the square of the arithmetic part."""
    SHARED = "shared lag"
    """The lag part of a response is the same at all of its tokens."""
    SPANS = "no fresh token"
    """No batch is fresh: each response was sampled by eight versions in turn, whose drift grows with their lag."""


@dataclass(frozen=True)
class Row:
    """One case at one length and lag: means over batches."""

    case: str
    tokens: int
    ratio: float
    """ESS ratio of the lag part, in an infinite batch."""
    right: float
    """The right factor of the learning rate."""
    whole: float
    """The factor of `ess_part=whole`."""
    lag: float
    """The factor of `ess_part=lag`."""
    lag_error: float
    """Root mean square of its difference from the right one."""
    rms: float
    """As measured."""


@dataclass(frozen=True)
class Drawn:
    """B sequences, as an engine has them after its forward pass, and the lag part that nobody measures."""

    log_weight: Tensor
    tokens: Tensor
    squares: Tensor
    spans: list[list[Span]]
    of_lag: Tensor
    """[B] log-weights of the lag part alone."""


def draw(case: Case, mean: int, ratio: float, batch: int, generator: Generator, fresh: bool = False) -> Drawn:
    """Draw a batch whose lengths are log-normal, with coefficient of variation 0.66; N tokens in all."""
    u = 0.0 if fresh else -math.log(ratio) / mean
    length = (torch.randn(batch, generator=generator) * 0.6 - 0.18).exp().mul(mean).clamp(16, 6 * mean).long()
    row = torch.arange(batch).repeat_interleave(length)  # [N]
    lags = torch.full_like(row, 0 if fresh else LAG)
    if case is Case.SPANS:
        at = torch.arange(len(row)) - (length.cumsum(0) - length)[row]
        lags = LAG - at * LAG // length[row]
    of_lag = _lag_part(case, u, mean, lags, row, length, generator)
    log_prob = _arithmetic(case, len(row), generator) + of_lag
    square = squared_log_ratios(log_prob, torch.zeros(len(row)), torch.ones(len(row)))
    shape = (batch, LAG + 1)
    number, squares = (
        torch.zeros(batch * (LAG + 1), dtype=torch.float64).index_add_(0, row * (LAG + 1) + lags, values).view(shape)
        for values in (torch.ones_like(square), square)
    )
    spans = [
        [(lag, int(n), s) for lag, (n, s) in enumerate(zip(*both, strict=True)) if n]
        for both in zip(number.tolist(), squares.tolist(), strict=True)
    ]
    log_weight, of_lag = (
        torch.zeros(batch, dtype=torch.float64).index_add_(0, row, values.double()) for values in (log_prob, of_lag)
    )
    return Drawn(log_weight, length, squares.sum(dim=1), spans, of_lag)


def _arithmetic(case: Case, tokens: int, generator: Generator) -> Tensor:
    """[N] with the mean of weights 1, as for a sampler that draws from what it records."""
    variance = torch.full((tokens,), RMS**2)
    if case is Case.HEAVY:
        variance *= torch.where(torch.rand(tokens, generator=generator) < 0.02, 0.9 / 0.02, 0.1 / 0.98)
    return torch.randn(tokens, generator=generator) * variance.sqrt() - variance / 2


def _lag_part(
    case: Case, u: float, mean: int, lags: Tensor, row: Tensor, length: Tensor, generator: Generator
) -> Tensor:
    """[N]; `u` is the variance per token of the logarithm of a sequence's weight."""
    if case is Case.SHARED:
        whole = torch.randn(len(length), generator=generator) * math.sqrt(u * mean) - u * mean / 2
        return (whole / length)[row]
    variance = u * lags / lags.double().mean().clamp(min=1)
    return (torch.randn(len(row), generator=generator) * variance.sqrt() - variance / 2).float()


def right_factor(case: Case, mean: int, ratio: float, tokens: Tensor, generator: Generator) -> float:
    """The factor of a batch whose weights are the lag part alone; `tokens` [B]."""
    of_sequence = -math.log(ratio) * (torch.ones(len(tokens)) if case is Case.SHARED else tokens / mean)
    drawn = torch.randn(DRAWS, len(tokens), generator=generator) * of_sequence.sqrt() - of_sequence / 2
    return math.sqrt(sum(map(ess_ratio, drawn)) / DRAWS)


def measure(case: Case, mean: int, ratio: float, batch: int, batches: int) -> Row:
    """Follow a run of stale batches after a fresh one, which `SPANS` does not have."""
    generator = torch.Generator().manual_seed(mean)
    mismatch, found = Mismatch(), []
    rewards, group = torch.arange(batch) % 2, torch.arange(batch) // 8
    for number in range(batches + 1):
        drawn = draw(case, mean, ratio, batch, generator, fresh=number == 0 and case is not Case.SPANS)
        parts = mismatch.update(drawn.log_weight, drawn.tokens, drawn.squares, drawn.spans)
        if number <= SETTLED:
            continue
        of_whole, of_lag = (
            estimate(
                VCPOConfig(baseline="mean", ess_part=part),  # type: ignore[arg-type]  # it takes strings as well
                drawn.log_weight,
                rewards,
                group,
                lag_ess_ratio=parts.lag if parts else None,
            ).step_size_multiplier
            for part in ("whole", "lag")
        )
        alone = right_factor(case, mean, ratio, drawn.tokens, generator)
        found.append((alone, of_whole, of_lag, parts.rms if parts else math.nan))
    right, whole, lag, rms = torch.tensor(found, dtype=torch.float64).unbind(dim=1)
    error = (lag - right).square().mean().sqrt()
    means = right.mean().item(), whole.mean().item(), lag.mean().item()
    return Row(str(case), mean, ratio, *means, error.item(), rms.nanmean().item())


def print_tables(rows: list[Row]) -> None:
    """A table per case."""
    from rich.console import Console
    from rich.table import Table

    for case in dict.fromkeys(row.case for row in rows):
        table = Table(title=f"{case}: factor on the learning rate")
        for column in ("tokens", "ESS of the lag", "right", "whole", "lag", "rms error", "RMS measured"):
            table.add_column(column, justify="right")
        for row in rows:
            if row.case == case:
                factors = (f"{value:.2f}" for value in (row.right, row.whole, row.lag, row.lag_error))
                table.add_row(f"{row.tokens:,}", f"{row.ratio:g}", *factors, f"{row.rms:.4f}")
        Console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Print the tables. Returns the exit code, 0."""
    parser = OneLineParser(prog="python -m lab.long_responses", description=__doc__)
    parser.add_argument("--tokens", type=whole_number(1), nargs="+", default=LENGTHS, help="mean lengths")
    parser.add_argument("--batch", type=whole_number(1), default=256, help="sequences in a batch")
    parser.add_argument(
        "--batches", type=whole_number(SETTLED + 1), default=12, help="in a run; the first are not compared"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [
        measure(case, mean, ratio, arguments.batch, arguments.batches)
        for case in Case
        for mean in arguments.tokens
        for ratio in RATIOS
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_tables(rows)
    return 0


if __name__ == "__main__":
    run_command(main)
