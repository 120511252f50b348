"""Lag and arithmetic are taken apart where both are known, and only there."""

import json
import math
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from vcpo import Mismatch, VCPOConfig, estimate
from vcpo.ess import ess_ratio
from vcpo.mismatch import (
    OfLag,
    OfSequences,
    Span,
    _intercept,
    _of_lags,
    _shared,
    _shorten,
    expected_ess_ratio,
    squared_log_ratios,
)

RMS, LENGTH, BATCH = 0.03, 2000, 128
Rows = tuple[Tensor, Tensor, Tensor, list[list[Span]]]


def rows(lag: int, variance: float = 0.0, rms: float = RMS, seed: int = 0) -> Rows:
    """What `Mismatch.update` gets of a batch of one lag, whose lag part has `variance` per token."""
    generator = torch.Generator().manual_seed(seed)
    both = math.sqrt(rms**2 + variance)
    log_ratio = both * torch.randn(BATCH, LENGTH, dtype=torch.float64, generator=generator) - both**2 / 2
    squares = squared_log_ratios(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio)).sum(dim=1)
    spans: list[list[Span]] = [[(lag, LENGTH, each)] for each in squares.tolist()]
    return log_ratio.sum(dim=1), torch.full((BATCH,), LENGTH), squares, spans


def with_windows(**windows: list[Any]) -> Mismatch:
    """Return a measurement that has taken in these sums, as `state_dict` names them."""
    mismatch = Mismatch()
    mismatch.load_state_dict({**mismatch.state_dict(), **windows})
    return mismatch


@pytest.mark.parametrize("ratio", [1.0, 0.8, 0.5, 0.3])
def test_the_parts_of_stale_data_are_found(ratio: float) -> None:
    mismatch, stale = Mismatch(), rows(8, -math.log(ratio) / LENGTH, seed=1)
    fresh = mismatch.update(*rows(0))
    parts = mismatch.update(*stale)
    assert fresh is not None and fresh.lag == 1.0 and parts is not None and parts.lag is not None
    assert abs(parts.rms - RMS) < 4 * parts.rms_error < 0.04 * RMS
    assert parts.arithmetic == pytest.approx(math.exp(-LENGTH * RMS**2), abs=0.12)
    assert math.sqrt(parts.lag) == pytest.approx(math.sqrt(ratio), abs=0.08)
    assert ess_ratio(stale[0]) < 0.6 * parts.lag, "the whole says something else"


@pytest.mark.parametrize("rms", [0.0, 1e-6, 1e-3], ids=str)
def test_without_arithmetic_the_step_is_that_of_the_whole_to_the_digit(rms: float) -> None:
    mismatch = Mismatch()
    mismatch.update(*rows(0, rms=rms))
    stale = rows(8, 1e-3, rms, seed=1)
    parts = mismatch.update(*stale)
    assert (parts is None) == (rms == 0) and (parts is None or parts.lag is None)
    reward, group = torch.arange(BATCH) % 2, torch.arange(BATCH) // 8
    of_lag = VCPOConfig(baseline="mean", ess_part="lag")  # type: ignore[arg-type]  # it takes strings as well
    whole = VCPOConfig(baseline="mean")  # type: ignore[arg-type]
    steps = [
        estimate(config, stale[0], reward, group, lag_ess_ratio=parts and parts.lag).step_size_multiplier
        for config in (whole, of_lag)
    ]
    assert steps[0] == steps[1] < 0.9


def test_only_the_rule_reads_the_lag_part_and_never_steps_shorter_for_it() -> None:
    arguments = torch.tensor([0.0, 1.0, 2.0, 0.0]), torch.arange(4) % 2, torch.zeros(4)

    def factor(part: str, ratio: float) -> float:
        config = VCPOConfig(baseline="mean", ess_part=part)  # type: ignore[arg-type]
        return estimate(config, *arguments, lag_ess_ratio=ratio).step_size_multiplier

    whole = math.sqrt(ess_ratio(arguments[0]))
    assert factor("whole", 0.9) == whole == factor("lag", 0.1) < factor("lag", 0.9) == math.sqrt(0.9)


