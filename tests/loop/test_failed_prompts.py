"""A prompt that fails is sampled again, and ends the run or is skipped where it always fails."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.loop.test_replay_buffer import buffer_with, failed_prompts
from verl_vcpo.common.step_lines import read_lines
from verl_vcpo.common.stored_tags import Failure
from verl_vcpo.loop.prompts.failed_prompts import MAX_ATTEMPTS
from verl_vcpo.report.run_log import SKIPPED_FILE


def test_a_prompt_that_fails_in_the_wait_for_all_of_a_step_is_sampled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reissued: list[str] = []
    buffer = buffer_with(2, {"a": 1}, {"a"}, reissued=reissued)
    buffer.exact = True
    buffer.finished_keys["train"], buffer.failure_keys["train"] = set(), {"a"}
    monkeypatch.setattr(buffer, "_sync_metadata_from_transfer_queue", lambda: None)
    monkeypatch.setattr(buffer, "sleep", lambda _: buffer.pending_keys["train"].clear())
    metrics: dict[str, float] = {}
    buffer.wait_until_finished(1, "train", metrics)
    assert reissued == ["a"] and metrics["vcpo/async/retried_prompts"] == 1


@pytest.mark.parametrize(("prompts", "others"), [(15, ["... and 12 others."]), (3, [])])
def test_prompts_that_failed_are_sampled_again_in_order(
    prompts: int, others: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    names, reissued = {f"{n:x}" for n in range(prompts)}, list[str]()
    buffer = buffer_with(2, dict.fromkeys(names, 1), set(), reissued=reissued)
    buffer.failure_keys["train"] = set(names)
    buffer._terminal_eviction_reasons(2, "train")
    assert reissued == sorted(names)
    lines = [f"Prompt {uid} failed, and is sampled again: {uid}" for uid in sorted(names)[:3]]
    assert capfd.readouterr().out.splitlines() == [*lines, *others], "each with its own cause"


def test_a_failed_prompt_is_tried_again_and_ends_the_run_when_it_always_fails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reissued: list[str] = []
    buffer = buffer_with(2, {"bad": 1}, set(), reissued=reissued)
    buffer.failed_prompts._failures_fn = lambda uids, partition_id: [
        Failure(f"{partition_id}: the reward of {uid} hangs") for uid in uids
    ]
    for _ in range(MAX_ATTEMPTS - 1):
        buffer.failure_keys["train"] = {"bad"}
        assert not any(buffer._terminal_eviction_reasons(2, "train")[:3]), "nothing is thrown away"
    assert reissued == ["bad"] * (MAX_ATTEMPTS - 1)
    buffer.failure_keys["train"] = {"bad"}
    with pytest.raises(
        RuntimeError, match="1 prompts failed 4 times each, .*: prompt bad, train: the reward of bad hangs"
    ):
        buffer._terminal_eviction_reasons(2, "train")
    lines = capfd.readouterr().out.splitlines()
    assert lines == ["Prompt bad failed, and is sampled again: train: the reward of bad hangs"] * (MAX_ATTEMPTS - 1)


def test_a_validation_prompt_that_fails_is_sampled_again(capfd: pytest.CaptureFixture[str]) -> None:
    """verl would count it as a wrong answer."""
    reissued: list[str] = []
    buffer = buffer_with(2, {}, set(), reissued=reissued)
    for _ in range(MAX_ATTEMPTS - 1):
        buffer.failure_keys["val"] = {"bad"}
        reasons = buffer._terminal_eviction_reasons(2, "val")
        assert not buffer._sampleable_terminal_keys("val", reasons), "the validation waits for it"
    assert reissued == ["bad"] * (MAX_ATTEMPTS - 1)
    assert capfd.readouterr().out == "Prompt bad failed, and is sampled again: bad\n" * (MAX_ATTEMPTS - 1)
    buffer.failure_keys["val"] = {"bad"}
    with pytest.raises(RuntimeError, match="1 prompts failed 4 times each"):
        buffer._terminal_eviction_reasons(2, "val")


def test_a_prompt_that_ends_samplers_is_not_sampled_again() -> None:
    reissued: list[str] = []
    buffer = buffer_with(2, {"a": 1}, set(), reissued=reissued)
    buffer.failed_prompts._failures_fn = lambda uids, _: [Failure("4 samplers failed", final=True) for _ in uids]
    buffer.failure_keys["train"] = {"a"}
    with pytest.raises(RuntimeError, match="prompt a cannot be sampled: 4 samplers failed"):
        buffer._terminal_eviction_reasons(1, "train")
    assert not reissued


def test_a_prompt_that_always_fails_is_skipped_and_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`a7` fails 4 times, `b1` once; `c3` ends samplers at its first attempt."""
    reissued: list[str] = []
    failed = failed_prompts("skip", run_dir=tmp_path)
    failed._failures_fn = lambda uids, _: [Failure(f"{uid} hangs", final=uid == "c3") for uid in uids]
    buffer = buffer_with(2, {"a7": 1, "b1": 1, "c3": 2}, set(), reissued=reissued, failed=failed)
    skipped = []
    for failures in ({"a7", "b1"}, {"a7", "c3"}, {"a7"}, {"a7"}):
        buffer.failure_keys["train"] = set(failures)
        skipped.append(buffer._terminal_eviction_reasons(5, "train")[2])
    assert skipped == [set(), {"c3"}, set(), {"a7"}] and reissued == ["a7", "b1", "a7", "a7"]
    assert buffer._metrics(5, "train", set())["vcpo/async/skipped_prompts"] == 2
    file = tmp_path / SKIPPED_FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    shared = {"step": 5, "held_out": False, "prompt": "Compute.\n\n2 + 2?"}
    assert lines == [
        shared | {"row": "c3", "data_source": "c", "reason": "c3 hangs", "tries": 1, "uid": "c3"},
        shared | {"row": "a7", "data_source": "a", "reason": "a7 hangs", "tries": 4, "uid": "a7"},
    ]
    said = capfd.readouterr().out.splitlines()[-1]
    assert said.startswith("Row a7 of 'a' is skipped after 4 failures: a7 hangs. The next prompt takes its place")
    assert str(file) in said


