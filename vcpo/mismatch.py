"""The two parts of importance weights: what the lag makes of them, and what arithmetic makes of them.

Sampler and trainer compute the same policy in different arithmetic. The log-weight of a fresh sequence is therefore a
sum of as many small differences as the sequence has tokens, and the ESS ratio falls with length without any lag. v, the
mean square of a token's log-ratio on fresh data, tells how much of the spread is arithmetic.

The ESS ratio of the lag part is the smaller one of two numbers. Both take a lower bound of v, because too large a v
takes lag for arithmetic, and lengthens the step:

- the measured ESS ratio divided by that of arithmetic alone: the parts are independent, so their ratios multiply. Near
  its floor, 1/B, the measured ratio says nothing, and the quotient is large;
- the expected ESS ratio of weights whose logarithm is normal, of the variance per token that is above v; a token whose
  log-ratio is too large for arithmetic, a jump, counts as it is.

Where v is hardly known its lower bound is 0, and the quotient is the measured ESS ratio itself.

No paper has this rule. `python -m lab.long_responses` compares it with the truth on data whose parts are known.
"""

import functools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vcpo.ess import ess_ratio

_NO_JUMP, _JUMP = 0.5, 1.0
"""The log-ratios between which a token turns from a difference in arithmetic or a small lag into a jump."""
_NORMALS, _LEAST_DRAWS = 2**16, 12
"""The normal numbers of an expected ESS ratio, and the least batches: small batches need more of them."""
_SURE = 1.0
"""The standard errors above which sequences say more than their tokens."""
_OF_PARTS = 0.25
"""The part of v by which fresh tokens at the end of stale responses may differ from whole responses."""
_FALLS, _RISES = 0.0075, 0.04
"""The part of v by which its bounds move apart in a step without new data. A fall of v that nobody sees lengthens the
step: a fifth in 27 steps is covered. A rise shortens the step, and only decides which of two sources is outdated."""


def _jumping(log_ratio: Tensor) -> Tensor:
    """The part of each log-ratio that is a jump: none up to 0.5, all from 1 on, and continuous between the two."""
    return log_ratio * ((log_ratio.abs() - _NO_JUMP) / (_JUMP - _NO_JUMP)).clamp(0, 1)


def squared_log_ratios(log_ratio: Tensor) -> Tensor:
    """Return [B, T] d^2 of each token, d the part of its log-ratio that is no jump.

    Args:
        log_ratio: [B, T], of `vcpo.importance.log_ratios`.
    """
    return (log_ratio - _jumping(log_ratio)).square()


def jumps(log_ratio: Tensor) -> Tensor:
    """Return the sum of each sequence's jumps, [B]: tokens which the policy has left, or come to like.

    Args:
        log_ratio: [B, T], of `vcpo.importance.log_ratios`.
    """
    return _jumping(log_ratio).sum(dim=-1)


