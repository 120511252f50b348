"""The rule that keeps the lag bound, without Ray: which prompts may be consumed when."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import NonTensorStack, TensorDict
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from verl_vcpo.common.stored_tags import Failure
from verl_vcpo.loop.prompts import deadlines, replay_buffer, withheld_prompts
from verl_vcpo.loop.prompts.deadlines import (
    OnDeadline,
    deadlines_hold,
    deadlines_without_oldest,
    resume_prompts,
)
from verl_vcpo.loop.prompts.failed_prompts import FailedPrompts
from verl_vcpo.loop.prompts.replay_buffer import LagKReplayBuffer

STORED = (("young", 3), ("older", 1), ("old", 2))


def failed_prompts(on_failure: str = "end", max_skipped: float = 0.05, run_dir: Path = Path()) -> FailedPrompts:
    """The reason why a prompt fails is its uid; so is its row, and its data source is the uid's first letter."""

    def fields(uids: list[str], partition_id: str) -> Any:
        messages = [{"role": "system", "content": "Compute."}, {"role": "user", "content": "2 + 2?"}]
        return {"index": uids, "data_source": [uid[0] for uid in uids], "raw_prompt": [messages] * len(uids)}

    config = DictConfig({"async": {"on_failure": on_failure, "max_skipped": max_skipped}, "run_dir": str(run_dir)})
    return FailedPrompts(config, lambda uids, _: list(map(Failure, uids)), fields)


def buffer_with(
    lag: float,
    submitted: dict[str, int],
    finished: set[str],
    on_deadline: OnDeadline = OnDeadline.WAIT,
    reissued: list[str] | None = None,
    failed: FailedPrompts | None = None,
) -> LagKReplayBuffer:
    buffer = LagKReplayBuffer(
        lag=lag,
        samples=1,
        on_deadline=on_deadline,
        reissue_fn=lambda uids, partition_id: (reissued if reissued is not None else []).extend(uids),
        failed_prompts=failed or failed_prompts(),
        trainer_mode="lag_k",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="wait",
        sampler_kwargs={},
    )
    buffer.prompt_global_steps["train"] = dict(submitted)
    buffer.finished_keys["train"] = set(finished)
    buffer.running_keys["train"] = set(submitted) - set(finished)
    return buffer


def choose(buffer: LagKReplayBuffer, step: int, batch_size: int) -> list[str] | None:
    """What step `step` would consume; None where it waits."""
    finished = buffer.finished_keys["train"]
    if not buffer._has_enough_samples(step, "train", batch_size, finished):
        return None
    return buffer._oldest_first("train", finished)[:batch_size]


def test_of_one_step_in_the_order_of_submission() -> None:
    names = [f"{number:x}" for number in range(15, 0, -1)]
    buffer = buffer_with(4, dict.fromkeys(names, 1), set(names))
    buffer.note_submitted(TensorDict({"uid": names, "index": list(range(15))}, batch_size=15))
    assert choose(buffer, step=1, batch_size=4) == names[:4]


def test_waits_for_a_prompt_whose_deadline_has_come() -> None:
    """`slow` must be consumed at step 3 at the latest: verl's own rule would take `fast` and go on."""
    assert choose(buffer_with(2, {"slow": 1, "fast": 2}, {"fast"}), step=3, batch_size=1) is None
    assert choose(buffer_with(2, {"slow": 1, "fast": 3}, {"fast"}), step=2, batch_size=1) == ["fast"]


def test_lag_0_takes_only_what_was_submitted_at_this_step() -> None:
    assert set(choose(buffer_with(0, {"a": 1, "b": 1}, {"a", "b"}), step=1, batch_size=2) or []) == {"a", "b"}
    assert choose(buffer_with(0, {"a": 1, "b": 1}, {"a"}), step=1, batch_size=2) is None


def test_the_oldest_finished_prompts_are_consumed_first() -> None:
    """Three are consumed: both of step 1 and one of step 3; a prompt of step 2 is not finished."""
    remaining = deadlines_without_oldest(Counter({1: 2, 2: 1, 3: 2}), Counter({1: 2, 3: 2}), bound=4, batch_size=3)
    assert remaining == {6: 1, 7: 1}


@pytest.mark.parametrize(
    ("remaining", "holds"), [({4: 2}, True), ({4: 3}, False), ({4: 1, 5: 3}, True), ({3: 1}, False)]
)
def test_deadlines_hold(remaining: dict[int, int], holds: bool) -> None:
    assert deadlines_hold(Counter(remaining), step=3, batch_size=2) is holds