def test_a_held_out_prompt_that_always_fails_is_no_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cleared: list[str] = []
    monkeypatch.setattr("transfer_queue.kv_clear", lambda partition_id, keys: cleared.extend(keys))
    buffer = buffer_with(0, {}, set(), failed=failed_prompts("skip", run_dir=tmp_path))
    buffer.prompt_global_steps["val"] = dict.fromkeys(("m1", "m2", "m3"), 7)
    buffer.partitions["val"] = {"m1_0_0": {}, "m2_1_0": {}}
    for _ in range(MAX_ATTEMPTS):
        buffer.failure_keys["val"] = {"m2"}
        assert not buffer._has_enough_samples(7, "val", 3, {"m1", "m3"})
        assert not any(buffer._terminal_eviction_reasons(7, "val")), "no prompt of training takes its place"
    assert cleared == ["m2", "m2_1_0"], "with its samples"
    assert buffer._has_enough_samples(7, "val", 3, {"m1", "m3"})
    asked = {("m", "m1"): 4, ("m", "m2"): 4, ("m", "m3"): 4}
    assert buffer.failed_prompts.without_skipped(asked) == ({("m", "m1"): 4, ("m", "m3"): 4}, 1)
    assert "is skipped after 4 failures: m2. It is not in the held-out accuracy" in capfd.readouterr().out
    assert json.loads((tmp_path / SKIPPED_FILE).read_text())["held_out"]


@pytest.mark.parametrize(
    ("partition", "max_skipped", "prompts", "trained", "skipped"),
    [
        ("train", 0.05, 8, 0, 6),  # a broken reward, from the start
        ("train", 0.05, 8, 500, 6),  # and later on
        ("train", 0.05, 1000, 500, 51),  # of all in flight: those that hang leave one after another
        ("train", 0.29, 8, 0, 30),
        ("train", 0.001, 8, 0, 2),  # one may always fail
        ("train", 1.0, 8, 500, 100),  # none at all is left
        ("val", 0.05, 200, 0, 11),
        ("val", 0.05, 16, 0, 2),
        ("val", 0.05, 1, 0, 1),  # a data source without an answer has no accuracy
        ("val", 1.0, 16, 0, 16),
    ],
)
def test_a_cause_that_prompts_share_ends_the_run(
    tmp_path: Path, partition: str, max_skipped: float, prompts: int, trained: int, skipped: int
) -> None:
    """Prompts of another data source never fail. The `skipped`-th prompt that is skipped ends the run."""
    failed = failed_prompts("skip", max_skipped, tmp_path)
    failed._failures_fn = lambda uids, _: [Failure("dead", final=True) for _ in uids]
    failed._source = {f"{source}{i}": source for source in "mo" for i in range(trained)}
    failed.note_trained(failed._source.keys(), prompts)
    present = [f"m{i}" for i in range(prompts)]
    others: Sequence[str] = [f"o{i}" for i in range(10 if partition == "val" else 0)]
    for i in range(skipped - 1):
        failed.to_skip({f"m{i}"}, partition, 1, [*others, *(present[i:] if partition == "val" else present)])
    left = present[skipped - 1 :] if partition == "val" else present
    with pytest.raises(
        RuntimeError, match=f"^async.max_skipped={max_skipped:g}: {skipped} of .* of 'm' .*: dead"
    ) as end:
        failed.to_skip({f"m{skipped - 1}"}, partition, 1, [*others, *left])
    file = tmp_path / SKIPPED_FILE
    assert str(file) in str(end.value) and len(file.read_text().splitlines()) == skipped
    failed.begin_validation()
    assert (sum(failed._left[partition, "m"]) == 0) == (partition == "val"), "each validation counts its own"


def test_what_was_skipped_long_ago_does_not_end_the_run(tmp_path: Path) -> None:
    failed = failed_prompts("skip", 0.05, tmp_path)
    failed._failures_fn = lambda uids, _: [Failure("dead", final=True) for _ in uids]
    for _ in range(3):
        assert failed.to_skip({f"m{i}" for i in range(5)}, "train", 1, []) == {f"m{i}" for i in range(5)}
        trained = {f"m{i}" for i in range(5, 105)}
        failed._source = dict.fromkeys(trained, "m")
        failed.note_trained(trained, 8)


def test_a_resumed_run_remembers_what_was_skipped_after_its_checkpoint(tmp_path: Path) -> None:
    """The prompt is in flight in the checkpoint; it may succeed, as the cause may have been mended meanwhile."""
    failed = failed_prompts("skip", run_dir=tmp_path)
    failed._failures_fn = lambda uids, _: [Failure("dead", final=True) for _ in uids]
    for step, uid in ((5, "m1"), (6, "m2")):
        failed.to_skip({uid}, "train", step, [])
    resumed = failed_prompts("skip", run_dir=tmp_path)
    resumed.resume(5)
    assert [line["uid"] for line in read_lines(tmp_path / SKIPPED_FILE)] == ["m1"]
    assert resumed.to_skip({"m2", "m3"}, "train", 6, []) == {"m2"}
