"""A lag that governs itself: between synchronous and the bound, slower up than down, and the same after a resume."""

import math
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_vcpo.trainer.ppo.v1.deadlines import deadlines_hold
from verl_vcpo.trainer.ppo.v1.lag_controller import LagController
from verl_vcpo.trainer.ppo.v1.lag_setting import bound_setting, lag_bound, lag_in_words

ESS_RATIOS = st.floats(0, 1) | st.just(math.nan)
KLS = st.floats(0, 1) | st.sampled_from([math.inf, math.nan])
SIGNS = st.tuples(ESS_RATIOS, KLS)
GOOD, BAD = (0.9, 0.01), (0.1, 0.01)


@st.composite
def controllers(draw: st.DrawFn) -> LagController:
    max_lag = draw(st.integers(0, 20))
    hold, calm = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return LagController(max_lag, draw(st.integers(1, max_lag + 1)), calm, hold)


def after(controller: LagController, signs: tuple[float, float], on_their_way: int = 3) -> LagController:
    changed = replace(controller)
    changed.update(*signs, on_their_way)
    return changed


def steps_of(controller: LagController, signs: list[tuple[float, float]]) -> list[int]:
    """The lag of each step of a loop that registers what the controller says, and takes the oldest batch."""
    queue: deque[int] = deque()
    lags = []
    for step, sign in enumerate(signs, start=1):
        queue.extend([step] * controller.to_register(len(queue), 1))
        deadlines = Counter(at + controller.max_lag for at in queue)
        assert deadlines_hold(deadlines, step - 1, 1), "a batch could no longer be trained on in time"
        lags.append(step - queue.popleft())
        controller.update(*sign, len(queue))
    return lags


@given(controllers(), st.lists(SIGNS, max_size=80))
def test_the_number_stays_between_one_and_the_bound(
    controller: LagController, signs: list[tuple[float, float]]
) -> None:
    for sign in signs:
        controller.update(*sign, controller.batches)
        assert 1 <= controller.batches <= controller.max_lag + 1


@given(controllers(), st.lists(SIGNS, max_size=80))
def test_no_batch_is_older_than_the_bound(controller: LagController, signs: list[tuple[float, float]]) -> None:
    assert all(0 <= lag <= controller.max_lag for lag in steps_of(controller, signs))


@given(controllers(), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_worse_signs_never_ask_for_more(controller: LagController, a: float, b: float, c: float, d: float) -> None:
    worse = after(controller, (min(a, b), max(c, d)))
    better = after(controller, (max(a, b), min(c, d)))
    assert worse.batches <= better.batches


@given(controllers(), SIGNS)
def test_what_is_not_measured_is_the_worst(controller: LagController, signs: tuple[float, float]) -> None:
    assert after(controller, (math.nan, signs[1])).batches <= after(controller, signs).batches
    assert after(controller, (signs[0], math.nan)).batches <= after(controller, signs).batches


@given(controllers(), st.integers(0, 40), st.integers(1, 6))
def test_a_step_registers_at_most_two_batches_and_has_one(
    controller: LagController, prompts: int, batch_size: int
) -> None:
    prompts = min(prompts, controller.max_lag * batch_size)  # what a resume leaves
    batches = controller.to_register(prompts, batch_size)
    assert 0 <= batches <= 2
    assert batch_size <= prompts + batches * batch_size <= (controller.max_lag + 1) * batch_size


@given(controllers(), st.lists(SIGNS, max_size=40), st.integers(0, 40))
def test_a_resumed_controller_goes_on_as_the_other(
    tmp_path_factory: pytest.TempPathFactory, controller: LagController, signs: list[tuple[float, float]], at: int
) -> None:
    checkpoint = tmp_path_factory.getbasetemp()
    for sign in signs[:at]:
        controller.update(*sign, 2)
    controller.save(checkpoint)
    resumed = LagController(controller.max_lag)
    resumed.resume(checkpoint)
    for sign in signs[at:]:
        controller.update(*sign, 2)
        resumed.update(*sign, 2)
    assert resumed == controller


def test_a_checkpoint_of_a_larger_bound_or_a_fixed_lag(tmp_path: Path) -> None:
    LagController(max_lag=8, batches=9).save(tmp_path)
    smaller, anew = LagController(max_lag=2), LagController(max_lag=2)
    smaller.resume(tmp_path)
    anew.resume(tmp_path / "of_a_fixed_lag")
    assert (smaller.batches, anew.batches) == (3, 1)


@pytest.mark.parametrize(
    "lag, max_lag, bound, setting, words",
    [(1.5, None, 1.5, "async.lag", "1.5"), ("auto", 4, 4, "async.max_lag", "auto (max 4)")],
)
def test_the_bound_and_its_name(lag: float | str, max_lag: int | None, bound: float, setting: str, words: str) -> None:
    settings = OmegaConf.create({"lag": lag, "max_lag": max_lag})
    assert (lag_bound(settings), bound_setting(settings), lag_in_words(settings)) == (bound, setting, words)
    assert (LagController.of(settings) is None) == (lag != "auto")


def test_up_by_one_after_four_calm_steps() -> None:
    lags = steps_of(LagController(max_lag=3), [GOOD] * 40)
    assert lags[0] == 0 and lags[-1] == 3 and max(lags) == 3
    controller = LagController(max_lag=3)
    for _ in range(3):
        controller.update(*GOOD, 0)
    assert controller.lag == 0
    controller.update(*GOOD, 0)
    assert controller.lag == 1


@pytest.mark.parametrize("bad", [BAD, (0.9, 0.5), (math.nan, 0.01)])
def test_half_at_once_then_none_until_the_old_batches_are_trained_on(bad: tuple[float, float]) -> None:
    controller = LagController(max_lag=15, batches=16)
    controller.update(*bad, 15)
    assert controller.batches == 8
    for _ in range(15):
        controller.update(*bad, 15)
    assert controller.batches == 8, "these steps trained on what was registered before"
    controller.update(*bad, 7)
    assert controller.batches == 4


def test_between_the_band_s_edges_nothing_changes() -> None:
    controller = LagController(max_lag=15, batches=8)
    for _ in range(100):
        controller.update(1.2 * 0.3, 0.0, 7)
        controller.update(1.0, 0.8 * 0.3, 7)
    assert controller.batches == 8


def test_a_bound_of_zero_is_synchronous() -> None:
    assert set(steps_of(LagController(max_lag=0), [GOOD, BAD] * 20)) == {0}