def test_a_fractional_lag_is_bounded_by_the_next_whole_one() -> None:
    assert choose(buffer_with(1.5, {"slow": 1, "fast": 2}, {"fast"}), step=2, batch_size=1) == ["fast"]
    assert choose(buffer_with(1.5, {"slow": 1, "fast": 2}, {"fast"}), step=3, batch_size=1) is None


def test_a_late_prompt_is_issued_again_once_and_then_waited_for() -> None:
    reissued: list[str] = []
    buffer = buffer_with(2, {"slow": 1, "fast": 2, "next": 3}, {"fast", "next"}, OnDeadline.REISSUE, reissued)
    assert choose(buffer, step=3, batch_size=1) is None and reissued == ["slow"]
    assert choose(buffer, step=3, batch_size=1) == ["fast"], "its deadline is step 5 now"
    assert choose(buffer, step=5, batch_size=1) is None and reissued == ["slow"]


def test_each_late_prompt_counts_once_at_its_old_and_at_its_new_deadline() -> None:
    """The prompts of step 1 are due; with their deadlines at step 7, those of step 2 are in time."""
    reissued, names = list[str](), [f"{number:x}" for number in range(15, 0, -1)]
    submitted = {**dict.fromkeys(names[:10], 1), **dict.fromkeys(names[10:], 2), **dict.fromkeys("vwxyz", 4)}
    buffer = buffer_with(3, submitted, set("vwxyz"), OnDeadline.REISSUE, reissued)
    buffer.note_submitted(TensorDict({"uid": names, "index": list(range(15))}, batch_size=15))
    assert choose(buffer, step=4, batch_size=5) is None and reissued == names[:10], "in the order of submission"


def test_as_few_late_prompts_as_it_takes_are_issued_again() -> None:
    reissued: list[str] = []
    submitted = {"late": 1, "in time": 2, "fast": 3}
    buffer = buffer_with(2, submitted, {"fast"}, OnDeadline.REISSUE, reissued)
    assert choose(buffer, step=3, batch_size=1) is None and reissued == ["late"]
    assert buffer.prompt_global_steps["train"] == {"late": 3, "in time": 2, "fast": 3}
    assert buffer._metrics(3, "train", {"fast"})["vcpo/async/reissued_prompts"] == 1


def test_a_validation_waits_for_nothing_but_its_prompts() -> None:
    buffer = buffer_with(0, {}, set())
    assert not buffer._has_enough_samples(9, "val", 3, {"a", "b"})
    assert buffer._has_enough_samples(9, "val", 3, {"a", "b", "c"})


def test_the_wait_for_all_of_a_step_ends_when_the_last_prompt_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, looks = buffer_with(2, {"a": 1, "b": 1}, {"a"}), iter(range(2))
    buffer.exact = True

    def look() -> None:
        if next(looks):
            buffer.running_keys["train"].clear()

    monkeypatch.setattr(buffer, "_sync_metadata_from_transfer_queue", look)
    rests: list[float] = []
    monkeypatch.setattr(buffer, "sleep", rests.append)
    buffer.clock = lambda: 7.0
    buffer._counts["train"]["retried_prompts"] = 3
    metrics = {"vcpo/async/retried_prompts": 1.0}
    buffer.wait_until_finished(1, "train", metrics)
    assert metrics["vcpo/async/retried_prompts"] == 4.0
    assert next(looks, None) is None and not buffer._unfinished("train") and rests == [0.05]
    assert buffer._waiting_since == 7.0


def test_an_exact_batch_waits_for_its_own_prompts_alone() -> None:
    """The trainer works on the oldest batch while the samplers work on younger ones."""
    buffer = buffer_with(2, {"a": 1, "b": 1, "c": 2, "d": 2}, {"a", "c", "d"})
    buffer.exact = True
    assert choose(buffer, step=3, batch_size=2) is None, "not c, which is finished and younger than b"
    buffer.running_keys["train"].discard("b")
    buffer.finished_keys["train"].add("b")
    buffer.running_keys["train"].add("d")
    buffer.finished_keys["train"].discard("d")
    assert choose(buffer, step=3, batch_size=2) is not None


def test_a_rest_is_four_times_as_long_as_a_look() -> None:
    buffer, rests = buffer_with(2, {}, set()), list[float]()
    buffer.sleep, buffer._poll_s = rests.append, 0.5
    buffer._wait_for_next_poll("train", 0.0)
    assert rests == [2.0]


