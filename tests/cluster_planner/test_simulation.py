"""The simulated run: exact where the answer is known, and never better than is possible."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.cluster_planner import simulation
from recipe.cluster_planner.rates import Layout, PlanError, Rates
from recipe.cluster_planner.simulation import SimulatedStep, Simulation
from tests.cluster_planner.made_up import rates

LONG_TAIL = np.minimum(np.exp(np.random.default_rng(0).normal(4, 1, 500)), 1500)


def run(made: Rates, layout: Layout, steps: int = 12, **given_: float) -> list[SimulatedStep]:
    return Simulation(made, layout, **given_).run(steps)  # type: ignore[arg-type]


def seconds(steps: list[SimulatedStep]) -> list[float]:
    return [step.seconds for step in steps]


def test_lag_0_takes_sampling_training_and_the_update() -> None:
    """16 responses of 100 tokens on 2 samplers: 100 iterations of 8 requests, then 10 s and 0.5 s."""
    expected = 100 * (0.01 + 8 * 0.001) + 10 + 0.5
    assert seconds(run(rates(), Layout(1, 2, 0))) == pytest.approx([expected] * 12)


def test_prefill_is_work_of_the_sampler() -> None:
    """8 prompts of 10 tokens on each sampler."""
    expected = 8 * 10 * 0.002 + 100 * 0.018 + 10.5
    assert seconds(run(rates(prefill_s=0.002), Layout(1, 2, 0))) == pytest.approx([expected] * 12)


def test_with_few_slots_responses_run_one_after_the_other() -> None:
    """16 responses on 2 x 4 slots: two waves of 100 iterations of 4 requests."""
    assert seconds(run(rates(slots=4), Layout(1, 2, 0))) == pytest.approx([2 * 100 * 0.014 + 10.5] * 12)


@pytest.mark.parametrize("lag", [1, 2, 4.5])
def test_a_trainer_that_is_slower_than_the_samplers_decides(lag: float) -> None:
    steps = run(rates(), Layout(1, 2, lag))
    assert seconds(steps[1:]) == pytest.approx([10.5] * 11)
    assert all(step.wait_s == pytest.approx(0) for step in steps[1:])
    assert max(steps[-1].lags) == math.ceil(lag)


def test_samplers_that_are_slower_than_the_trainer_decide() -> None:
    """8 waves of 2 requests, and the update, in which nobody samples."""
    (step,) = {round(s, 6) for s in seconds(run(rates(slots=2, train_s=0.1), Layout(1, 1, 4))[6:])}
    assert step == pytest.approx(8 * 100 * 0.012 + 0.5)


def test_a_tool_before_the_response_and_between_turns_waits() -> None:
    assert seconds(run(rates(outside_s=3.0), Layout(1, 2, 0)))[0] == pytest.approx(3 + 1.8 + 10.5)
    assert seconds(run(rates(outside_s=3.0, calls=3), Layout(1, 2, 0)))[0] == pytest.approx(3 + 1.8 + 10.5)


def test_an_update_has_the_contexts_computed_again() -> None:
    """The third response samples alone while step 2 trains, and is then joined by the fourth."""
    made = rates(lengths=10_000.0, prompts=1, samples=1, train_s=30.0, prefill_s=0.001)
    sampled = (30 - 10 * 0.001) / 0.011
    anew = (10 + sampled + 10) * 0.001
    expected = anew + (10_000 - sampled) * 0.012 + 30 + 0.5
    assert seconds(run(made, Layout(1, 1, 1), steps=3))[2] == pytest.approx(expected)


def test_on_shared_cores_each_side_has_half_the_speed() -> None:
    """The trainer works 10 s, the samplers 1.6 s of it alone: each second of theirs costs the trainer one."""
    made = rates(shares_cores=True, sync_s=0.0)
    sampling = 100 * (0.01 + 16 * 0.001)
    assert seconds(run(made, Layout(1, 1, 2)))[-1] == pytest.approx(10 + sampling)


def test_the_engines_of_a_sampler_share_its_requests() -> None:
    made = rates()
    made = replace(made, sampler=replace(made.sampler, engines=2))
    assert seconds(run(made, Layout(1, 1, 0)))[-1] == pytest.approx(100 * (0.01 + 8 * 0.001) + 10.5)


def test_exact_lag_waits_for_everything_that_was_submitted() -> None:
    steps = run(rates(), Layout(1, 2, 3, exact=True))
    assert [set(step.lags) for step in steps[3:]] == [{3}] * 9
    assert seconds(steps)[-1] == pytest.approx(100 * 0.018 + 10.5)


@settings(max_examples=30, deadline=None)
@given(
    lag=st.sampled_from([0, 1, 2, 3.5, 8]),
    samplers=st.integers(1, 4),
    slots=st.sampled_from([1, 3, 16]),
    train_s=st.sampled_from([0.0, 1.0, 20.0]),
    outside_s=st.sampled_from([0.0, 5.0]),
    seed=st.integers(0, 5),
)
def test_nothing_is_faster_than_a_side_alone_and_no_lag_above_its_bound(
    lag: float, samplers: int, slots: int, train_s: float, outside_s: float, seed: int
) -> None:
    made = rates(lengths=LONG_TAIL, slots=slots, train_s=train_s, outside_s=[0.0, outside_s])
    steps = run(made, Layout(1, samplers, lag), steps=30, seed=seed)
    assert all(step.seconds >= step.trainer_s + made.sync_s - 1e-9 for step in steps)
    assert max(max(step.lags) for step in steps) <= math.ceil(lag)
    sampled = sum(step.tokens for step in steps) - 30 * 16 * made.workload.prompt_tokens
    fastest = sampled / (samplers * made.sampler.most_tokens_per_s)
    assert sum(seconds(steps)) >= fastest - 1e-9


@pytest.mark.parametrize("lag", [0, 2, 8])
@pytest.mark.parametrize("more", [Layout(2, 2, 0), Layout(1, 3, 0)])
def test_more_gpus_are_not_slower(lag: float, more: Layout) -> None:
    made = rates(lengths=LONG_TAIL, prompts=16, slots=8, train_s=0.0, token_s=0.01)
    few, many = (
        sum(seconds(run(made, Layout(trainer, samplers, lag), steps=40)))
        for trainer, samplers in ((1, 2), (more.trainer_gpus, more.sampler_gpus))
    )
    assert many <= few * 1.005


def test_the_rule_is_that_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its deadlines stragglers are overtaken, and become older than the bound."""
    monkeypatch.setattr(simulation, "deadlines_hold", lambda *_: True)
    made = rates(lengths=[10.0] * 50 + [20_000.0], train_s=1.0)
    assert max(max(step.lags) for step in run(made, Layout(1, 1, 1), steps=60)) > 1


def test_a_fraction_of_the_samplers_stands_for_all() -> None:
    made = rates(lengths=LONG_TAIL, prompts=128, samples=8, slots=32, token_s=1e-4)
    whole, part = (np.mean(seconds(run(made, Layout(1, 16, 4), steps=30, share=share))[10:]) for share in (1.0, 0.25))
    assert part == pytest.approx(whole, rel=0.05)


def test_a_layout_without_a_sampler_is_refused() -> None:
    with pytest.raises(PlanError, match="a sampler takes 1"):
        Simulation(rates(), Layout(1, 0, 1))


def test_the_planner_needs_neither_torch_nor_ray() -> None:
    program = "import sys, recipe.cluster_planner.__main__; print({'torch', 'ray', 'verl', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