def test_what_tokens_of_a_response_share_counts() -> None:
    """Tokens alone are blind to a drift that is the same at all tokens of a response."""
    mismatch, spread = Mismatch(), math.sqrt(math.log(2))
    mismatch.update(*rows(0))
    for seed in range(1, 9):
        log_weight, tokens, squares, spans = rows(8, seed=seed)
        shared = spread * torch.randn(BATCH, generator=torch.Generator().manual_seed(seed)) - spread**2 / 2
        parts = mismatch.update(log_weight + shared, tokens, squares, spans)
    assert parts is not None and parts.lag == pytest.approx(0.5, abs=0.15)


def test_sums_over_sequences_of_different_lengths() -> None:
    """By hand: the mean of a token is 0.5, so the log-weights are off by 1.5, -1 and -0.5."""
    log_weight, tokens, squares = torch.tensor([[2.0, 0, 1], [1, 2, 3], [0.375, 0.5, 0.375]])
    sums = OfSequences.of(log_weight, tokens, squares)
    assert sums[:4] == (3, 6.0, 1.25, 1.5 * (2.25 + 1 + 0.25))
    assert sums.spread == pytest.approx((3 - 2 / 3) ** 2 + (1 - 4 / 3) ** 2 + (0 - 2) ** 2)
    alone = OfSequences.of(log_weight[:1], tokens[:1], squares[:1])
    assert alone == (1, 1.0, 0.375, 0.375, 0.0), "one sequence has no spread, and adds none to a window"


def test_two_sequences_have_a_spread_and_tokens_are_counted_one_by_one() -> None:
    """The mean of a token is 0.5: the log-weights are off by 0.5 and -0.5. float32 has no 2^24 + 1."""
    sums = OfSequences.of(*torch.tensor([[1.0, 0], [1, 1], [0.25, 0.25]]))
    assert sums == (2, 2.0, 0.5, 2 * 2 * 0.25, 0.0)
    mismatch = Mismatch()
    mismatch.update(torch.zeros(2), torch.tensor([2.0**24, 1]), torch.zeros(2), None)
    assert mismatch._newest[-1].tokens == 2**24 + 1
    log_weight = torch.tensor([2.0**25 + 2**-20, 0], dtype=torch.float64)
    mismatch.update(log_weight, torch.ones(2), torch.tensor([2.0**24, 1]), None)
    assert mismatch._newest[-1].of_weights == 4 * (2.0**24 + 2**-21) ** 2, "log-weights keep their digits"
    assert mismatch._newest[-1].squares == 2**24 + 1
    mismatch.update(torch.tensor([2.0**24, 1]), torch.ones(2), torch.zeros(2), None)
    assert mismatch._newest[-1].of_weights == (2**24 - 1) ** 2, "also where they come in float32"


def test_a_response_without_a_token_does_not_count() -> None:
    def parts(empty: int) -> Any:
        mismatch = Mismatch()
        for lag in (0, 8):
            *columns, spans = rows(lag, 3e-4)
            more = [torch.cat([column, torch.zeros(empty, dtype=column.dtype)]) for column in columns]
            found = mismatch.update(more[0], more[1], more[2], spans + [[]] * empty)
        return found

    assert parts(empty=BATCH) == parts(empty=0)


def test_what_is_shared_is_less_where_its_error_is_large() -> None:
    """Independent tokens would have 1, these have 4: 0.03 more per token. The root of the spread is the error of 3."""
    window = [OfSequences(sequences=4, tokens=100, squares=1.0, of_weights=4.0, spread=2.25)]
    assert [_shared(window, errors) for errors in (0, 1, 2, 3)] == pytest.approx([0.03, 0.0225, 0, 0])
    assert _shared([OfSequences(1, 10, 1.0, 1.0, 0.0)], 2) == 0 == _shared([], 2), "one sequence shows nothing shared"


@pytest.mark.parametrize("power", [1, 1.5, 2])
@pytest.mark.parametrize("smallest", [0, 1])
def test_the_square_at_lag_0_follows_from_other_lags(power: float, smallest: int) -> None:
    of_lags = {lag: OfLag(1000, 1000 * (1e-3 + 1e-5 * lag**power), 1.0) for lag in range(smallest, 9)}
    v, error = _intercept(of_lags)
    assert v == pytest.approx(1e-3, rel=0.01) and error > 0


