"""Steps in which no prompt has samples of different reward are counted and said."""

from pathlib import Path

import pytest

from verl_vcpo.report.learning_signal import EQUAL_GROUPS, LONG, SignalWatch, equal_groups
from verl_vcpo.report.run_log import HEADLINES, RunLog, read_metrics


def test_the_share_of_prompts_with_one_reward() -> None:
    prompts = ["a", "b", "a", "b"]
    assert equal_groups(prompts, [0.0, 1.0, 0.0, 1.0]) == {EQUAL_GROUPS: 1.0}, "between prompts they may differ"
    assert equal_groups(prompts, [0.0, 1.0, 1.0, 1.0]) == {EQUAL_GROUPS: 0.5}
    assert equal_groups(prompts, [0.0, 1.0, 1.0, 0.0]) == {EQUAL_GROUPS: 0.0}
    assert equal_groups(prompts, [0.0, None, 1.0, 0.0]) == {}, "a reward model's are not known here"


def test_what_is_said_and_when() -> None:
    watch, shares = SignalWatch(), [1.0, 0.5, *[1.0] * 21]
    found = [watch.look_at({"step": i, "reward": 0.0, EQUAL_GROUPS: share}) for i, share in enumerate(shares, 1)]
    assert [count for count, _ in found] == [1, 0, *range(1, 22)]
    said = {count: text for (count, text) in found[2:] if text}
    assert list(said) == [1, LONG, 2 * LONG, 4 * LONG]
    assert said[1] == "step 3 has no signal: the samples of each prompt got the same reward"
    assert "vcpo check FILE --task NAME" in said[LONG] and "samples.jsonl" in said[LONG]
    assert watch.look_at({"step": 1, "reward": 0.0}) == (None, None)


def test_metrics_and_console_have_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path)
    metrics = dict.fromkeys(HEADLINES.values(), 0.0) | {"vcpo/async/deadline_wait_s": 0.0, EQUAL_GROUPS: 1.0}
    for step in (1, 2):
        log.write(step, metrics)
    assert [line["vcpo/steps_without_signal"] for line in read_metrics(tmp_path)] == [1, 2]
    assert capfd.readouterr().out.count("has no signal") == 1