def test_a_look_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, times, listed = buffer_with(2, {}, set()), iter([10.0, 10.5, 20.0, 21.0]), list[str]()
    monkeypatch.setattr(tq, "kv_list", listed.append)
    buffer.clock, buffer._partition = lambda: next(times), "val"
    buffer._sync_metadata_from_transfer_queue()
    assert buffer._poll_s == 0.5 and listed == ["val"]
    buffer._partition = "train"
    buffer._sync_metadata_from_transfer_queue()
    assert buffer._poll_s == 1.0 and listed == ["val"], "the keys of a training's trajectories are not listed"


def test_trajectories_follow_the_order_of_prompts_and_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Session 10 comes after session 2, whatever order they are stored in."""
    buffer, stored = buffer_with(2, {}, set()), ["a_10_0", "b_0_0", "a_2_1", "a_2_0"]
    batch = tq.KVBatchMeta(keys=stored, tags=[{"key": key} for key in stored])
    monkeypatch.setattr(ReplayBufferAsync, "_materialize_batch", lambda *_: batch)
    ordered = buffer._materialize_batch("train", ["b", "a"], {})
    assert ordered.keys == ["b_0_0", "a_2_0", "a_2_1", "a_10_0"] == [tag["key"] for tag in ordered.tags]


def test_each_wait_looks_at_its_own_partition_and_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, looked = buffer_with(2, {}, set()), list[str]()
    monkeypatch.setattr(ReplayBufferAsync, "sample", lambda self, *_: (looked.append(self._partition), {}))
    monkeypatch.setattr(buffer, "_sync_metadata_from_transfer_queue", lambda: looked.append(buffer._partition))
    buffer._counts["val"]["skipped_prompts"] = buffer._counts["train"]["retried_prompts"] = 1
    buffer.clock = lambda: 7.0
    buffer.sample(1, "val", 3)
    assert [*buffer._counts] == ["train"] and buffer._waiting_since == 7.0
    buffer._partition = "train"
    buffer.wait_until_finished(1, "val", {})
    assert looked == ["val", "val"]


def test_the_wait_for_a_deadline_is_counted() -> None:
    buffer, now = buffer_with(2, {"slow": 1, "fast": 2}, {"fast"}), [10.0]
    buffer.clock = lambda: now[0]
    assert choose(buffer, step=3, batch_size=1) is None
    now[0] = 17.0
    assert choose(buffer, step=3, batch_size=1) is None
    buffer.finished_keys["train"].add("slow")
    assert choose(buffer, step=3, batch_size=1) == ["slow"]
    assert buffer._counts["train"]["deadline_wait_s"] == 7.0, "the wait began with the first look"


def test_metrics_of_what_a_batch_leaves() -> None:
    """Catches an age counted from the wrong step, and the taken prompts counted as left."""
    buffer = buffer_with(4, {"taken": 1, "ready": 2, "slow": 2, "new": 4}, {"taken", "ready"})
    buffer.failure_keys["train"] = {"slow"}
    buffer.running_keys["train"].discard("slow")
    buffer._terminal_eviction_reasons(3, "train")
    now = [10.0]
    buffer.clock = lambda: now[0]
    buffer._held_back_since = 4.0
    for _ in range(2):
        buffer._stop_waiting()  # the second adds nothing
    assert buffer._metrics(5, "train", {"taken"}) == {
        "vcpo/async/deadline_wait_s": 6.0,
        "vcpo/async/reissued_prompts": 0,
        "vcpo/async/retried_prompts": 1,
        "vcpo/async/skipped_prompts": 0,
        "vcpo/buffer/unfinished": 2,
        "vcpo/buffer/finished": 1,
        "vcpo/buffer/age/max": 3,
    }
    assert buffer.ages == {1: 1, 2: 1, 3: 1}, "a prompt that failed counts from when it was sampled again"
    assert buffer._metrics(5, "train", {"taken", "ready", "slow", "new"})["vcpo/buffer/age/max"] == 0


def in_flight(lag: int, batch_size: int, step: int) -> dict[str, int]:
    """The prompts that a run has left after step `step`, all submitted at the last `lag` steps."""
    return {f"{at}.{i}": at for at in range(step - lag + 1, step + 1) for i in range(batch_size)}


@pytest.mark.parametrize(("lag", "prompts"), [(0, 0), (0.5, 1), (1.9, 5), (2, 6)])
def test_a_part_of_a_batch_in_flight_is_rounded_down(lag: float, prompts: int) -> None:
    assert deadlines.in_flight(lag, 3) == prompts
    submitted = {f"p{i}": 1 for i in range(8)}
    resumed = resume_prompts(submitted, set(), step=2, lag=lag, batch_size=3)
    assert resumed.again == list(submitted)[:prompts] and resumed.withheld == list(submitted)[prompts:]


def test_a_fractional_lag_is_rounded_up_where_a_run_resumes() -> None:
    submitted = {"a": 1, "b": 1, "c": 2}
    resumed = resume_prompts(submitted, set(submitted), step=3, lag=1.5, batch_size=2)
    assert resumed.kept == ["a", "b", "c"], "a and b are due at step 3"


def test_a_resumed_buffer_takes_the_oldest_prompts_whatever_order_they_are_stored_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TransferQueue promises no order. Two of the three prompts are allowed in flight, so the youngest has to wait."""
    stored = {uid: {"is_prompt": True, "status": "pending", "global_steps": step} for uid, step in STORED}
    stored["older_0_0"] = {"is_prompt": False}  # of a prompt that is sampled again
    withheld: list[str] = []
    cleared: list[list[str]] = []
    said: list[str] = []
    monkeypatch.setattr(replay_buffer, "print_line", said.append)
    monkeypatch.setattr(tq, "kv_list", lambda partition: {"train": stored})
    monkeypatch.setattr(tq, "kv_batch_get", lambda keys, partition_id: TensorDict({"uid": keys, "index": keys}))
    monkeypatch.setattr(tq, "kv_batch_put", lambda **of_tags: None)
    monkeypatch.setattr(tq, "kv_clear", lambda keys, partition_id: cleared.append(keys))
    monkeypatch.setattr(withheld_prompts, "withhold", lambda prompts: withheld.extend(prompts["uid"]))
    buffer = buffer_with(2, {}, set())
    assert buffer.resume(step=4, batch_size=1) == 2 and withheld == ["young"] and cleared == [["older_0_0"], ["young"]]
    assert [*buffer._submission_number] == ["older", "old"]
    assert len(said) == 1 and "0 are sampled again, 1 wait for their turn" in said[0]
    assert buffer_with(3, {}, set()).resume(step=4, batch_size=1) == 3 and len(said) == 1