def test_a_square_that_does_not_grow_with_the_lag_is_arithmetic() -> None:
    of_lags = {lag: OfLag(1000, 1000 * square, 1.0) for lag, square in ((1, 3.0), (2, 2.0), (3, 1.0))}
    assert _intercept(of_lags) == pytest.approx((2.0, math.sqrt(3) / 3000)), "three sums of 1, and 3,000 tokens"


def test_a_straight_and_a_bent_curve_are_both_tried_and_the_nearer_one_is_taken() -> None:
    """By weighted least squares: where the line falls, the bent curve may grow; and a negative v stays."""

    def v(*of_lags: tuple[int, int, float]) -> float:
        return _intercept({lag: OfLag(tokens, tokens * square, 1.0) for lag, tokens, square in of_lags})[0]

    assert v((0, 1, 2.0), (1, 1, 1.0), (2, 1, 1.0), (3, 1, 1.9)) == pytest.approx(1.475 - 3.5 * 1.45 / 49)
    assert v((1, 1, 0.1), (2, 1, 1.0), (3, 1, 2.1)) == pytest.approx(-0.6), "0.6 lag + 0.1 lag^2"
    assert v((1, 1, 1.0), (2, 1, 7.0), (3, 1, 4.0), (4, 1000, 7.0)) == pytest.approx(1.0), "1.5 lag, at lag 4 exact"


@pytest.mark.parametrize(("lags", "error", "fresh"), [(2, 0.03, True), (3, 0.03, False), (3, 0.02, True)])
def test_an_imprecise_square_gives_way_to_a_curve_through_three_lags(lags: int, error: float, fresh: bool) -> None:
    by_lag = [[lag, 100, 100 * square, (100 * error) ** 2] for lag, square in ((0, 1.0), (1, 1.3), (2, 1.3))]
    mismatch = with_windows(by_lag=[by_lag[:lags]])
    assert mismatch.mean_square()[0] == pytest.approx(1.0 if fresh else 1.05), "the line is 1.05 + 0.15 lag"


@pytest.mark.parametrize(("errors", "newer"), [(-2.1, True), (-1.9, False), (1.9, False), (2.1, True)])
def test_tokens_computed_again_take_the_place_from_two_standard_errors_on(errors: float, newer: bool) -> None:
    """A difference has the error 0.005: 0.003 of sampling, 0.004 of tokens computed again."""
    other, sampled = 1 + 0.005 * errors, [[[0, 1000, 1000.0, 9.0]]]
    mismatch = with_windows(by_lag=sampled, again=[[1000, 1000 * other, 16.0]], of_sampling=[1.0, 0.0])
    assert mismatch.mean_square() == pytest.approx((other, 0.004) if newer else (1.0, 0.003))


def test_without_any_difference_in_sampling_the_tokens_computed_again_stand_alone() -> None:
    mismatch = with_windows(by_lag=[[[0, 1000, 0.0, 0.0]]], again=[[1000, 1.0, 1e-4]])
    assert mismatch.mean_square() == pytest.approx((1e-3, 1e-5))
    mismatch = with_windows(by_lag=[[[0, 1000, 1.0, 1e-4]]], again=[[1000, 0.0, 0.0]], of_sampling=[1.0, 0.0])
    assert mismatch.mean_square() == (0.0, 0.0), "all differences have gone"


def test_a_single_fresh_token_ends_what_was_computed_again() -> None:
    mismatch = with_windows(again=[[100, 1.0, 0.1]])
    mismatch.update(torch.zeros(1), torch.ones(1), torch.full((1,), 0.1), [[(0, 1, 0.1)]])
    assert not mismatch.state_dict()["again"]


def test_fresh_responses_among_stale_ones_count() -> None:
    mismatch, (log_weight, tokens, squares, spans) = Mismatch(), rows(0)
    stale: list[list[Span]] = [[(8, LENGTH, each)] for each in squares.tolist()]
    mismatch.update(log_weight, tokens, squares, spans[:3] + stale[3:])
    (fresh,) = mismatch.state_dict()["fresh"]
    assert fresh[:2] == [3, 3 * LENGTH]


