"""The cases of `python -m lab.long_responses`: how arithmetic and lag differ by token, version, sampler and step."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

V = 0.03**2
"""The mean square of a token's log-ratio on fresh data."""
LAG = 8
PROMPT = 0.8
"""The error of a pass as for a prompt, of tokens that samplers compute again: relative to v."""
ASKED_TOKENS = 1000
"""The tokens of a response that samplers compute again: its first ones."""
LAST = 16

Factor = Callable[["Cells"], Tensor | float]


@dataclass(frozen=True)
class Cells:
    """Runs of tokens [B, C] that one version has sampled."""

    step: int
    count: Tensor
    middle: Tensor
    """Position of the middle token."""
    lag: Tensor
    asked: Tensor
    """Bool: samplers can be asked about these tokens."""
    last: Tensor
    """Bool: the last tokens of the response."""
    sampler: Tensor
    """[B, 1]: 0 or 1."""
    arithmetic: Tensor
    """The variance of a token's log-ratio on fresh data, at the time when it was sampled."""


def _constant(_: Cells) -> float:
    return 1.0


@dataclass(frozen=True)
class World:
    """A run that begins, unless `never_fresh`, with one fresh batch; the lag part of all others has an ESS ratio."""

    name: str
    tokens: int
    batch: int = 256
    ratio: float = 0.5
    v: float = V
    steps: int = 24
    compared: int = 3
    """The last steps, which are compared."""
    lags: tuple[int, ...] = (LAG,)
    """Of the parts of each response, in its order; the lag part grows with them by `drift`."""
    drift: Callable[[float], float] = float
    never_fresh: bool = False
    fresh_tokens: int = 0
    """The last tokens of each response that are fresh."""
    fresh_half: bool = False
    """Half of the responses are fresh, and come from sampler 1."""
    one_fresh: int | None = None
    """From this step on one token of the batch is fresh."""
    of_arithmetic: Factor = _constant
    asked: int = 16
    """Sequences of which tokens are computed again in a step."""
    asks_until: int = 10**9
    jump: tuple[float, float] = (0.0, 0.0)
    """Of one token: its log-ratio, and the part of the responses that has it."""
    jump_tokens: int = 1
    """The tokens that share the log-ratio of a jump: with more than one, each is too small to be seen as a jump."""
    shared_lag: bool = False
    shared_arithmetic: float = 0.0
    """The part of the variance of a response that all of its tokens share."""
    heavy: bool = False
    grows_from: int = 0
    """The mean length at the first step."""
    mixed: tuple[int, int] | None = None
    """Half of the responses have the first length and are masked, the others have the second."""

    def lengths(self, step: int, generator: Generator) -> Tensor:
        """[B] log-normal, with the coefficient of variation 0.66."""
        if self.mixed:
            return torch.tensor(self.mixed).repeat(self.batch // 2)
        mean = self.tokens
        if self.grows_from:
            mean = round(self.grows_from * (self.tokens / self.grows_from) ** (min(1, 1.5 * step / self.steps)))
        length = torch.randn(self.batch, generator=generator) * 0.6 - 0.18
        return length.exp().mul(mean).clamp(32, 6 * mean).long()

    def masked(self, length: Tensor) -> Tensor:
        """[B] bool: truncated responses, which count nowhere."""
        return length == self.mixed[0] if self.mixed else torch.zeros(len(length), dtype=torch.bool)

    def cells(self, step: int, length: Tensor) -> Cells:
        """Cut responses where the version changes, where questions end, and before the last tokens."""
        lags = (0,) if step == 0 and not self.never_fresh else self.lags
        last = self.fresh_tokens or LAST
        ends = [length * (i + 1) // len(lags) for i in range(len(lags))]
        cuts = torch.stack([torch.zeros_like(length), *ends, length.clamp(max=ASKED_TOKENS), length - last], dim=1)
        cuts = cuts.sort(dim=1).values
        count, middle = cuts.diff(dim=1), cuts.unfold(1, 2, 1).double().mean(dim=-1)
        lag = torch.tensor(lags)[(middle * len(lags) / length[:, None]).long().clamp(max=len(lags) - 1)]
        at_end = middle >= (length - last)[:, None]
        sampler = (torch.arange(len(length)) % 2)[:, None]
        if self.fresh_tokens:
            lag = torch.where(at_end, 0, lag)
        if self.fresh_half:
            lag = torch.where(sampler == 1, 0, lag)
        if self.one_fresh is not None and step >= self.one_fresh:
            # The first token of the first response: its cell is cut in two.
            count = torch.cat([torch.zeros(len(length), 1, dtype=count.dtype), count], dim=1)
            count[0, 0], count[0, 1] = 1, count[0, 1] - 1
            middle, lag, at_end = (torch.cat([x[:, :1], x], dim=1) for x in (middle, lag, at_end))
            lag = lag.clone()
            lag[:, 0] = 0
        known = Cells(step, count, middle, lag, middle < ASKED_TOKENS, at_end, sampler, torch.zeros(()))
        return replace(known, arithmetic=(self.v * torch.ones(count.shape, dtype=torch.float64)) * self._factor(known))

    def _factor(self, cells: Cells) -> Tensor:
        return torch.as_tensor(self.of_arithmetic(cells), dtype=torch.float64)

    def now(self, cells: Cells) -> Tensor:
        """[B, C] the variance of a pass with the weights of this step, whose tokens have the lag 0."""
        return self.v * self._factor(replace(cells, lag=torch.zeros_like(cells.lag))).expand(cells.count.shape)

    def of_lag(self, length: Tensor, cells: Cells) -> Tensor:
        """[B, C] the variance of the lag part of a token; mean length and mean lag have the ESS ratio asked for."""
        if cells.step == 0 and not self.never_fresh:
            return torch.zeros(cells.count.shape, dtype=torch.float64)
        relative = torch.tensor([0.0, *(self.drift(lag) for lag in range(1, LAG + 1))], dtype=torch.float64)
        mean = sum(self.drift(lag) for lag in self.lags) / len(self.lags)
        typical = self.mixed[1] if self.mixed else self.tokens
        return relative[cells.lag] / mean * -math.log(self.ratio) / typical

    def variance(self, length: Tensor, cells: Cells) -> Tensor:
        """[B] of the lag part of a log-weight, without jumps."""
        return (self.of_lag(length, cells) * cells.count).sum(dim=1)

    def asks(self, step: int) -> bool:
        """Whether samplers answer in this step."""
        return bool(self.asked) and step <= self.asks_until


SPREAD = tuple(range(LAG, 0, -1))
"""A response that eight versions have sampled in turn, the oldest first."""


def _falling(cells: Cells) -> Tensor:
    """A fifth in 24 steps, at the time of sampling."""
    return 1 - 0.2 * (cells.step - cells.lag).clamp(min=0) / 24


def _rising(cells: Cells) -> Tensor:
    return 1 + 0.2 * (cells.step - cells.lag).clamp(min=0) / 24


def _doubling(cells: Cells) -> Tensor:
    return 1 + (cells.step - cells.lag).clamp(min=0) / 24


def _halving(cells: Cells) -> Tensor:
    return 1 - 0.5 * ((cells.step - cells.lag) / 14).clamp(0, 1)


def _by_age(cells: Cells) -> Tensor:
    """10 % more in the newest tokens, 10 % less in the oldest."""
    return 1.1 - 0.2 * (cells.lag.double() - 1).clamp(min=0) / (LAG - 1)


def _beyond(factor: float) -> Factor:
    return lambda cells: torch.where(cells.middle < ASKED_TOKENS, 1.0, factor)


def _at_the_end(factor: float) -> Factor:
    return lambda cells: torch.where(cells.last, factor, 1.0)


def _of_sampler(cells: Cells) -> Tensor:
    return torch.where(cells.sampler == 1, 1.1, 0.9).expand(cells.count.shape)


def worlds(batch: int = 256) -> Iterator[World]:
    """All cases: those of audits first, marked with *."""
    for world in (*_tails(), *_v_is_another(), *_small_lag()):
        yield replace(world, batch=batch)


def _tails() -> Iterator[World]:
    for tokens in (512, 2048):
        yield World("* one token at +3 in 5 %", tokens, ratio=1.0, jump=(3.0, 0.05))
    yield World("* one token at +1.5 in 30 %", 512, ratio=0.55, jump=(1.5, 0.3))
    for v in (1.6e-5, 2.2e-5):
        yield World(f"* one token at +3 in 5 %, v = {v:g}", 512, v=v, ratio=1.0, jump=(3.0, 0.05))
    yield World("one token at +3 in 5 %", 8192, ratio=1.0, jump=(3.0, 0.05))
    yield World("one token at +1.5 in 30 %", 2048, ratio=0.55, jump=(1.5, 0.3))
    yield World("one token at +1.5 in 30 %", 8192, ratio=0.55, jump=(1.5, 0.3))
    for tokens in (512, 2048, 8192):
        yield World("ten tokens at +0.3 in 5 %", tokens, ratio=1.0, jump=(3.0, 0.05), jump_tokens=10)


def _v_is_another() -> Iterator[World]:
    never = World("", 2048, never_fresh=True, asked=0, lags=SPREAD)
    drifts: dict[str, Callable[[float], float]] = {
        "the same": lambda lag: 1.0,
        "as the root": math.sqrt,
        "as the logarithm": math.log1p,
    }
    for name, drift in drifts.items():
        yield replace(never, name=f"* never a fresh token, drift {name}", drift=drift)
    yield replace(never, name="* never a fresh token, v by age", tokens=8192, of_arithmetic=_by_age)
    long = World("", 8192)
    yield replace(long, name="* two kinds of sampler", fresh_half=True, of_arithmetic=_of_sampler)
    yield replace(long, name="* v falls by a fifth, nothing again", of_arithmetic=_falling, asked=0)
    yield replace(long, name="* v falls by a fifth", of_arithmetic=_falling)
    yield replace(long, name="* lengths grow, v 0.8 beyond 1,024", grows_from=512, of_arithmetic=_beyond(0.8))
    of_last = replace(long, name="* the last 16 tokens are fresh, v 1.25", lags=SPREAD, fresh_tokens=LAST)
    yield replace(of_last, of_arithmetic=_at_the_end(1.25), never_fresh=True, asked=0)
    yield replace(long, name="* one fresh token, then no answer", of_arithmetic=_halving, one_fresh=20, asks_until=19)
    yield replace(long, name="* half is truncated and masked", tokens=512, mixed=(8192, 512))
    yield replace(long, name="* v doubles", of_arithmetic=_doubling)
    yield replace(long, name="* a tenth of arithmetic is shared", tokens=2048, shared_arithmetic=0.1, asked=0)
    # Ours.
    for tokens in (2048, 8192):
        for name, drift in drifts.items():
            yield World(f"lags 1 to 8, drift {name}", tokens, lags=SPREAD, drift=drift)
        yield World("lags 1 to 8, v by age", tokens, lags=SPREAD, of_arithmetic=_by_age)
    yield replace(of_last, name="the last 16 tokens are fresh, v 1.25", of_arithmetic=_at_the_end(1.25))
    yield replace(of_last, name="the last 16 tokens are fresh, v 0.8", of_arithmetic=_at_the_end(0.8))
    yield replace(long, name="v 1.25 beyond 1,024", of_arithmetic=_beyond(1.25))
    yield replace(long, name="v rises by a fifth", of_arithmetic=_rising)
    yield replace(long, name="v halves", of_arithmetic=_halving)
    yield replace(long, name="one fresh token in each batch", one_fresh=1)
    yield replace(long, name="nothing again since the first batch", asked=0)
    yield replace(long, name="nothing again since the first batch", asked=0, tokens=2048)


def _small_lag() -> Iterator[World]:
    for tokens in (32, 512, 2048, 8192, 16384):
        for ratio in (1.0, 0.8, 0.3) if tokens > 32 else (1.0, 0.3):
            yield World(f"normal, ESS ratio {ratio:g}", tokens, ratio=ratio)
    for tokens in (512, 2048, 8192, 16384):
        yield World("lag shared by a response's tokens", tokens, shared_lag=True)
    for tokens in (512, 2048, 8192):
        yield World("2 % of the tokens have 90 % of v", tokens, heavy=True)