def test_as_few_finished_prompts_are_sampled_again_as_the_bound_allows() -> None:
    """At a lag of 2 and 2 prompts a step, 4 submitted at step 1 are due at steps 2 and 3; at step 3 only 2 of them."""
    submitted = {f"p{i}": 1 for i in range(4)}
    for step, kept in ((2, 4), (3, 2), (4, 0)):
        resumed = resume_prompts(submitted, set(submitted), step=step, lag=2, batch_size=2)
        assert resumed.kept == list(submitted)[4 - kept :] and resumed.again == list(submitted)[: 4 - kept]


@pytest.mark.parametrize("mode", OnDeadline)
@pytest.mark.parametrize("unfinished", [0, 3])
@pytest.mark.parametrize(
    ("old_lag", "new_lag", "old_batch", "new_batch"),
    [(8, 8, 16, 16), (8, 7, 16, 16), (8, 4, 16, 16), (8, 0, 16, 16), (8, 8, 16, 8), (8, 12, 16, 16), (8, 3, 16, 24)],
)
def test_a_checkpoint_resumes_with_other_settings(
    old_lag: int, new_lag: int, old_batch: int, new_batch: int, unfinished: int, mode: OnDeadline
) -> None:
    """What is kept and what is sampled again can be consumed in time, with the batch that the first step submits."""
    submitted = in_flight(old_lag, old_batch, step=20)
    finished = {uid for i, uid in enumerate(submitted) if not unfinished or i % unfinished}
    resumed = resume_prompts(submitted, finished, step=21, lag=new_lag, batch_size=new_batch)
    assert sorted([*resumed.kept, *resumed.again, *resumed.withheld]) == sorted(submitted), "none is lost"
    assert set(resumed.kept) <= finished
    if (old_lag, old_batch) == (new_lag, new_batch):
        assert set(resumed.kept) == finished and not resumed.withheld
    after = {uid: submitted[uid] for uid in resumed.kept} | dict.fromkeys(resumed.again, 21)
    after |= {f"new{i}": 21 for i in range(new_batch)}
    buffer = buffer_with(new_lag, after, set(after), mode)
    for step in range(21, 21 + new_lag + 1):
        if len(after) < new_batch:
            break
        consumed = choose(buffer, step, new_batch)
        assert consumed is not None, "everything is finished: a step that waits would wait for ever"
        assert max(step - after.pop(uid) for uid in consumed) <= new_lag
        buffer = buffer_with(new_lag, after, set(after), mode)


def test_deadlines_that_cannot_hold_end_the_run_instead_of_a_wait_without_end() -> None:
    buffer = buffer_with(1, {f"p{i}": 1 for i in range(6)}, {f"p{i}" for i in range(6)})
    with pytest.raises(RuntimeError, match=r"a lag of 1: every prompt is finished, and at step 2 .* cannot hold"):
        choose(buffer, step=2, batch_size=2)