def test_tokens_computed_again_without_any_difference_tell_no_ratio() -> None:
    mismatch = Mismatch()
    mismatch.update(*rows(0), [(500, 0.0)] * 4)
    assert mismatch.state_dict()["of_sampling"] is None
    mismatch.update(*rows(0), computed_again(RMS, seed=1, sequences=2, tokens=50))
    assert mismatch.state_dict()["of_sampling"] is not None, "however small the sum of squares is"


def test_until_a_version_is_known_nothing_is() -> None:
    mismatch, (log_weight, tokens, squares, spans) = Mismatch(), rows(0)
    assert mismatch.update(log_weight, tokens, squares, [[] for _ in spans]) is None
    assert mismatch.update(log_weight, tokens, squares, None) is None
    assert mismatch.update(*rows(8)) is None
    assert mismatch.update(log_weight, tokens, squares, spans) is not None
    assert mismatch.update(log_weight * torch.nan, tokens, squares, spans) is None


def test_a_response_with_tokens_of_unknown_versions_is_no_fresh_one() -> None:
    mismatch, (log_weight, tokens, squares, _) = Mismatch(), rows(0)
    assert mismatch.update(log_weight, tokens, squares, [[(0, LENGTH - 1, RMS**2 * (LENGTH - 1))]] * BATCH) is not None
    assert not mismatch.state_dict()["fresh"] and mismatch.state_dict()["by_lag"]


def computed_again(rms: float, seed: int, sequences: int = 16, tokens: int = 500) -> list[tuple[int, float]]:
    """Return the sums over the first tokens of some sequences, by a pass whose error per token is `rms`."""
    generator = torch.Generator().manual_seed(seed)
    squares = (rms * torch.randn(sequences, tokens, dtype=torch.float64, generator=generator)).square().sum(dim=1)
    return [(tokens, each) for each in squares.tolist()]


def test_tokens_computed_again_keep_the_square_current_at_one_lag() -> None:
    """One pass is twice as exact as sampling: the first batch says so. Then arithmetic changes, and all is stale."""
    mismatch = Mismatch()
    mismatch.update(*rows(0), computed_again(RMS / 2, seed=0))
    for seed in range(1, 41):
        stale = rows(8, 4e-4, 2 * RMS, seed=seed)
        blind = Mismatch()
        blind.load_state_dict({**mismatch.state_dict(), "again": []})
        without = blind.update(*stale)
        parts = mismatch.update(*stale, computed_again(RMS, seed=seed))
    assert parts is not None and parts.lag is not None and without is not None and without.lag is not None
    assert abs(parts.rms - 2 * RMS) < 4 * parts.rms_error < 0.1 * RMS
    assert parts.lag == pytest.approx(math.exp(-4e-4 * LENGTH), abs=0.1)
    assert without.rms == pytest.approx(RMS, rel=0.01) and without.lag < parts.lag / 2
    assert 2**17 <= sum(each.tokens for each in mismatch._again) < 2**17 + 8000
    saved = Mismatch()
    saved.load_state_dict(json.loads(json.dumps(mismatch.state_dict())))
    assert saved.mean_square() == mismatch.mean_square()


def test_fresh_tokens_are_a_better_source_than_tokens_computed_again() -> None:
    """As many fresh tokens as were computed again take their place, and tell the ratio; fewer do not."""
    mismatch, again = Mismatch(), computed_again(2 * RMS, seed=1)
    log_weight, tokens, squares, _ = rows(0)
    few: list[list[Span]] = [[(0, 50, 50 * RMS**2)] for _ in range(BATCH)]
    mismatch.update(log_weight, tokens, squares, few, again)
    assert mismatch.mean_square()[0] == pytest.approx(RMS**2, rel=1e-6), "without a ratio nothing takes its place"
    mismatch.update(*rows(0), again)
    mismatch.update(*rows(8, 4e-4), computed_again(4 * RMS, seed=2))
    assert mismatch.mean_square()[0] == pytest.approx((2 * RMS) ** 2, rel=0.05), "by the ratio of both"
    mismatch.update(*rows(0))
    assert mismatch.mean_square()[0] == pytest.approx(RMS**2, rel=0.05), "newer than what was computed again"


