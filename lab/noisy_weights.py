"""Which weights are right for long responses? `python -m lab.noisy_weights [--json]`, a minute.

The logarithm of a response's weight is a lag part plus what sampler and trainer differ by in arithmetic, and both are
made here. What is estimated is the mean, under the trainer's policy, of a number f per response. Among the sampler's
responses f has the mean 0.3, the standard deviation 1, and the correlation 0.5 with the lag part. The right answer is
therefore 0.3 + 0.5 sqrt(variance of the lag part), and whoever ignores the lag gets 0.3. Compared are the bias of
weighted means and their standard deviation in a batch.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Generator, Tensor

from lab.long_responses import RATIOS, RMS
from lab.simulator.arithmetic import Arithmetic
from recipe.command_line import OneLineParser, run_command, whole_number

LENGTHS = (512, 2048, 8192)
SIGNAL, CORRELATION = 0.3, 0.5
TRUNCATION, CLIP = 8.0, 0.2
RESPONSES, OF_TOKENS, AT_ONCE = 2**17, 2**13, 64
"""Responses that are drawn; those of them whose tokens are drawn, too; and how many of the latter at once."""


@dataclass(frozen=True)
class Drawn:
    """B fresh or stale responses of one length."""

    tokens: int
    lag_variance: float
    """Of the lag part of a response's log-weight."""
    lag: Tensor
    """[B] lag part of log w."""
    log_weight: Tensor
    """[B] log w, both parts."""
    value: Tensor
    """[B] f."""

    @property
    def arithmetic_variance(self) -> float:
        return Arithmetic(RMS, self.tokens).variance


def draw(tokens: int, ratio: float, generator: Generator) -> Drawn:
    """Draw responses whose lag part has the ESS ratio `ratio`, by a sampler that records what it draws from."""
    of_lag, of_arithmetic = -math.log(ratio), Arithmetic(RMS, tokens).variance
    z, rounding, rest = torch.randn(3, RESPONSES, dtype=torch.float64, generator=generator)
    lag = z * math.sqrt(of_lag) - of_lag / 2
    log_weight = lag + rounding * math.sqrt(of_arithmetic) - of_arithmetic / 2
    return Drawn(tokens, of_lag, lag, log_weight, SIGNAL + CORRELATION * z + math.sqrt(1 - CORRELATION**2) * rest)


def _truncated(log_weight: Tensor) -> Tensor:
    return log_weight.exp().clamp(max=TRUNCATION)


def _shrunk(drawn: Drawn) -> Tensor:
    """The mean of the lag's weight among the responses of one w: w^kappa, times a constant, kappa = u / (u + v)."""
    kappa = drawn.lag_variance / (drawn.lag_variance + drawn.arithmetic_variance)
    return _truncated(kappa * (drawn.log_weight + drawn.arithmetic_variance / 2))


def _by_token(drawn: Drawn) -> Tensor:
    """[OF_TOKENS] each token weighted by itself, within 1 +- CLIP: the mean over a response's tokens, which share f."""
    generator, found = torch.Generator().manual_seed(drawn.tokens), []
    for lag in drawn.lag[:OF_TOKENS].float().split(AT_ONCE):
        each = torch.randn(len(lag), drawn.tokens, generator=generator).mul_(RMS).sub_(RMS**2 / 2)
        found.append(each.add_(lag[:, None] / drawn.tokens).exp_().clamp_(1 - CLIP, 1 + CLIP).mean(dim=1))
    return torch.cat(found).double()


WEIGHTS: dict[str, Callable[[Drawn], Tensor]] = {
    "none": lambda drawn: torch.ones_like(drawn.lag),
    f"w, truncated at {TRUNCATION:g}": lambda drawn: _truncated(drawn.log_weight),
    "w^kappa": _shrunk,
    f"by token, within 1 +- {CLIP:g}": _by_token,
    "length-normalised (GSPO)": lambda drawn: (drawn.log_weight / drawn.tokens).exp(),
    "decoupled: the lag's weight, truncated": lambda drawn: _truncated(drawn.lag),
}
ORACLE = "fresh responses (oracle)"


@dataclass(frozen=True)
class Row:
    """One kind of weights at one length and lag."""

    tokens: int
    ratio: float
    """ESS ratio of the lag part."""
    weights: str
    bias: float
    deviation: float
    """Standard deviation of the estimate from one batch."""


def measure(tokens: int, ratio: float, batch: int) -> list[Row]:
    """Return a row for each kind of weights, and for fresh responses."""
    drawn = draw(tokens, ratio, torch.Generator().manual_seed(tokens))
    shift = CORRELATION * math.sqrt(drawn.lag_variance)
    weighted = {name: (of := weights(drawn)) * drawn.value[: len(of)] for name, weights in WEIGHTS.items()}
    weighted[ORACLE] = drawn.value + shift
    rows = []
    for name, each in weighted.items():
        bias = (each - drawn.value[: len(each)]).mean() - shift  # the mean of f is known: it needs no estimate
        rows.append(Row(tokens, ratio, name, bias.item(), each.std().item() / math.sqrt(batch)))
    return rows


def print_table(rows: list[Row], batch: int) -> None:
    """A line per length and kind of weights, a column per lag."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"Bias, and standard deviation of the estimate from {batch} responses; ESS ratio of the lag part"
    )
    for column in ("tokens", "weights", *(f"lag part {ratio:g}" for ratio in RATIOS)):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for place in dict.fromkeys((row.tokens, row.weights) for row in rows):
        cells = (f"{row.bias:+.2f}, {row.deviation:.2f}" for row in rows if (row.tokens, row.weights) == place)
        table.add_row(f"{place[0]:,}", place[1], *cells)
    Console(width=140).print(table)


def main(argv: list[str] | None = None) -> int:
    """Print the table. Returns the exit code, 0."""
    parser = OneLineParser(prog="python -m lab.noisy_weights", description=__doc__)
    parser.add_argument("--tokens", type=whole_number(1), nargs="+", default=LENGTHS, help="of a response")
    parser.add_argument("--batch", type=whole_number(1), default=256, help="responses in a batch")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [row for tokens in arguments.tokens for ratio in RATIOS for row in measure(tokens, ratio, arguments.batch)]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_table(rows, arguments.batch)
    return 0


if __name__ == "__main__":
    run_command(main)
