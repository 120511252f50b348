"""Lag and arithmetic are taken apart where both are known, and the step errs to the short side where they are not."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from vcpo import Mismatch, VCPOConfig, estimate
from vcpo.ess import ess_ratio
from vcpo.mismatch import (
    OfAgain,
    OfSequences,
    OfTokens,
    Source,
    WeightParts,
    _shared,
    bounded,
    expected_ess_ratio,
    jumps,
    squared_log_ratios,
)

RMS, LENGTH, BATCH = 0.03, 2000, 128
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def rows_of(log_ratio: Tensor, lag: int) -> Rows:
    """What `Mismatch.update` gets of log-ratios [B, T] of one lag."""
    squares = squared_log_ratios(log_ratio).sum(dim=1)
    tokens = torch.full((len(log_ratio),), log_ratio.shape[1])
    return log_ratio.sum(dim=1), jumps(log_ratio), tokens, squares, fresh_of(lag, tokens, squares)


def fresh_of(lag: int, tokens: Tensor, squares: Tensor) -> Tensor:
    """Sequences of one version: all of their tokens are fresh, or none."""
    return torch.stack([tokens, squares], dim=1).double() * (lag == 0)


def rows(lag: int, variance: float = 0.0, rms: float = RMS, seed: int = 0) -> Rows:
    """Those of a batch whose lag part has `variance` per token."""
    both = math.sqrt(rms**2 + variance)
    noise = torch.randn(BATCH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows_of(both * noise - both**2 / 2, lag)


def again(
    lag: int, variance: float, rms: float = RMS, of_pass: float = 0.5, seed: int = 0, batch: int = BATCH
) -> Tensor:
    """Tokens of 16 sequences, computed again by a pass whose squares are `of_pass` of those of sampling."""
    generator = torch.Generator().manual_seed(100 + seed)
    sampled, computed = torch.randn(2, 16, LENGTH, dtype=torch.float64, generator=generator).square().sum(dim=2)
    found = torch.zeros(batch, 2, 3, dtype=torch.float64)
    columns = torch.full((16,), LENGTH), sampled * (rms**2 + variance), computed * of_pass * rms**2
    found[:16, int(lag != 0)] = torch.stack([column.double() for column in columns], dim=1)
    return found


def factor(parts: WeightParts | None, log_weight: Tensor, part: str = "lag") -> float:
    """The factor of the learning rate."""
    config = VCPOConfig(baseline="mean", ess_part=part)  # type: ignore[arg-type]  # it takes strings as well
    reward, group = torch.arange(len(log_weight)) % 2, torch.arange(len(log_weight)) // 8
    return estimate(config, log_weight, reward, group, lag_ess_ratio=parts and parts.lag).step_size_multiplier


@pytest.mark.parametrize("ratio", [1.0, 0.8, 0.5, 0.3])
def test_the_parts_of_stale_data_are_found(ratio: float) -> None:
    mismatch, stale = Mismatch(), rows(8, -math.log(ratio) / LENGTH, seed=1)
    fresh, parts = mismatch.update(*rows(0)), mismatch.update(*stale)
    assert fresh is not None and fresh.lag > 0.95 and parts is not None
    assert abs(parts.rms - RMS) < 4 * parts.rms_error < 0.04 * RMS
    assert parts.arithmetic == pytest.approx(math.exp(-LENGTH * RMS**2), abs=0.12)
    assert math.sqrt(parts.lag) == pytest.approx(math.sqrt(ratio), rel=0.15)
    assert ess_ratio(stale[0]) < 0.6 * parts.lag, "the whole says something else"


def walked(steps: int, of: str) -> list[float]:
    """The factors on a walk from one end of a quantity to the other: the same draws, in equal steps."""
    noise, other, drift = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factors = []
    for at in torch.linspace(0, 1, steps).tolist():
        length, rms, jump, of_pass = 1000, 0.03, 0.0, 1.0
        if of == "v":
            rms = 1e-4 * 2000**at
        if of == "length":
            length = 20 + 980 * at
        if of == "jump":
            jump = 4 * at
        if of == "again":
            of_pass = 0.2 + 1.8 * at
        mismatch, tokens = Mismatch(), torch.full((64,), float(length), dtype=torch.float64)
        tail = torch.zeros(64, 1, dtype=torch.float64)
        tail[:4] = jump
        for lag, log_weight in ((0, rms * noise), (8, rms * other + 0.025 * drift + tail[:, 0] / length**0.5)):
            squares = length * (rms**2 + (0.025**2 if lag else 0)) * (1 + 0.05 * noise)
            columns = log_weight * length**0.5, jumps(tail), tokens, squares + squared_log_ratios(tail)[:, 0]
            computed = again(lag, 0.025**2, rms, of_pass if lag else 1.0, batch=64)
            parts = mismatch.update(*columns, fresh_of(lag, tokens, squares), computed)
        factors.append(factor(parts, columns[0]))
    return factors


@pytest.mark.parametrize("of", ["v", "length", "jump", "again"])
def test_the_factor_never_jumps(of: str) -> None:
    """v and lengths from where arithmetic is nothing to where it is all; a tail from none; sources that contradict."""
    coarse, fine = (torch.tensor(walked(steps, of)).diff().abs().max().item() for steps in (40, 160))
    assert fine < 0.6 * coarse + 0.002 and fine < 0.05


def test_a_tail_is_no_normal_part() -> None:
    """One token at +3 in 5 % of the responses: normal weights of the same squares would have an ESS ratio of 0.9."""
    mismatch, (log_weight, jump, *columns) = Mismatch(), rows(8, seed=1)
    mismatch.update(*rows(0))
    tail = 3.0 * (torch.arange(BATCH) % 20 == 0)
    parts = mismatch.update(log_weight + tail, jump + tail, *columns)
    right = ess_ratio(tail)
    assert parts is not None and 0.7**2 * right < parts.lag < 1.1**2 * right < 0.3


def test_where_arithmetic_is_nothing_the_step_is_that_of_the_whole() -> None:
    mismatch = Mismatch()
    mismatch.update(*rows(0, rms=1e-4))
    stale = rows(8, 1e-3, 1e-4, seed=1)
    assert factor(mismatch.update(*stale), stale[0]) == pytest.approx(factor(None, stale[0], "whole"), rel=1e-4)
    assert Mismatch().update(*rows(0, rms=0)) is None


def test_only_the_rule_reads_the_lag_part_and_never_steps_shorter_for_it() -> None:
    log_weight = torch.tensor([0.0, 1.0, 2.0, 0.0])
    whole = math.sqrt(ess_ratio(log_weight))
    for part, ratio, wanted in (("whole", 0.9, whole), ("lag", 0.1, whole), ("lag", 0.9, math.sqrt(0.9))):
        assert factor(WeightParts(ratio, 1.0, 0.1, 0.0), log_weight, part) == wanted


def test_an_old_measurement_ends_as_the_whole() -> None:
    """v may fall unseen: after 134 steps the lower bound is 0."""
    mismatch, stale = Mismatch(), rows(8, 3e-4, seed=1)
    mismatch.update(*rows(0))
    factors = [factor(mismatch.update(*stale), stale[0]) for _ in range(134)]
    assert factors[0] > 1.5 * factors[-1] == pytest.approx(1.5 * factor(None, stale[0], "whole"))
    assert factors == sorted(factors, reverse=True)


def test_the_bound_of_several_sources() -> None:
    """The highest lower bound of those that agree; from the smallest one's upper to its lower bound, if they do not."""
    assert bounded([Source(1.0, 0.1, 0)]) == (1.0, 0.9)
    assert bounded([Source(1.0, 0.1, 0), Source(0.9, 0.3, 0)]) == (1.0, 0.9)
    v, low = bounded([Source(1.0, 0.1, 0), Source(0.8, 0.05, 0)])
    assert (v, low) == pytest.approx((0.8, 0.8)), "they are apart by 0.05"
    assert bounded([Source(2.0, 0.1, 0), Source(0.8, 0.05, 0)]) == (0.8, 0.75)
    assert bounded([Source(1.0, 0.0, 20)]) == (1.0, 0.85) and bounded([Source(1.0, 0.0, 200)]) == (1.0, 0.0)
    assert bounded([Source(1.0, 0.0, 24), Source(1.9, 0.01, 0)]) == (1.9, 1.89), "v may have risen since"
    of_both = (bounded([Source(1.0, 0.05, 10), Source(1.2, error, 0)])[1] for error in (0.0900, 0.0902))
    assert next(of_both) == pytest.approx(next(of_both), rel=0.01), "whichever of them is the surer one"
    v, low = bounded([])
    assert math.isnan(v) and low == 0