def test_a_precise_square_gives_way_to_a_different_one_only() -> None:
    mismatch = Mismatch()
    mismatch.update(*rows(0), computed_again(RMS, seed=1))
    before = mismatch.mean_square()
    mismatch.update(*rows(8, 4e-4), computed_again(RMS, seed=2))
    assert mismatch.mean_square() == before
    mismatch.update(*rows(8, 4e-4), computed_again(1.2 * RMS, seed=3))
    v, error = mismatch.mean_square()
    assert v > 1.1 * before[0] and error > 5 * before[1]


def test_a_ratio_gives_way_to_a_more_precise_one_only() -> None:
    mismatch = Mismatch()
    mismatch.update(*rows(0), computed_again(RMS, seed=1, sequences=4))
    rough = mismatch.state_dict()["of_sampling"]
    mismatch.update(*rows(0), computed_again(RMS, seed=2, sequences=2, tokens=50))
    assert mismatch.state_dict()["of_sampling"] == rough
    mismatch.update(*rows(0), computed_again(RMS, seed=3))
    ratio, error = mismatch.state_dict()["of_sampling"]
    assert error < rough[1] and ratio == pytest.approx(1, abs=3 * error)


def test_of_two_ratios_of_the_same_error_the_first_stays() -> None:
    mismatch, one = Mismatch(), (torch.zeros(1), torch.ones(1), torch.full((1,), 0.2), [[(0, 1, 0.2)]])
    mismatch.update(*one, [(1, 0.1)])
    mismatch.update(*one, [(1, 0.05)])
    assert mismatch.state_dict()["of_sampling"] == pytest.approx((2.0, math.sqrt(2)))


def test_without_any_version_what_was_computed_again_is_all_there_is() -> None:
    mismatch = Mismatch()
    mismatch.update(*rows(8, 4e-4), computed_again(RMS, seed=1))
    v, error = mismatch.mean_square()
    assert v == pytest.approx(RMS**2, rel=0.1) and 0 < error < 0.1 * v


def test_the_newest_tokens_tell_the_square() -> None:
    mismatch = Mismatch()
    for seed in range(20):
        parts = mismatch.update(*rows(0, rms=RMS if seed < 10 else 2 * RMS, seed=seed))
    assert parts is not None and parts.rms == pytest.approx(2 * RMS, rel=0.01)


def test_the_oldest_leave_as_soon_as_enough_is_left() -> None:
    window = deque("abc")
    _shorten(window, [1, 1, 1], enough=2)
    assert list(window) == ["b", "c"]
    _shorten(window, [1, 1], enough=0)
    assert list(window) == ["c"], "the newest stays"
    window = deque("abcd")
    _shorten(window, [1, 1, 1, 1], enough=1)
    assert list(window) == ["d"]


@pytest.mark.parametrize(
    ("batches", "size", "spans", "kept"),
    [
        (4, 2**13, [(0, 64, 0.1)], (2, 2, 2)),
        (300, 2, [(0, 64, 0.1)], (256, 256, 256)),
        (4, 2**13, [(0, 1, 0.1), (1, 63, 0.1)], (4, 0, 2)),
        (4, 2**13, [(0, 1, 0.1), (1, 1, 0.1), (2, 62, 0.1)], (2, 0, 2)),
        (4, 2**13, [(1, 1, 0.1), (2, 1, 0.1), (3, 62, 0.1)], (2, 0, 2)),
        (4, 2, [(1, 1, 0.1), (2, 63, 0.1)], (0, 0, 4)),
    ],
    ids=["fresh", "small", "two lags", "three lags", "three stale lags", "never fresh"],
)
def test_how_far_back_it_looks(batches: int, size: int, spans: list[Span], kept: tuple[int, ...]) -> None:
    """At 2^20 tokens, fresh ones where a batch has few lags, at 2^14 sequences, and at 256 batches at most."""
    mismatch, tokens, squares = Mismatch(), torch.full((size,), 64), torch.full((size,), 0.1)
    for _ in range(batches):
        mismatch.update(torch.zeros(size), tokens, squares, [spans] * size)
    assert tuple(len(mismatch.state_dict()[window]) for window in ("by_lag", "fresh", "newest")) == kept