def test_a_long_wait_says_what_for(capfd: pytest.CaptureFixture[str]) -> None:
    buffer = buffer_with(2, {"old": 3, "new": 4}, set())
    now = [1000.0]
    buffer.clock, buffer.sleep = lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + 10.0)
    buffer._waiting_since = buffer._last_told = 1000.0
    for _ in range(12):
        buffer._wait_for_next_poll("train", 0.0)
    lines = [line for line in capfd.readouterr().out.splitlines() if "has waited" in line]
    assert lines == [
        f"The trainer has waited {seconds} s for samples: 2 prompts are unfinished; the oldest, old, was submitted at "
        "step 3."
        for seconds in (60, 120)
    ]
    buffer.running_keys["val"] = {"v"}
    buffer._print_waiting("val", 60.0)
    assert "Validation has waited 60 s for samples: 1 prompts are unfinished." in capfd.readouterr().out


def test_filtering_that_leaves_nothing_says_so_and_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rewards of 0 or 1 in all samples of a group; one group is kept after 30 that are filtered."""
    buffer, now = buffer_with(2, {"new": 4}, set()), [0.0]
    buffer.filter_groups_metric = "reward"
    buffer.clock = lambda: now[0]
    buffer._waiting_since = buffer._last_told = 0.0
    monkeypatch.setattr("transfer_queue.kv_clear", lambda **_: None)

    def filter_groups(wrong: int, right: int, kept: set[str], without_value: int = 0) -> None:
        now[0] += 40.0
        filtered = {f"{now[0]}-{number}" for number in range(wrong + right + without_value)}
        buffer.finished_keys["train"] = filtered | kept
        reasons = set(), filtered, set(), Counter({0.0: wrong, 1.0: right})
        assert buffer._evict_terminal_groups(4, "train", reasons)[0] == filtered

    def said() -> list[str]:
        return [line for line in capfd.readouterr().out.splitlines() if "has waited" in line]

    filter_groups(20, 10, set())
    assert not said(), "a minute is not over"
    filter_groups(1200, 0, {"kept"})
    assert "filtered" not in said()[0], "one that is kept counts more than any number of the same look"
    filter_groups(7, 3, {"kept"}, without_value=2)
    filter_groups(1, 0, {"kept"})
    (line,) = said()
    assert line.endswith(
        "; 13 groups in a row were filtered (algorithm.filter_groups): in 8 every sample has 0, in 3 every sample has "
        "1, in 2 async.truncated leaves nothing to compare."
    )
    for _ in range(9):
        filter_groups(100, 0, {"kept"})
    with pytest.raises(RuntimeError, match=r"^there is nothing to learn: 1063 groups in a row .* 958 every .*; give "):
        filter_groups(50, 100, {"kept"})
    filter_groups(0, 0, {"kept", "another"})
    assert not buffer._filtered.in_words()


def test_nothing_is_kept_of_prompts_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = buffer_with(2, {"a": 1, "b": 1}, {"a", "b"})
    buffer.note_submitted(TensorDict({"uid": ["a", "b"], "index": [5, 6]}, batch_size=2))
    buffer.failed_prompts._attempts.update({"a": 1, "b": 2})
    buffer._reissued |= {"a", "b"}
    notes = (
        *(buffer._sessions, buffer._submission_number, buffer._data_row, buffer._reissued),
        *(buffer.failed_prompts._attempts, buffer.failed_prompts._source),
    )
    cleared: list[str] = []
    monkeypatch.setattr("transfer_queue.kv_clear", lambda partition_id, keys: cleared.extend(keys))
    buffer.filter_groups_metric = "reward"
    buffer._clear_groups("train", {"a"})
    assert [set(of_prompts) for of_prompts in notes] == [{"b"}] * 6
    assert cleared == ["a"] and buffer.finished_keys["train"] == {"b"}, "verl's own method ran as well"
    buffer._metrics(2, "train", {"b"})
    assert not any(notes) and buffer.data_rows == [6]


def test_rows_of_the_data_may_have_names() -> None:
    """`extra_info.index` of a public data set is often a UUID."""
    buffer = buffer_with(2, {"a": 1, "b": 1, "c": 1}, {"a", "b", "c"})
    names = NonTensorStack("3f1a15a7-10cd", 12, "04b0-uuid")
    buffer.note_submitted(TensorDict({"uid": ["a", "b", "c"], "index": names}, batch_size=3))
    buffer._metrics(2, "train", {"a", "b", "c"})
    assert buffer.data_rows == [12, "04b0-uuid", "3f1a15a7-10cd"]
