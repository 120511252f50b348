"""The two parts of importance weights: what the lag makes of them, and what arithmetic makes of them.

Sampler and trainer compute the same policy in different arithmetic. The log-weight of a fresh sequence is therefore a
sum of as many small differences as the sequence has tokens, and the ESS ratio falls with length without any lag. Two
numbers per token tell the parts apart: v, the mean square of a token's log-ratio on fresh data, and u, what stale data
has above v. The ESS ratio of the lag part alone follows from u and the lengths of the sequences.

No paper has this rule. `python -m lab.long_responses` compares it with the truth on data whose parts are known.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vcpo.ess import ess_ratio
from vcpo.importance import log_ratios

_LARGEST_LOG_RATIO = 1.0
"""The log-ratio at which one token counts as much as it can: that of a token which the policy has left has no bound,
and says no more about the spread of the weights."""
_DRAWS = 12
_PRECISE = 0.02
"""The relative standard error from which on v is taken from fresh tokens alone, without those of other lags."""
_SURE, _SURE_FRESH = 2.0, 3.0
"""The standard errors above which sequences say more than their tokens. Fresh sequences need more: a lag-k run may have
one batch of them, and its error stays for the whole run."""
NEGLIGIBLE = 0.99
"""The ESS ratio of arithmetic alone from which on there is nothing to take apart."""

Span = tuple[int, int, float]
"""Tokens of one sequence that one policy version sampled: (lag, number of tokens, sum of squared log-ratios)."""


def squared_log_ratios(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return d^2 of each token, d = log pi - log mu cut at 1 to both sides: [B, T] float64, 0 outside the mask.

    Arguments: see `vcpo.importance.sequence_log_weights`.
    """
    log_ratio = log_ratios(log_prob, rollout_log_prob, mask)
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).square()