def test_tokens_computed_again_follow_arithmetic_that_changes() -> None:
    """A pass has half the square of sampling: the first batch says so. Then v falls to a half, and all is stale."""
    mismatch = Mismatch()
    mismatch.update(*rows(0), again(0, 0.0))
    for seed in range(1, 9):
        stale = rows(8, 3e-4, RMS * math.sqrt(0.5), seed=seed)
        parts = mismatch.update(*stale, again(8, 3e-4, RMS * math.sqrt(0.5), seed=seed))
    assert parts is not None and parts.rms == pytest.approx(RMS * math.sqrt(0.5), rel=0.03)
    assert 0.7 < factor(parts, stale[0]) / math.exp(-3e-4 * LENGTH / 2) < 1.1
    one = torch.zeros(BATCH, 2)
    one[0] = torch.tensor([1, 1e-3])
    later = mismatch.update(*stale[:4], one)
    assert later is not None and later.rms == pytest.approx(parts.rms, rel=0.03), "one fresh token throws nothing away"


def test_a_later_mini_batch_has_the_arithmetic_of_the_first() -> None:
    """Its squares have what the updates since then made of them, which no sampler was asked about."""
    mismatch = Mismatch()
    answers = again(0, 0.0)
    answers[20, 0] = torch.tensor([10, math.nan, 1.0])  # the sum says nothing
    mismatch.update(*rows(0), answers)
    mismatch.update(*rows(8, 1e-4), again(8, 1e-4))
    *later, _ = rows(8, 6e-4, seed=2)
    parts = mismatch.update(*later, None)
    assert parts is not None and parts.rms == pytest.approx(RMS, rel=0.03)
    assert 0.7 < factor(parts, later[0]) / math.exp(-6e-4 * LENGTH / 2) < 1.1


