"""The collapse alarm on made-up curves: each sign when it is due, once, and silence on healthy runs."""

import math
import random

import pytest

from vcpo.diagnostics import AlarmLevels, CollapseAlarm, Sign

Step = tuple[float, float, float]
"""ESS ratio, gradient norm, KL."""


def told(steps: list[Step], levels: AlarmLevels | None = None) -> list[tuple[int, Sign]]:
    alarm = CollapseAlarm(levels)
    return [(i, sign) for i, step in enumerate(steps) for sign in alarm.update(*step)]


def healthy(n: int, seed: int = 0) -> list[Step]:
    rng = random.Random(seed)
    return [(0.5 + 0.3 * rng.random(), 0.5 + rng.random(), 0.002 * (1 + rng.random())) for _ in range(n)]


def test_a_healthy_run_is_left_alone() -> None:
    assert all(not told(healthy(300, seed)) for seed in range(20))


def test_a_low_ess_ratio_has_to_last() -> None:
    low = (0.05, 1.0, 0.002)
    assert not told(healthy(30) + [(AlarmLevels().ess_ratio, 1.0, 0.002)] * 20), "not below the level"
    assert not told(healthy(30) + [low] * 9 + healthy(30))
    assert told(healthy(30) + [low] * 20) == [(39, Sign.LOW_ESS_RATIO)]
    assert len(told([*healthy(30), *[low] * 10, *healthy(3), *[low] * 10])) == 2, "told again after it was gone"
    assert told(healthy(5) + [low] * 3, AlarmLevels(ess_steps=2)) == [(6, Sign.LOW_ESS_RATIO)]


def test_steps_are_counted_from_the_first_of_a_run() -> None:
    assert told([(0.05, 1.0, 0.5)] * 10) == [(4, Sign.KL_GROWTH), (9, Sign.LOW_ESS_RATIO)]


def test_a_gradient_that_spikes_and_vanishes() -> None:
    spike, gone = (0.5, 20.0, 0.002), (0.5, 1e-4, 0.002)
    assert not told([*healthy(30), spike, *healthy(40)]), "a spike alone is no collapse"
    assert not told(healthy(30) + [gone] * 5), "nor is a small gradient alone: a solved batch has none"
    assert told([*healthy(30), spike, *healthy(3), *[gone] * 4]) == [(36, Sign.VANISHED_GRADIENT)]
    assert not told([*healthy(30), spike, *healthy(25), *[gone] * 4]), "not long after"
    solved = (0.5, 0.0, 0.002)
    assert not told([*healthy(30), spike, *[solved, *healthy(1), solved, solved, *healthy(1)] * 3]), "solved batches"
    assert told([*healthy(30), spike, gone], AlarmLevels(vanish_steps=1)) == [(31, Sign.VANISHED_GRADIENT)]


def test_a_spike_is_five_times_the_median_of_twenty_steps_and_counts_for_twenty() -> None:
    def after(flat: int, spike: float, later: int, norm: float = 0.09, unit: float = 1.0) -> list[tuple[int, Sign]]:
        return told([(0.5, unit * size, 0.002) for size in [1.0] * flat + [spike] + [1.0] * later + [norm] * 3])

    vanished = Sign.VANISHED_GRADIENT
    assert after(20, 5.1, 0) == [(23, vanished)] and not after(19, 5.1, 0) and not after(20, 5.0, 0)
    assert after(20, 5.1, 17) == [(40, vanished)] and not after(20, 5.1, 18)
    assert not after(20, 5.1, 0, norm=0.1)
    assert after(20, 5.1, 0, unit=4.0) == [(23, vanished)] and not after(20, 4.9, 0, unit=4.0), "times the median"


def test_a_large_kl_has_to_last() -> None:
    large = (0.5, 1.0, 0.5)
    assert told(healthy(30) + [large] * 10) == [(34, Sign.KL_GROWTH)]
    assert not told(healthy(30) + [large] * 4 + healthy(30)), "a few heavy tails"
    assert not told(healthy(30) + [(0.5, 1.0, 0.05)] * 10), "grown, but small"
    assert not told(healthy(30) + [(0.5, 1.0, AlarmLevels().kl)] * 10), "the level itself is not above it"
    assert told(healthy(5) + [large] * 2, AlarmLevels(kl_steps=2)) == [(6, Sign.KL_GROWTH)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_reason_to_be_quiet(value: float) -> None:
    assert (34, Sign.KL_GROWTH) in told(healthy(30) + [(0.5, 1.0, value)] * 5)
    gone = [(0.5, 1e-5, 0.002)] * 3
    assert Sign.VANISHED_GRADIENT in {sign for _, sign in told([*healthy(30), (0.5, value, 0.002), *gone])}