def test_what_sequences_share_counts_from_two_errors_on_and_fresh_ones_from_three() -> None:
    tokens, by_lag, sums = torch.full((4,), 10.0), [[0, 100, 1.0, 1e-6]], [4, 100.0, 1.0, 4.0]
    mismatch = with_windows(by_lag=[by_lag], fresh=[[*sums, 0.5625]], newest=[[*sums, 1.0]])
    parts, fresh, newest = mismatch._parts(tokens), 0.03 * (1 - 9 * 0.5625 / 9), 0.03 * (1 - 4 * 1.0 / 9)
    assert parts is not None and parts.lag == pytest.approx(expected_ess_ratio(newest - fresh, tokens), rel=1e-12)
    assert parts.arithmetic == pytest.approx(expected_ess_ratio(0.01 + fresh, tokens), rel=1e-12)
    assert (parts.rms, parts.rms_error) == pytest.approx((0.1, 1e-5 / 0.2)), (
        "the error of sqrt(v) is that of v by 2 sqrt(v)"
    )


def test_a_response_of_one_token_counts() -> None:
    mismatch = Mismatch()
    assert mismatch.update(torch.zeros(2), torch.ones(2), torch.full((2,), 0.1), [[(0, 1, 0.1)]] * 2) is not None


def test_a_squared_log_ratio_is_cut_and_masked() -> None:
    log_prob, rollout, mask = torch.tensor([[[-1.0, -2, -9, -1]], [[-0.5, -2.25, -3, -7]], [[1, 1, 1, 0]]])
    assert squared_log_ratios(log_prob, rollout, mask).tolist() == [[0.25, 0.0625, 1.0, 0.0]]


def test_one_sequence_of_a_lag_has_its_whole_square_for_a_spread() -> None:
    assert _of_lags([[(3, 4, 3.0)]]) == {3: OfLag(4, 3.0, 9.0)}
    assert _of_lags([[(3, 4, 3.0)], [(3, 2, 0.0)]]) == {3: OfLag(6, 3.0, 2.0)}


def test_one_token_that_the_policy_has_left_is_not_a_lag_of_all() -> None:
    mismatch, (log_weight, tokens, squares, spans) = Mismatch(), rows(8, seed=1)
    mismatch.update(*rows(0))
    log_weight[0] -= 20
    squares[0] += squared_log_ratios(torch.tensor([[-20.0]]), torch.zeros(1, 1), torch.ones(1, 1)).item()
    parts = mismatch.update(log_weight, tokens, squares, spans)
    assert parts is not None and parts.lag is not None and parts.lag > 0.8


def test_a_resumed_run_has_the_same_numbers() -> None:
    straight, resumed = Mismatch(), Mismatch()
    for mismatch in (straight, resumed):
        mismatch.update(*rows(0))
        mismatch.update(*rows(3, 1e-4, seed=1))
    again = Mismatch()
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    assert again.update(*rows(3, 1e-4, seed=2)) == straight.update(*rows(3, 1e-4, seed=2))
    assert again.state_dict() == straight.state_dict()
    again.load_state_dict(Mismatch().state_dict())
    assert again.state_dict() == Mismatch().state_dict(), "nothing stays of what was there before"


def test_the_expected_ratio_is_that_of_the_batchs_own_lengths_and_size() -> None:
    assert expected_ess_ratio(0.0, torch.ones(4)) == 1.0 == expected_ess_ratio(1.0, torch.ones(0))
    assert expected_ess_ratio(1e-3, torch.full((4096,), 700.0)) == pytest.approx(math.exp(-0.7), rel=0.05)
    assert expected_ess_ratio(1.0, torch.full((8,), 1000.0)) == pytest.approx(1 / 8, rel=0.25)
    found = expected_ess_ratio(0.01, torch.tensor([10.0, 50, 100, 200]))
    assert found == pytest.approx(0.6699795952583957, rel=1e-9), "a resumed run would go on with another step"
