"""The task `calculate`: traces are what the agent loop makes, and are rewarded as they should be; calls that wait."""

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest

from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings.values import check_types
from recipe.tasks import calculate, reward
from recipe.tasks.calculate import KINDS, Question
from recipe.tasks.tool_use import latency
from recipe.warm_start import tool_traces
from recipe.warm_start.tokenizer import TURN_END, phrase_tokenizer, prompt_text
from recipe.warm_start.tool_traces import Part, load_tool_traces, right_trace, wrong_trace
from recipe.warm_start.train import IGNORED, load_held_out, make_batch
from scripts import prepare_data
from tests.kit.sandbox_server import served
from tests.tasks.test_tool_use import CODE, Runner, ScriptedPolicy


@pytest.fixture(scope="module")
def sandbox_url() -> Iterator[str]:
    with served("--warm", "0", "--concurrency", "1") as (url, _):
        yield url


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return phrase_tokenizer(calculate.PHRASES)


def traces(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Question, list[Part], float]]:
    """A question of the kind, right traces of both forms and one with each mistake, and the reward of each."""
    rng = random.Random(kind)
    question = Question(kind, KINDS[kind].numbers(rng))
    for fixed in (0, 1):
        monkeypatch.setattr(tool_traces, "_FIXED_SHARE", fixed)
        yield question, right_trace(question, rng), 1.0
    for mistake in tool_traces.MISTAKES:
        monkeypatch.setattr(tool_traces, "MISTAKES", {mistake: 1})
        yield question, wrong_trace(question, rng), 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_traces_are_what_the_agent_loop_makes_with_the_sandbox(
    kind: str, tokenizer: Any, sandbox_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, taught where the loop's mask is 1; and the reward of the task's data source."""
    runner = Runner(tokenizer, sandbox_url, response_length=96, max_turns=3, drop_void_turns=False)
    for question, trace, expected in traces(kind, monkeypatch):
        written = [part.text for part in trace if part.taught]
        output = runner.run(*((text, 1) for text in [*written[:-1], written[-1] + TURN_END]))
        (tokens,), (labels,) = make_batch(tokenizer, [(question.prompt, trace)])
        prompt = len(tokenizer(prompt_text(tokenizer, question.prompt))["input_ids"])
        assert output.response_ids == tokens[prompt:].tolist(), trace
        assert output.response_mask == [int(label != IGNORED) for label in labels[prompt:]], trace
        response = tokenizer.decode(output.response_ids, skip_special_tokens=True)
        assert reward.compute_score(calculate.DATA_SOURCE, response, question.answer)["score"] == expected, trace


def test_the_preset_fits_all_traces_and_holds_out_what_it_tests_on(
    tokenizer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VCPO_HARDWARE", "cpu")
    config = main.compose(["+task=calculate"])
    check_types(config)
    with pytest.raises(ValueError, match="countdown or calculate"):
        load_held_out(tmp_path)
    assert prepare_data.main(["calculate", "--out", str(tmp_path), "--train", "9000", "--val", "1000"]) == 0
    lesson = load_tool_traces(tmp_path)
    taught = lesson.examples(0.5, random.Random(0))
    pairs = [next(taught) for _ in range(1000)]
    assert not {prompt for prompt, _ in pairs} & {*lesson.prompts}
    prompts = tokenizer([prompt_text(tokenizer, prompt) for prompt, _ in pairs])["input_ids"]
    whole = make_batch(tokenizer, pairs)[0].shape[1]
    assert max(map(len, prompts)) <= config.data.max_prompt_length
    assert whole <= min(config.data.max_response_length, config.actor_rollout_ref.rollout.max_model_len)
    assert lesson.solved(0, f"```python\n{lesson.programs[0]}\n```\n") == 1 != lesson.solved(1, lesson.programs[1])


def test_waits_are_log_normal_and_equal_in_every_run() -> None:
    waits = [latency.seconds(2.0, 1.0, [1, 2], sample, turn) for sample in range(1000) for turn in (1, 2)]
    assert waits == [latency.seconds(2.0, 1.0, [1, 2], sample, turn) for sample in range(1000) for turn in (1, 2)]
    assert len({*waits}) == 2000
    tenths = statistics.quantiles(waits, n=10)
    assert tenths[4] == pytest.approx(2.0, rel=0.1) and tenths[8] == pytest.approx(2.0 * 3.6, rel=0.15)
    assert latency.seconds(2.0, 1.0, [1, 3], 0, 1) != waits[0] and latency.seconds(0.0, 1.0, [1, 2], 0, 1) == 0


def test_calls_that_wait_hold_no_place_in_the_sandbox(tokenizer: Any, sandbox_url: str) -> None:
    """It has one place; eight calls that each wait 2 s in it would take 16 s."""
    answer = [(CODE, 1), ("\\boxed{42}" + TURN_END, 1)]
    names = [f"task {number}" for number in range(8)]
    runner = Runner(tokenizer, sandbox_url, latency_median_s=2.0, latency_sigma=0.0)
    policy = ScriptedPolicy(tokenizer, dict.fromkeys(names, answer))

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*[runner.trajectory(policy, name) for name in names])

    begun = time.monotonic()
    counts = [output.extra_fields["tool_use"] for output in asyncio.run(all_of_them())]
    assert time.monotonic() - begun < 12
    assert all(count["call_s"] >= 2 and count["calls"] == 1 and count["turns"] == 2 for count in counts)
