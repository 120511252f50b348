"""The rule that keeps the lag bound, without Ray: which prompts may be consumed when."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_vcpo.trainer.ppo.v1.replay_buffer import LagKReplayBuffer, deadlines_hold


def buffer_with(lag: int, submitted: dict[str, int], finished: set[str]) -> LagKReplayBuffer:
    buffer = LagKReplayBuffer(
        lag=lag,
        trainer_mode="lag_k",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="wait",
        sampler_kwargs={},
    )
    buffer.prompt_global_steps["train"] = dict(submitted)
    buffer.finished_keys["train"] = set(finished)
    return buffer


def choose(buffer: LagKReplayBuffer, step: int, batch_size: int) -> list[str] | None:
    """What step `step` would consume; None where it waits."""
    finished = buffer.finished_keys["train"]
    if not buffer._has_enough_samples(step, "train", batch_size, finished):
        return None
    return buffer._select_prompt_uids("train", finished, batch_size)[0]


def test_waits_for_a_batch() -> None:
    assert choose(buffer_with(2, {"a": 1, "b": 1}, {"a"}), step=1, batch_size=2) is None


def test_oldest_first() -> None:
    buffer = buffer_with(2, {"old": 1, "new": 2}, {"new", "old"})
    assert choose(buffer, step=2, batch_size=1) == ["old"]


def test_waits_for_a_prompt_whose_deadline_has_come() -> None:
    """`slow` must be consumed at step 3 at the latest: verl's own rule would take `fast` and go on."""
    assert choose(buffer_with(2, {"slow": 1, "fast": 2}, {"fast"}), step=3, batch_size=1) is None
    assert choose(buffer_with(2, {"slow": 1, "fast": 3}, {"fast"}), step=2, batch_size=1) == ["fast"]


def test_lag_0_takes_only_what_was_submitted_at_this_step() -> None:
    assert set(choose(buffer_with(0, {"a": 1, "b": 1}, {"a", "b"}), step=1, batch_size=2) or []) == {"a", "b"}
    assert choose(buffer_with(0, {"a": 1, "b": 1}, {"a"}), step=1, batch_size=2) is None


@pytest.mark.parametrize("remaining, holds", [({4: 2}, True), ({4: 3}, False), ({4: 1, 5: 3}, True), ({3: 1}, False)])
def test_deadlines_hold(remaining: dict[int, int], holds: bool) -> None:
    assert deadlines_hold(Counter(remaining), step=3, batch_size=2) is holds


@settings(max_examples=200, deadline=None)
@given(lag=st.integers(0, 6), batch_size=st.integers(1, 4), random=st.randoms(use_true_random=False))
def test_no_prompt_is_ever_older_than_the_lag_and_none_is_lost(lag: int, batch_size: int, random) -> None:  # type: ignore[no-untyped-def]
    """The trainer's loop over a sampler that finishes prompts in any order and at any time."""
    buffer = buffer_with(lag, {}, set())
    submitted, finished = buffer.prompt_global_steps["train"], buffer.finished_keys["train"]
    fed = 0

    def submit(step: int, prompts: int) -> None:
        nonlocal fed
        submitted.update({f"p{fed + i}": step for i in range(prompts)})
        fed += prompts

    submit(1, lag * batch_size)
    for step in range(1, 20):
        submit(step, batch_size)
        running = [uid for uid in submitted if uid not in finished]
        random.shuffle(running)
        finished.update(running[: random.randint(0, len(running))])
        while (chosen := choose(buffer, step, batch_size)) is None:
            unfinished = [uid for uid in submitted if uid not in finished]
            assert unfinished, "it waits although everything is finished: it would wait for ever"
            finished.add(random.choice(unfinished))
        assert all(step - submitted[uid] <= lag for uid in chosen)
        for uid in chosen:
            del submitted[uid]
            finished.discard(uid)
        assert len(submitted) == lag * batch_size