@pytest.mark.parametrize("beyond", [0.8, 1.25])
def test_arithmetic_may_differ_beyond_the_tokens_that_are_computed_again(beyond: float) -> None:
    """The share of arithmetic among the squares is taken along, not the square itself: here of twice as many tokens."""
    mismatch = Mismatch()
    mismatch.update(*rows(0), again(0, 0.0))
    mismatch.update(*rows(8, 1e-4), again(8, 1e-4))
    _, source = mismatch._sources(1000.0, 1000 * beyond * (RMS**2 + 1e-4), of_fresh=0.0)
    assert source.v == pytest.approx(beyond * RMS**2, rel=0.05) and 0 < source.error < 0.05 * source.v


def test_without_a_comparison_on_fresh_tokens_nothing_is_known_of_a_pass() -> None:
    mismatch = Mismatch()
    assert mismatch.update(*rows(8, 3e-4), again(8, 3e-4)) is None
    assert OfAgain.of([(5, 1.0, 2.0)]).share[1] == math.inf, "one sequence shows no spread"
    share, error = OfAgain.of([(5, 1.0, 2.0), (5, 3.0, 4.0)]).share
    assert share == 1.5 and error == pytest.approx(math.sqrt(2 * (0.5**2 + 0.5**2)) / 6)


def test_fresh_ends_of_stale_responses_are_not_trusted_alone() -> None:
    mismatch, (*columns, _) = Mismatch(), rows(8)
    parts = mismatch.update(*columns, torch.tensor([[16, 16 * RMS**2]], dtype=torch.float64).repeat(BATCH, 1))
    assert parts is not None and parts.rms == pytest.approx(RMS)
    assert (parts.rms - parts.rms_error) ** 2 == pytest.approx(0.75 * RMS**2)


def test_what_tokens_of_a_response_share_counts() -> None:
    """Tokens alone are blind to a drift that is the same at all tokens of a response."""
    mismatch, spread = Mismatch(), math.sqrt(math.log(2))
    mismatch.update(*rows(0))
    for seed in range(1, 9):
        log_weight, *columns = rows(8, seed=seed)
        shared = spread * torch.randn(BATCH, generator=torch.Generator().manual_seed(seed)) - spread**2 / 2
        parts = mismatch.update(log_weight + shared, *columns)
    assert parts is not None and parts.lag == pytest.approx(0.5, abs=0.15)
    assert _shared([4, 100, 1.0, 4.0, 1.0]) == pytest.approx(0.03 * (1 - 1 / 9)), "3 more, with an error of 1"
    assert _shared([4, 100, 1.0, 1.9, 1.0]) == 0 == _shared([4, 100, 4.0, 1.0, 0.0])


def test_sums_over_sequences_of_different_lengths() -> None:
    """By hand: the mean of a token is 0.5, so the log-weights are off by 1.5, -1 and -0.5."""
    log_weight, tokens, squares = torch.tensor([[2.0, 0, 1], [1, 2, 3], [0.375, 0.5, 0.375]])
    sums = OfSequences.of(log_weight, tokens, squares)
    assert sums[:4] == (3, 6.0, 1.25, 1.5 * (2.25 + 1 + 0.25))
    assert sums.spread == pytest.approx((3 - 2 / 3) ** 2 + (1 - 4 / 3) ** 2 + (0 - 2) ** 2)
    assert OfSequences.of(log_weight[:1], tokens[:1], squares[:1]) == (1, 1.0, 0.375, 0.375, 0.0)
    assert OfTokens.of([(4, 3.0)], 4) == (4, 3.0, 9.0, 4) and OfTokens.of([(4, 3.0), (2, 0.0)], 0) == (6, 3.0, 2.0, 0)