def expected_ess_ratio(variance: float, tokens: Tensor, jump: Tensor | float = 0.0) -> float:
    """Return the ESS ratio that weights exp(J_i + sqrt(u L_i) z_i - u L_i / 2) have on average, with normal z.

    The draws are the same at every call, so every rank and every resumed run gets the same number.

    Args:
        variance: u, of the logarithm of a weight per token; a negative one is taken for 0.
        tokens: [B] L_i.
        jump: [B] J_i.
    """
    if tokens.numel() == 0:
        return 1.0
    draws = max(_LEAST_DRAWS, _NORMALS // tokens.numel())
    z = _normals(draws, tokens.numel())
    of_sequence = max(0.0, variance) * tokens.double()
    log_weight = jump + of_sequence.sqrt() * z - of_sequence / 2  # [draws, B]
    weight = (log_weight - log_weight.amax(dim=1, keepdim=True)).exp()
    ratio = weight.sum(dim=1).square() / weight.square().sum(dim=1) / tokens.numel()  # [draws]
    return min(1.0, ratio.mean().item())


@functools.lru_cache(maxsize=4)
def _normals(draws: int, batch: int) -> Tensor:
    return torch.randn(draws, batch, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class OfTokens(NamedTuple):
    """Sums over fresh tokens."""

    tokens: float
    squares: float
    spread: float
    """Sum over sequences of (sum of squares - tokens * mean square)^2: a standard error without independent tokens."""
    of_parts: float
    """The fresh tokens of responses that have stale tokens, too."""

    @classmethod
    def of(cls, parts: Sequence[tuple[float, float]], of_parts: float) -> "OfTokens":
        """Return the sums over sequences, of each: number of fresh tokens, sum of their squares."""
        tokens, squares = sum(n for n, _ in parts), math.fsum(s for _, s in parts)
        # One sequence shows no spread: its whole square is taken for it.
        spread = math.fsum((s - n * squares / tokens) ** 2 for n, s in parts) if len(parts) > 1 else squares**2
        return cls(tokens, squares, spread, of_parts)


class OfAgain(NamedTuple):
    """Sums over sequences with tokens that were computed again: s of their squares as sampled, a of those again."""

    sequences: int
    tokens: float
    s: float
    a: float
    ss: float
    sa: float
    aa: float

    @classmethod
    def of(cls, parts: Sequence[tuple[float, float, float]]) -> "OfAgain":
        """Return the sums over sequences, of each: number of tokens, squares as sampled, squares computed again."""
        rows = [(1, n, s, a, s * s, s * a, a * a) for n, s, a in parts]
        return cls(*(sum(column) for column in zip(*rows, strict=True)))

    @property
    def share(self) -> tuple[float, float]:
        """Sum of a / sum of s, and its standard error relative to it; infinite where sequences show no spread."""
        if self.sequences < 2 or not self.s or not self.a:
            return 0.0, math.inf
        share = self.a / self.s
        spread = max(0.0, self.aa - 2 * share * self.sa + share**2 * self.ss)
        return share, math.sqrt(spread * self.sequences / (self.sequences - 1)) / self.a


class OfSequences(NamedTuple):
    """Sums over whole sequences, which see what the tokens of a sequence share."""

    sequences: int
    tokens: float
    squares: float
    """Sum of the tokens' squared log-ratios: what the next field is where tokens are independent."""
    of_weights: float
    """Sum of (log w_i - L_i * mean log-ratio of a token)^2, without jumps."""
    spread: float
    """Sum over sequences of the squared deviation of `of_weights - squares` from its mean."""

    @classmethod
    def of(cls, log_weight: Tensor, tokens: Tensor, squares: Tensor) -> "OfSequences":
        """Return the sums over n sequences: [n] log w, numbers of tokens, and sums of squared log-ratios."""
        count, total = len(tokens), tokens.sum()
        if count < 2:
            return cls(count, total.item(), squares.sum().item(), squares.sum().item(), 0.0)
        of_weight = (log_weight - tokens * log_weight.sum() / total).square() * count / (count - 1)
        more = of_weight - squares
        spread = (more - tokens * more.sum() / total).square().sum()
        return cls(count, total.item(), squares.sum().item(), of_weight.sum().item(), spread.item())


class Source(NamedTuple):
    """A measurement of v for one mini-batch."""

    v: float
    error: float
    """Its standard error."""
    age: float
    """The steps since its data were new."""

    @property
    def low(self) -> float:
        """The lower bound of v."""
        return self.v - math.hypot(self.error, _FALLS * self.age * self.v)

    @property
    def high(self) -> float:
        """The upper bound of v."""
        return self.v + math.hypot(self.error, _RISES * self.age * self.v)


class WeightParts(NamedTuple):
    """The parts of a mini-batch's weights."""

    lag: float
    """The ESS ratio of the lag part, by the lower bound of v: the smaller one of the two that the module names."""
    arithmetic: float
    """The ESS ratio that the same sequences would have if they were fresh."""
    rms: float
    """sqrt(v), of a token's log-ratio on fresh data."""
    rms_error: float
    """`rms` less the root of the lower bound of v."""


class Mismatch:
    """A measurement of v while training, and of the lag part of each mini-batch.

    v has two sources:

    - tokens that the trainer's own version of the policy sampled; the newest `TOKENS` of them;
    - tokens whose log-probs a sampler computed again with the trainer's weights. They tell how much of the squares of
      the same tokens, as sampled, is arithmetic, and this share is taken for all stale tokens. So v may depend on the
      position and on the sampler; the lag's share of the squares may not. Computing again has other kernels than
      sampling: the same comparison on fresh tokens is divided out, and without one this source says nothing.

    `bounded` makes one lower bound of both.
    """

    TOKENS, SEQUENCES, BATCHES = 2**17, 2**14, 256
    AGAIN = 2**16
    """Fresh tokens that were computed again, from which the comparison of both passes is taken."""
    ANSWERS = 4
    """Steps whose answers about stale tokens count: the lag's share of the squares moves with the policy."""

    def __init__(self) -> None:
        self._step = 0
        self._fresh: deque[tuple[int, OfTokens]] = deque(maxlen=self.BATCHES)
        self._fresh_again: deque[tuple[int, OfAgain]] = deque(maxlen=self.BATCHES)
        self._stale_again: deque[tuple[int, OfAgain]] = deque(maxlen=self.ANSWERS)
        self._newest: deque[tuple[int, OfSequences]] = deque(maxlen=self.BATCHES)
        self._first = (0.0, 0.0, 0.0)
        """Of the batch's first mini-batch: tokens, squares, and squares of fresh tokens."""

    def update(
        self,
        log_weight: Tensor,
        jump: Tensor,
        tokens: Tensor,
        squares: Tensor,
        fresh: Tensor | None,
        again: Tensor | None = None,
    ) -> WeightParts | None:
        """Take in a mini-batch. Returns its parts; None while v is unknown, or 0, or without a usable sequence.

        Args:
            log_weight: [B] log w_i; sequences where it is NaN or infinite do not count.
            jump: [B] sums of `jumps`.
            tokens: [B] numbers of response tokens.
            squares: [B] sums of `squared_log_ratios`.
            fresh: [B, 2] each sequence's number of tokens that the trainer's own version sampled, and what they have of
                `squares`. None in a mini-batch after the first of its batch, whose policy none of the samplers has had.
            again: [B, 2, 3] of the fresh and of the other tokens whose log-probs a sampler computed again with the
                trainer's weights: their number (0: none), and their squared log-ratios to the log-probs as sampled, and
                to those computed again. Sums that are not finite say nothing.
        """
        usable = log_weight.isfinite() & (tokens > 0)
        columns = (
            log_weight[usable].double(),
            jump[usable].double(),
            tokens[usable].double(),
            squares[usable].double(),
        )
        if fresh is not None:
            self._step += 1
            whole = tokens[usable].tolist()
            of_fresh = fresh[usable].tolist()
            of_parts = sum(n for (n, _), of_all in zip(of_fresh, whole, strict=True) if n < of_all)
            if seen := [(n, s) for n, s in of_fresh if n]:
                self._append(self._fresh, OfTokens.of(seen, of_parts), self.TOKENS)
            answers = [] if again is None else again[usable].transpose(0, 1).tolist()
            for window, of_kind in zip((self._fresh_again, self._stale_again), answers, strict=False):
                if parts := [(n, s, a) for n, s, a in of_kind if n and math.isfinite(s + a)]:
                    self._append(window, OfAgain.of(parts), self.AGAIN)
            if whole:
                self._first = columns[2].sum().item(), columns[3].sum().item(), sum(s for _, s in of_fresh)
        return self._parts(*columns) if usable.any() else None

    def _append(self, window: deque[tuple[int, Any]], sums: Any, enough: int) -> None:
        """Append to a window, and drop its oldest entries as long as `enough` is left without them."""
        window.append((self._step, sums))
        left = sum(_size(each) for _, each in window)
        while len(window) > 1 and (left := left - _size(window[0][1])) >= enough:
            window.popleft()

    def _parts(self, log_weight: Tensor, jump: Tensor, tokens: Tensor, squares: Tensor) -> WeightParts | None:
        self._append(self._newest, OfSequences.of(log_weight - jump, tokens, squares), self.SEQUENCES)
        v, low = bounded(self._sources(*self._first))
        if not v > 0:
            return None
        lag_variance = (squares.sum() / tokens.sum()).item() - low + _shared(_sums(self._newest))
        quotient = ess_ratio(log_weight) / expected_ess_ratio(low, tokens)
        lag = min(quotient, expected_ess_ratio(lag_variance, tokens, jump))
        return WeightParts(lag, expected_ess_ratio(v, tokens), math.sqrt(v), math.sqrt(v) - math.sqrt(low))

    def _sources(self, tokens: float, squares: float, of_fresh: float) -> list[Source]:
        """Return what tells v of a batch, from its first mini-batch's tokens, squares, and squares of fresh tokens.

        The share of arithmetic in the squares is that of the policy which the batch begins with: in later mini-batches
        the squares also have what the updates since then make of them.
        """
        sources = []
        if self._fresh:
            fresh = OfTokens(*_sums(self._fresh))
            v, of_parts = fresh.squares / fresh.tokens, fresh.of_parts / fresh.tokens
            error = math.hypot(math.sqrt(fresh.spread) / fresh.tokens, _OF_PARTS * of_parts * v)
            sources.append(Source(v, error, self._age(self._fresh)))
        if self._stale_again and self._fresh_again and tokens:
            (stale, error), (fresh_share, of_fresh_share) = (
                OfAgain(*_sums(window)).share for window in (self._stale_again, self._fresh_again)
            )
            error = math.hypot(error, of_fresh_share)
            if math.isfinite(error):
                share = (squares - of_fresh) / tokens * stale / fresh_share
                sources.append(Source(of_fresh / tokens + share, share * error, self._age(self._stale_again)))
        return sources

    def _age(self, window: Iterable[tuple[int, Any]]) -> float:
        """Return the steps since the tokens of a window were new, a mean over these."""
        ages, tokens = zip(*(((self._step - step) * sums.tokens, sums.tokens) for step, sums in window), strict=True)
        return sum(ages) / sum(tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON: a resumed run may have no fresh data to measure again."""
        windows = {name: [[step, *sums] for step, sums in window] for name, (window, _) in self._windows().items()}
        return {"step": self._step, **windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; of an older one, which has no step, the fresh tokens count."""
        self.__init__()  # type: ignore[misc]
        if "step" not in state:
            older = [[0, *sums, sums[0]] for lags in state["by_lag"] for lag, *sums in lags if lag == 0]
            state = {"step": 0, "fresh": older, "newest": [[0, *sums] for sums in state["newest"]]}
        self._step = state["step"]
        for name, (window, kind) in self._windows().items():
            window.extend((step, kind(*sums)) for step, *sums in state.get(name, ()))

    def _windows(self) -> dict[str, tuple[deque[tuple[int, Any]], Any]]:
        return {
            "fresh": (self._fresh, OfTokens),
            "fresh_again": (self._fresh_again, OfAgain),
            "stale_again": (self._stale_again, OfAgain),
            "newest": (self._newest, OfSequences),
        }


def bounded(sources: Sequence[Source]) -> tuple[float, float]:
    """Return (v of the source with the smallest error, a lower bound of v); NaN and 0 without a source.

    The bound is the highest of the sources' lower bounds where all sources agree. A source whose upper bound is below
    that contradicts it: then the bound falls from the one's upper to its lower bound, as far as they are apart.
    """
    if not sources:
        return math.nan, 0.0
    smallest = min(sources, key=lambda source: source.high)
    low = max(source.low for source in sources)
    low = max(smallest.low, min(low, 2 * smallest.high - low))
    v = min(sources, key=lambda source: source.v - source.low).v
    return max(v, low), max(0.0, low)


def _size(sums: OfTokens | OfAgain | OfSequences) -> float:
    return sums.sequences if isinstance(sums, OfSequences) else sums.tokens


def _sums(window: Iterable[tuple[int, Any]]) -> list[Any]:
    return [sum(column) for column in zip(*(sums for _, sums in window), strict=True)]


def _shared(newest: Sequence[Any]) -> float:
    """Return the variance per token that tokens of a sequence share; 0 up to its standard error."""
    _, tokens, squares, of_weights, spread = newest
    more = of_weights - squares
    return more / tokens * max(0.0, 1 - _SURE**2 * spread / more**2) if more > 0 else 0.0