def expected_ess_ratio(variance: float, tokens: Tensor) -> float:
    """Return the ESS ratio that weights exp(sqrt(u L_i) z_i - u L_i / 2) have on average, with normal z.

    The draws are the same at every call, so every rank and every resumed run gets the same number.

    Args:
        variance: u, of the logarithm of a weight per token.
        tokens: [B] L_i.
    """
    if variance <= 0 or tokens.numel() == 0:
        return 1.0
    z = torch.randn(_DRAWS, tokens.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    of_sequence = variance * tokens.double()
    return sum(ess_ratio(row) for row in of_sequence.sqrt() * z - of_sequence / 2) / _DRAWS


class OfLag(NamedTuple):
    """Sums over the tokens of one lag."""

    tokens: int = 0
    squares: float = 0.0
    spread: float = 0.0
    """Sum over sequences of (sum of squares - tokens * mean square)^2: a standard error without independent tokens."""

    @property
    def relative_error(self) -> float:
        """The standard error of the mean square, relative to it; infinite where that is 0."""
        return math.sqrt(self.spread) / self.squares if self.squares else math.inf


class OfSequences(NamedTuple):
    """Sums over whole sequences, which see what the tokens of a sequence share."""

    sequences: int
    tokens: float
    squares: float
    """Sum of the tokens' squared log-ratios: what the next field is where tokens are independent."""
    of_weights: float
    """Sum of (log w_i - L_i * mean log-ratio of a token)^2."""
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


class WeightParts(NamedTuple):
    """The parts of a mini-batch's weights."""

    lag: float | None
    """The ESS ratio of the lag part; None where arithmetic hardly counts, and the measured ratio is that of the lag."""
    arithmetic: float
    """The ESS ratio that the same sequences would have if they were fresh."""
    rms: float
    """sqrt(v), of a token's log-ratio on fresh data."""
    rms_error: float
    """The standard error of `rms`."""


class Mismatch:
    """A measurement of v while training, and of the lag part of each mini-batch.

    v comes from the newest tokens that the trainer's own version of the policy sampled; `TOKENS` of them, however many
    batches have them. Where these are too few, and tokens of three lags or more are there, v is what the mean square
    falls to at lag 0. Until a newer batch tells v, the old value stays.

    Batches with few fresh tokens have another source: tokens whose log-probs a sampler computed again with the
    trainer's weights. That is done in one pass, by other kernels than sampling. Therefore the mean square is multiplied
    by the ratio of both mean squares on a batch of fresh tokens, and takes the place of the first source only where
    both differ by more than two standard errors.
    """

    TOKENS, SEQUENCES, BATCHES = 2**20, 2**14, 256
    AGAIN = 2**17
    """Tokens whose log-probs were computed again, from which v is taken."""

    def __init__(self) -> None:
        self._by_lag: deque[dict[int, OfLag]] = deque(maxlen=self.BATCHES)
        self._again: deque[OfLag] = deque(maxlen=self.BATCHES)
        self._of_sampling: tuple[float, float] | None = None
        """The mean square of tokens as they were sampled, relative to that of tokens computed again, and the relative
        error of this ratio; None as long as no batch of fresh tokens was computed again."""
        self._fresh: deque[OfSequences] = deque(maxlen=self.BATCHES)
        self._newest: deque[OfSequences] = deque(maxlen=self.BATCHES)

    def update(
        self,
        log_weight: Tensor,
        tokens: Tensor,
        squares: Tensor,
        spans: Sequence[Sequence[Span]] | None,
        again: Sequence[tuple[int, float]] = (),
    ) -> WeightParts | None:
        """Take in a mini-batch. Returns its parts; None while v is unknown, or 0, or without a usable sequence.

        Args:
            log_weight: [B] log w_i; sequences where it is NaN or infinite do not count.
            tokens: [B] numbers of response tokens.
            squares: [B] sums of `squared_log_ratios`.
            spans: of each sequence, the tokens whose version is known; None in a mini-batch after the first of its
                batch, whose policy none of the samplers has had.
            again: of some sequences, the number of tokens whose log-probs a sampler computed again with the trainer's
                weights, and the sum of `squared_log_ratios` with these.
        """
        usable = log_weight.isfinite() & (tokens > 0)
        columns = log_weight[usable].double(), tokens[usable].double(), squares[usable].double()
        if spans is not None:
            self._take_spans([spans[i] for i in usable.nonzero().flatten().tolist()], again, *columns)
        if not usable.any():
            return None
        self._newest.append(OfSequences.of(*columns))
        _shorten(self._newest, [each.sequences for each in self._newest], self.SEQUENCES)
        return self._parts(columns[1])

    def _take_again(self, again: Sequence[tuple[int, float]], fresh: OfLag | None) -> None:
        """Take in tokens computed again; where the batch has as many fresh ones, these are the better source."""
        sums = _of_lags([[(0, *of_sequence)] for of_sequence in again]).get(0)
        if fresh is not None and fresh.tokens >= (sums.tokens if sums else 1):
            self._again.clear()
            if sums and sums.squares > 0:
                ratio = (fresh.squares / fresh.tokens) / (sums.squares / sums.tokens)
                error = math.hypot(fresh.relative_error, sums.relative_error)
                if self._of_sampling is None or error < self._of_sampling[1]:
                    self._of_sampling = ratio, error
        elif sums:
            self._again.append(sums)
            _shorten(self._again, [each.tokens for each in self._again], self.AGAIN)

    def _take_spans(
        self,
        spans: list[Sequence[Span]],
        again: Sequence[tuple[int, float]],
        log_weight: Tensor,
        tokens: Tensor,
        squares: Tensor,
    ) -> None:
        of_lags = _of_lags(spans)
        self._take_again(again, of_lags.get(0))
        if 0 in of_lags or len(of_lags) > 2:
            self._by_lag.append(of_lags)
            sizes = [(each.get(0, OfLag()).tokens if len(each) < 3 else _tokens(each)) for each in self._by_lag]
            _shorten(self._by_lag, sizes, self.TOKENS)
        fresh = (sum(n for lag, n, _ in of_sequence if lag == 0) for of_sequence in spans)
        whole = torch.tensor(list(fresh), dtype=torch.float64) == tokens
        if whole.any():
            self._fresh.append(OfSequences.of(log_weight[whole], tokens[whole], squares[whole]))
            _shorten(self._fresh, [each.sequences for each in self._fresh], self.SEQUENCES)

    def _parts(self, tokens: Tensor) -> WeightParts | None:
        v, error = self.mean_square()
        if not v > 0:
            return None
        newest, of_fresh = self._newest[-1], _shared(self._fresh, _SURE_FRESH)
        arithmetic = expected_ess_ratio(v + of_fresh, tokens)
        lag = None
        if arithmetic < NEGLIGIBLE:
            u = newest.squares / newest.tokens - v + _shared(self._newest, _SURE) - of_fresh
            lag = expected_ess_ratio(u, tokens)
        return WeightParts(lag, arithmetic, math.sqrt(v), error / (2 * math.sqrt(v)))

    def mean_square(self) -> tuple[float, float]:
        """Return (v, its standard error); NaN where v is unknown."""
        v, error = self._of_versions()
        if not self._again or (self._of_sampling is None and v > 0):
            return v, error
        again = OfLag(*(sum(column) for column in zip(*self._again, strict=True)))
        ratio, of_ratio = self._of_sampling or (1.0, 0.0)
        newer = ratio * again.squares / again.tokens
        of_newer = newer * math.hypot(of_ratio, again.relative_error) if newer else 0.0
        return (v, error) if abs(newer - v) <= 2 * math.hypot(error, of_newer) else (newer, of_newer)

    def _of_versions(self) -> tuple[float, float]:
        """Return (v, its standard error) by tokens whose version is known; NaN where that is too little."""
        of_lags = _pooled(self._by_lag)
        unknown = (math.nan, math.nan)
        fresh = of_lags.get(0)
        v, error = unknown if fresh is None else (fresh.squares / fresh.tokens, math.sqrt(fresh.spread) / fresh.tokens)
        if error <= _PRECISE * v or len(of_lags) < 3:
            return v, error
        return _intercept(of_lags)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON: a resumed run may have no fresh data to measure again."""
        by_lag = [[[lag, *sums] for lag, sums in each.items()] for each in self._by_lag]
        windows: dict[str, deque[Any]] = {"fresh": self._fresh, "newest": self._newest, "again": self._again}
        named = {name: [list(sums) for sums in window] for name, window in windows.items()}
        return {"by_lag": by_lag, **named, "of_sampling": self._of_sampling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.__init__()  # type: ignore[misc]
        self._by_lag.extend({lag: OfLag(*sums) for lag, *sums in each} for each in state["by_lag"])
        self._fresh.extend(OfSequences(*each) for each in state["fresh"])
        self._newest.extend(OfSequences(*each) for each in state["newest"])
        self._again.extend(OfLag(*sums) for sums in state.get("again", ()))  # older checkpoints have neither
        ratio = state.get("of_sampling")
        self._of_sampling = (ratio[0], ratio[1]) if ratio else None


def _shorten(window: deque[Any], sizes: list[int], enough: int) -> None:
    """Drop the oldest entries as long as `enough` is left without them."""
    left = sum(sizes)
    for size in sizes[:-1]:
        left -= size
        if left < enough:
            return
        window.popleft()


def _tokens(of_lags: dict[int, OfLag]) -> int:
    return sum(each.tokens for each in of_lags.values())


def _of_lags(spans: list[Sequence[Span]]) -> dict[int, OfLag]:
    by_lag: dict[int, list[tuple[int, float]]] = {}
    for lag, tokens, squares in itertools.chain.from_iterable(spans):
        if tokens:
            by_lag.setdefault(lag, []).append((tokens, squares))
    out = {}
    for lag, parts in sorted(by_lag.items()):
        tokens, squares = sum(n for n, _ in parts), math.fsum(s for _, s in parts)
        # One sequence shows no spread: its whole square is taken for it.
        spread = math.fsum((s - n * squares / tokens) ** 2 for n, s in parts) if len(parts) > 1 else squares**2
        out[lag] = OfLag(tokens, squares, spread)
    return out


def _pooled(window: Iterable[dict[int, OfLag]]) -> dict[int, OfLag]:
    pooled: dict[int, OfLag] = {}
    for of_lags in window:
        for lag, sums in of_lags.items():
            pooled[lag] = OfLag(*map(sum, zip(pooled.get(lag, OfLag()), sums, strict=True)))  # type: ignore[arg-type]
    return pooled


def _shared(window: Iterable[OfSequences], errors: float) -> float:
    """Return the variance per token that tokens of a sequence share; 0 up to so many standard `errors` of it."""
    _, tokens, squares, of_weights, spread = map(sum, zip(*window, strict=True)) if window else (0,) * 5
    more = (of_weights - squares) / tokens if tokens else 0.0
    return more * max(0.0, 1 - errors**2 * spread / (more * tokens) ** 2) if more else 0.0


def _intercept(of_lags: dict[int, OfLag]) -> tuple[float, float]:
    """Return (v, its standard error) of the best v + b lag + c lag^2 whose b and c are not negative: a lag adds.

    Drift adds up as lag where updates are independent, and as lag^2 where they all go one way.
    """
    lag = torch.tensor(list(of_lags), dtype=torch.float64)
    sums = list(of_lags.values())
    tokens, squares, spread = (torch.tensor(each, dtype=torch.float64) for each in zip(*sums, strict=True))
    mean, best = squares / tokens, (math.inf, math.nan, math.nan)
    per_token = spread.sum() / tokens.sum()
    for powers in ((0,), (0, 1), (0, 2), (0, 1, 2)):
        x = torch.stack([lag**p for p in powers], dim=-1)  # [lags, powers]
        inverse = torch.linalg.inv(x.T @ (tokens[:, None] * x))
        fitted = inverse @ x.T @ squares
        if (fitted[1:] < 0).any():
            continue
        loss = (tokens * (mean - x @ fitted).square()).sum().item()
        error = math.sqrt((inverse[0, 0] * per_token).item())
        best = min(best, (loss, fitted[0].item(), error))
    return best[1:]