def test_until_a_version_is_known_nothing_is() -> None:
    mismatch, (*columns, fresh) = Mismatch(), rows(0)
    assert mismatch.update(*columns, torch.zeros_like(fresh)) is None
    assert mismatch.update(*columns, None) is None
    assert mismatch.update(*rows(8)) is None
    assert mismatch.update(*columns, fresh) is not None
    assert mismatch.update(columns[0] * torch.nan, *columns[1:], fresh) is None


def test_sequences_without_a_token_or_a_weight_do_not_count() -> None:
    def parts(more: list[float]) -> Any:
        mismatch = Mismatch()
        for lag in (0, 8):
            *columns, fresh = rows(lag, 3e-4)
            ends = torch.tensor([more, [0.0] * len(more), [0.0, 5.0][: len(more)], [0.0] * len(more)])
            with_ends = map(torch.cat, zip(columns, ends, strict=True))
            found = mismatch.update(*with_ends, torch.cat([fresh, torch.zeros(len(more), 2)]))  # type: ignore[call-arg]
        return found

    assert parts([0.0, math.nan]) == parts([])


def test_windows_are_as_long_as_they_have_to_be() -> None:
    mismatch, tokens, squares = Mismatch(), torch.full((2**11,), 64), torch.full((2**11,), 0.1)
    answers = torch.zeros(2**11, 2, 3)
    answers[0, 1] = torch.tensor([2**14, 1.0, 1.0])
    for _ in range(12):
        fresh = fresh_of(0, tokens, squares)
        mismatch.update(torch.zeros(2**11), torch.zeros(2**11), tokens, squares, fresh, answers)
    state = mismatch.state_dict()
    assert [len(state[name]) for name in ("fresh", "newest", "stale_again", "fresh_again")] == [1, 8, 4, 0]


def test_a_resumed_run_has_the_same_numbers() -> None:
    straight, saved = Mismatch(), Mismatch()
    for mismatch in (straight, saved):
        mismatch.update(*rows(0), again(0, 0.0))
        mismatch.update(*rows(3, 1e-4, seed=1), again(3, 1e-4))
    resumed = Mismatch()
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert resumed.update(*rows(3, 1e-4, seed=2)) == straight.update(*rows(3, 1e-4, seed=2))
    assert resumed.state_dict() == straight.state_dict()


def test_a_checkpoint_of_an_older_release_tells_its_fresh_tokens() -> None:
    old = {
        "by_lag": [[[0, 1000, 0.9, 1e-6], [3, 1000, 2.0, 1e-6]], [[3, 1000, 2.0, 1e-6]]],
        "fresh": [[4, 100.0, 1.0, 4.0, 0.5]],
        "newest": [[128, 2.0**18, 236.0, 236.0, 1.0]],
        "again": [[1000, 1.0, 0.1]],
        "of_sampling": [1.0, 0.1],
    }
    mismatch = Mismatch()
    mismatch.load_state_dict(json.loads(json.dumps(old)))
    parts = mismatch.update(*rows(8, 3e-4))
    assert parts is not None and parts.rms == pytest.approx(0.03)


def test_squares_and_jumps_of_tokens() -> None:
    log_ratio = torch.tensor([[-0.5, 0.75, -6.0, 0.0]])
    assert squared_log_ratios(log_ratio).tolist() == [[0.25, 0.375**2, 0.0, 0.0]]
    assert jumps(log_ratio).tolist() == [-6.0 + 0.375]


def test_the_expected_ratio_is_that_of_the_batchs_own_lengths_and_size() -> None:
    assert expected_ess_ratio(0.0, torch.ones(4)) == 1.0 == expected_ess_ratio(1.0, torch.ones(0))
    assert expected_ess_ratio(-1.0, torch.ones(2), torch.tensor([0.0, -30.0])) == pytest.approx(0.5)
    assert expected_ess_ratio(1e-3, torch.full((4096,), 700.0)) == pytest.approx(math.exp(-0.7), rel=0.05)
    found = [expected_ess_ratio(each, torch.ones(64)) for each in (2.0, 5.0, 16.0)]
    assert found == pytest.approx([0.254, 0.112, 0.047], rel=0.04), "12 draws were up to 13 % short"
