"""The simulated run: exact where the answer is known, and never better than is possible."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.planner import simulation
from lab.planner.rates import Layout, PlanError, Rates, SharedCores
from lab.planner.simulation import SimulatedStep, Simulation
from lab.tests.planner.made_up import rates

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


def test_a_request_on_its_way_keeps_its_sampler_from_idling() -> None:
    """One second to the engine, 1.8 s of iterations, and one back, in which the trainer has the response."""
    steps = run(rates(call_s=2.0), Layout(1, 2, 0))
    assert seconds(steps) == pytest.approx([1 + 1.8 + 10.5] * 12)
    assert [step.sampler_idle for step in steps] == pytest.approx([1 - 3.8 / 13.3] * 12)


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
    made = rates(cores=SharedCores(1, 1, 0, 1, 1), sync_s=0.0)
    sampling = 100 * (0.01 + 16 * 0.001)
    assert seconds(run(made, Layout(1, 1, 2)))[-1] == pytest.approx(10 + sampling)


def test_on_two_cores_all_are_slowed_down_alike() -> None:
    """While both compute, they ask for 2.5 of 2 cores: samplers take 2.6 / 0.8 s, in which the trainer does 2.6 s."""
    steps = run(rates(cores=SharedCores(2, 1, 0.2, 1.5, 1), sync_s=0.0), Layout(1, 1, 2))
    assert steps[-1].seconds == pytest.approx(2.6 / 0.8 + (10 - 2.6))
    assert steps[-1].cores_full_s == pytest.approx(2.6 / 0.8)


def test_a_trainer_that_waits_looks_for_rollouts() -> None:
    """Two samplers and the trainer that waits for them ask for 2.25 cores, of which there is one."""
    steps = run(rates(cores=SharedCores(1, 1, 0.25, 1, 1)), Layout(1, 2, 0))
    assert seconds(steps) == pytest.approx([1.8 * 2.25 + 10.5] * 12)


def test_an_agent_loop_worker_takes_turns() -> None:
    """A response alone: half before the sampler, half after. Two: both halves twice as long, and requests at once."""
    alone = rates(prompts=1, samples=1, agent_s=1.0)
    assert seconds(run(alone, Layout(1, 1, 0)))[-1] == pytest.approx(0.5 + 100 * 0.011 + 0.5 + 10.5)
    two = rates(prompts=1, samples=2, agent_s=1.0)
    assert seconds(run(two, Layout(1, 1, 0)))[-1] == pytest.approx(1 + 100 * 0.012 + 1 + 10.5)


def test_an_agent_loop_worker_can_be_the_slowest() -> None:
    """16 responses a step, of one second each; in the long run, as one step's are prepared before another's."""
    many = seconds(run(rates(train_s=0.1, agent_s=1.0), Layout(1, 2, 4), steps=300))
    assert np.mean(many) == pytest.approx(16, rel=0.01)


def test_the_trainer_looks_now_and_then_and_writes_its_metrics() -> None:
    assert seconds(run(rates(poll_s=0.5), Layout(1, 2, 0)))[-1] == pytest.approx(2 + 10.5)  # finished after 1.8 s
    assert seconds(run(rates(between_s=0.25), Layout(1, 2, 2)))[-1] == pytest.approx(0.25 + 10.5)


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
    agent_s=st.sampled_from([0.0, 0.2]),
    cores=st.sampled_from([None, SharedCores(2, 1, 0.2, 1.5, 1)]),
    seed=st.integers(0, 5),
)
def test_nothing_is_faster_than_a_side_alone_and_no_lag_above_its_bound(
    lag: float,
    samplers: int,
    slots: int,
    train_s: float,
    outside_s: float,
    agent_s: float,
    cores: SharedCores | None,
    seed: int,
) -> None:
    waits = [0.0, outside_s]
    made = rates(lengths=LONG_TAIL, slots=slots, train_s=train_s, outside_s=waits, agent_s=agent_s, cores=cores)
    steps = run(made, Layout(1, samplers, lag), steps=30, seed=seed)
    assert all(step.seconds >= step.trainer_s + made.sync_s - 1e-9 for step in steps)
    assert max(max(step.lags) for step in steps) <= math.ceil(lag)
    sampled = sum(step.tokens for step in steps) - 30 * 16 * made.workload.prompt_tokens
    fastest = sampled / (samplers * made.sampler.most_tokens_per_s)
    assert sum(seconds(steps)) >= max(fastest, 30 * 16 * agent_s) - 1e-9


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
    program = "import sys, lab.planner.__main__; print({'torch', 'ray', 'verl', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
