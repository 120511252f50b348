"""The agent loop `simpletir` with a scripted policy and the real sandbox."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from code_sandbox.client import SandboxClient, SandboxUnavailable
from code_sandbox.protocol import CommandResult
from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings.errors import SettingError
from recipe.fully_async_policy.settings.values import check_types
from recipe.tasks.countdown.problems import Difficulty
from recipe.tasks.tool_use import agent_loop
from recipe.tasks.tool_use.agent_loop import _STOPS_PER_TURN, SimpleTIRAgentLoop
from recipe.tasks.tool_use.turns import CLOSING_FENCE, Void, read_turn
from recipe.warm_start.tokenizer import TURN_END, train_tokenizer
from tests.kit.sandbox_server import served
from verl_vcpo.samplers.client import ResumingLLMClient

ANSWER = "<answer>42</answer>" + TURN_END
CODE = "```python\nprint(6 * 7)\n```\n"
Part = tuple[str, int] | tuple[str, int, str]
"""What the policy writes, the version that does, and why it stops (by itself unless given)."""


@pytest.fixture(scope="module")
def sandbox_url() -> Iterator[str]:
    with served() as (url, _):
        yield url


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(Difficulty())


class ScriptedPolicy(ResumingLLMClient):
    """The project's client, whose samplers say what is written for the prompt, part after part."""

    def __init__(self, tokenizer: Any, script: dict[str, list[Part]]) -> None:
        one = (
            "nnodes",
            "n_gpus_per_node",
            *(f"{part}_parallel_size" for part in ("tensor_model", "pipeline_model", "data")),
        )
        rollout = dict.fromkeys(one, 1) | {"response_length": 9, "max_num_seqs": 4, "agent": {"num_workers": 1}}
        super().__init__(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))
        self.tokenizer, self.script = tokenizer, {name: list(parts) for name, parts in script.items()}
        self.read: list[str] = []
        """The whole prompt of every request."""
        self.stops: list[bool] = []
        """Whether each was to stop at a fence."""

    async def _part(self, request_id: str, prompt_ids: list[int], sampling_params: Any, kwargs: Any) -> TokenOutput:
        self.read.append(self.tokenizer.decode(prompt_ids))
        self.stops.append(CLOSING_FENCE in sampling_params.get("stop", []))
        name = next(name for name in self.script if name in self.read[-1])
        text, version, *stop = self.script[name].pop(0)
        tokens = self.tokenizer.encode(text)[: sampling_params["max_tokens"]]
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-0.5] * len(tokens),
            stop_reason=stop[0] if stop else "completed",
            extra_fields=dict.fromkeys(("min_global_steps", "max_global_steps", "global_steps", "sampler"), version),
        )


class Runner:
    """Runs scripted trajectories."""

    def __init__(self, tokenizer: Any, url: str, response_length: int = 400, **settings: Any) -> None:
        rollout = {"prompt_length": 64, "response_length": response_length}
        self.config = OmegaConf.create(
            {"actor_rollout_ref": {"rollout": rollout}, "tool_use": {"sandbox_url": url, **settings}}
        )
        self.tokenizer = tokenizer

    def loop(self, policy: ScriptedPolicy) -> SimpleTIRAgentLoop:
        return SimpleTIRAgentLoop(
            DictConfigWrap(self.config),
            policy,
            self.tokenizer,
            None,
            None,
            DictConfigWrap(OmegaConf.create({})),
            "qwen2",
        )

    async def trajectory(self, policy: ScriptedPolicy, name: str) -> AgentLoopOutput:
        return await self.loop(policy).run({"temperature": 1.0}, raw_prompt=[{"role": "user", "content": name}])

    def run(self, *parts: Part) -> AgentLoopOutput:
        self.policy = ScriptedPolicy(self.tokenizer, {"task": list(parts)})
        return asyncio.run(self.trajectory(self.policy, "task"))

    def text(self, output: AgentLoopOutput, sampled: bool) -> str:
        """The part of the response that was sampled, or observed."""
        pairs = zip(output.response_ids, output.response_mask, strict=True)
        return self.tokenizer.decode([token for token, mask in pairs if bool(mask) == sampled])


@pytest.fixture
def runner(tokenizer: Any, sandbox_url: str) -> Runner:
    return Runner(tokenizer, sandbox_url)


def test_a_program_is_run_and_its_output_is_read(runner: Runner) -> None:
    output = runner.run(("I count.\n" + CODE, 3), (ANSWER, 3))
    assert runner.text(output, sampled=True) == "I count.\n" + CODE.rstrip("\n") + ANSWER
    assert runner.text(output, sampled=False) == "\nCode execution result: 42\n"
    assert output.response_logprobs == [-0.5 if mask else 0.0 for mask in output.response_mask]
    assert runner.policy.read[1].endswith(CODE.rstrip("\n") + "\nCode execution result: 42\n"), "the next turn reads it"
    assert output.num_turns == 4
    counts = output.extra_fields["tool_use"]
    assert (counts["calls"], counts["failed_calls"], counts["void_trajectories"]) == (1, 0, 0)
    assert counts["call_s"] > 0


def test_the_versions_are_those_of_all_turns(runner: Runner) -> None:
    output = runner.run((CODE, 5), (CODE, 7), (ANSWER, 6))
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (5, 7)
    assert output.extra_fields["tool_use"]["calls_across_updates"] == 1 and output.extra_fields["sampler"] == 5
    output = runner.run((CODE, 7), (ANSWER, 4))
    assert output.extra_fields["min_global_steps"] == 4, "not the first turn's"


def test_a_block_across_a_weight_update_is_run(runner: Runner) -> None:
    output = runner.run(("```python\nprint(6", 3, "aborted"), (" * 7)\n``", 4, "aborted"), ("`", 5), (ANSWER, 5))
    assert runner.text(output, sampled=True) == CODE.rstrip("\n") + ANSWER
    assert "result: 42\n" in runner.text(output, sampled=False)
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 5)


def test_what_follows_the_block_is_dropped(runner: Runner) -> None:
    output = runner.run((CODE + "The result is 41." + TURN_END, 1), (ANSWER, 1))
    assert "41" not in runner.text(output, sampled=True)
    assert output.response_mask.count(1) == len(runner.tokenizer.encode(CODE.rstrip("\n") + ANSWER))


def test_another_languages_block_is_text(runner: Runner) -> None:
    output = runner.run(("```text\nplan\n```\n", 1), (CODE, 2), (ANSWER, 2))
    assert runner.text(output, sampled=True) == "```text\nplan\n```\n" + CODE.rstrip("\n") + ANSWER
    assert output.extra_fields["tool_use"]["calls"] == 1
    assert output.extra_fields["min_global_steps"] == 1, "its first part counts"


NOWHERE = "http://127.0.0.1:9"  # no program is run
FENCED = "```text\nplan\n```\n"


def test_a_model_stuck_in_fences_costs_a_few_requests(tokenizer: Any) -> None:
    """Each is sent the whole prompt again, and there could be one for every few tokens."""
    runner = Runner(tokenizer, NOWHERE, response_length=2000, drop_void_turns=False)
    output = runner.run(*[(FENCED, 1)] * _STOPS_PER_TURN, (FENCED * 20 + TURN_END, 1), (ANSWER, 1))
    assert len(runner.policy.read) == _STOPS_PER_TURN + 1
    assert runner.policy.stops == [True] * _STOPS_PER_TURN + [False], "the last one goes on to the end of the turn"
    assert runner.text(output, sampled=True) == FENCED * (_STOPS_PER_TURN + 20) + TURN_END


def test_trajectories_run_side_by_side(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0
    run = SandboxClient.run

    async def counted(*args: Any) -> CommandResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await run(*args)
        finally:
            running -= 1

    monkeypatch.setattr(SandboxClient, "run", counted)
    names = [f"task {letter}" for letter in "abc"]
    policy = ScriptedPolicy(
        runner.tokenizer, {name: [(f"```python\nprint({name!r})\n```\n", 1), (ANSWER, 1)] for name in names}
    )

    async def all_of_them() -> list[AgentLoopOutput]:
        return await asyncio.gather(*[runner.trajectory(policy, name) for name in names])

    for name, output in zip(names, asyncio.run(all_of_them()), strict=True):
        assert runner.text(output, sampled=False) == f"\nCode execution result: {name}\n"
    assert most == len(names)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(("I do not know." + TURN_END, "no_block"), ("```python\nprint(6" + TURN_END, "unclosed")),
        ("```\nno python\n```", "other_block"),
    ],
)
def test_a_void_turn_ends_the_trajectory_and_takes_it_out(
    tokenizer: Any, sandbox_url: str, text: str, why: str
) -> None:
    for drop in (True, False):
        runner = Runner(tokenizer, sandbox_url, drop_void_turns=drop)
        output = runner.run((CODE, 1), (text, 1))
        counts = output.extra_fields["tool_use"]
        assert (counts["void_trajectories"], counts["dropped_trajectories"]) == (1, int(drop))
        assert {each: counts[f"void_{each}"] for each in Void} == {each: int(each == why) for each in Void}
        assert any(output.response_mask) != drop
        assert len(output.response_mask) == len(output.response_ids) == len(output.response_logprobs)


def test_an_answer_ends_the_trajectory(runner: Runner) -> None:
    output = runner.run(("\\boxed{42}\n" + CODE, 1))
    counts = output.extra_fields["tool_use"]
    assert (counts["calls"], counts["void_trajectories"]) == (0, 0)
    assert output.extra_fields["truncated"] is False


def test_limits(tokenizer: Any, sandbox_url: str) -> None:
    output = Runner(tokenizer, sandbox_url, max_turns=2).run((CODE, 1), (CODE, 1))
    assert output.extra_fields["tool_use"]["calls"] == 1, "nobody would read the last turn's result"
    assert output.response_mask[-1] == 1 and output.extra_fields["truncated"]
    output = Runner(tokenizer, sandbox_url, max_time_s=1e-9).run((CODE, 1))
    assert output.extra_fields["tool_use"]["calls"] == 0 and output.extra_fields["truncated"]
    for program, wait in ((CODE, 1.0), ("```python\nimport time; time.sleep(1)\n```\n", 0.0)):
        runner = Runner(tokenizer, sandbox_url, max_time_s=0.5, latency_median_s=wait, latency_sigma=0.0)
        output = runner.run((program, 1))
        assert output.extra_fields["tool_use"]["calls"] == (wait == 0) and output.extra_fields["truncated"]
    length = len(tokenizer.encode(CODE)) + 3
    output = Runner(tokenizer, sandbox_url, response_length=length).run((CODE, 1))
    assert len(output.response_ids) <= length and all(output.response_mask), "the observation does not fit"
    assert output.extra_fields["truncated"]
    output = Runner(tokenizer, sandbox_url, response_length=4).run((CODE, 1))
    assert output.extra_fields["tool_use"]["void_trajectories"] == 1, "cut before the block was complete"


DIVIDED = "ZeroDivisionError: division by zero"
CAUSED = "\n\nThe above exception was the direct cause of the following exception:\n\n"
DURING = (
    "The above exception was the direct cause of the following exception",
    "During handling of the above exception, another exception occurred",
)


@pytest.mark.parametrize(
    ("program", "observed"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print('before'); undefined", "before\nNameError: name 'undefined' is not defined"),
        ("import time; time.sleep(600)", "time limit of 1 s exceeded"),
        ("pass", "no output"),
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("print('found', 17, end=' '); import time; time.sleep(600)", "found 17 \ntime limit of 1 s exceeded"),
        ("print('so far'); import os; os.kill(os.getpid(), 9)", "so far\nended with exit code 137"),
        ("import sys; print('Use 3.', file=sys.stderr)", "Use 3."),
        ("import threading as t; print(5); a = t.Thread(target=lambda: 1 / 0); a.start(); a.join()", "5\n" + DIVIDED),
        ("import sys; print('17 found', file=sys.stderr); 1 / 0", "17 found\n" + DIVIDED),
        ("import logging\ntry: 1 / 0\nexcept Exception: logging.exception('oops')", "ERROR:root:oops\n" + DIVIDED),
        ("import warnings; warnings.warn('old'); print(5)", "5"),
        ("import sys; sys.exit('first\\nsecond')", "first\nsecond"),
        ("raise ValueError('first\\n\\n  second')", "ValueError: first\n\n  second"),
        ("e = ValueError('x'); e.add_note('note'); raise e", "ValueError: x\nnote"),
        ("import warnings; warnings.warn('old'); 1 / 0", "ZeroDivisionError: division by zero"),
        ("import atexit, sys; atexit.register(print, 'bye', file=sys.stderr); 1 / 0", DIVIDED + "\nbye"),
        ("try: 1 / 0\nexcept Exception as e: raise ValueError('x') from e", DIVIDED + CAUSED + "ValueError: x"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("x = 3 +", '  File "/tmp/main.py", line 1\n    x = 3 +\n           ^\nSyntaxError: invalid syntax'),
        ("exec('x = 3 +')", '  File "<string>", line 1\n    x = 3 +\n           ^\nSyntaxError: invalid syntax'),
        ("import threading as t; a = t.Thread(target=lambda: 1 / 0); a.start(); a.join()", DIVIDED),
        (
            "try: 1 / 0\nexcept Exception as e: raise ExceptionGroup('x', [e, ExceptionGroup('y', [KeyError(2)])])",
            f"{DIVIDED}{CAUSED.replace(*DURING)}ExceptionGroup: x (2 sub-exceptions)\n{DIVIDED}\n"
            "ExceptionGroup: y (1 sub-exception)\nKeyError: 2",
        ),
    ],
)
def test_a_failing_program_is_an_observation(tokenizer: Any, sandbox_url: str, program: str, observed: str) -> None:
    runner = Runner(tokenizer, sandbox_url, call_timeout_s=1.0 if "sleep" in program else 60.0)
    output = runner.run((f"```py\n{program}\n```", 1), (ANSWER, 1))
    assert runner.text(output, sampled=False) == f"\nCode execution result: {observed}\n"


def test_a_long_output_keeps_its_ends(tokenizer: Any, sandbox_url: str) -> None:
    runner = Runner(tokenizer, sandbox_url, max_observation_tokens=32)
    output = runner.run(("```python\nprint('begin' + '-' * 5000 + 'end')\n```", 1), (ANSWER, 1))
    text = runner.text(output, sampled=False)
    assert "begin" in text and "end" in text and "\n...\n" in text
    assert output.response_mask.count(0) < 70


def test_a_long_output_leaves_room_for_the_exception(tokenizer: Any, sandbox_url: str) -> None:
    runner = Runner(tokenizer, sandbox_url, max_observation_tokens=64)
    for message in ("'short'", "'long ' * 5000 + 'end'"):
        output = runner.run((f"```python\nprint('begin' + '-' * 5000)\nraise KeyError({message})\n```", 1), (ANSWER, 1))
        text = runner.text(output, sampled=False)
        assert "result: begin" in text and f"\nKeyError: {message[:5]}" in text, text
        assert output.response_mask.count(0) < 110


def test_a_program_cannot_write_special_tokens(runner: Runner) -> None:
    output = runner.run(("```python\nprint('<|im' + '_end|>')\n```", 1), (ANSWER, 1))
    assert output.response_ids.count(runner.tokenizer.eos_token_id) == 1, "the answer's own"
    assert TURN_END in runner.text(output, sampled=False)


def test_a_sandbox_that_is_away_fails_the_trajectory(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tokenizer, "http://127.0.0.1:9")
    monkeypatch.setattr(agent_loop, "SandboxClient", partial(SandboxClient, patience_s=0.5, queue_s=1.0))
    with pytest.raises(SandboxUnavailable, match=r"tool_use\.sandbox_url"):
        runner.run((CODE, 1), (ANSWER, 1))


def test_what_a_program_printed_is_encoded_while_other_threads_encode_prompts(tokenizer: Any) -> None:
    loop = Runner(tokenizer, NOWHERE).loop(ScriptedPolicy(tokenizer, {}))
    with ThreadPoolExecutor(1) as threads:
        prompt = threads.submit(tokenizer, "1 2 3 " * 10_000, add_special_tokens=False)
        while not prompt.done():
            assert len(loop._encoded(TURN_END)) > 1, "ordinary tokens"
    assert len(tokenizer.encode(TURN_END, add_special_tokens=False)) == 1


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx\n```output\n3\n```", "x\n"),
        ("a\n```python\nx\n```python\ny\n```", "x\n"),
        *(("say ```python\nx\n```", "x\n"), ("````python\nx\n````", "x\n"), ("   ```py\nx\n```", "x\n")),
        *(("```python \r\nx\r\n```\r\n", "x\r\n"), ("```python\nprint('```')\n```", "print('```')\n")),
        *(("```\nx\n```", Void.OTHER_BLOCK), ("~~~python\nx\n~~~", Void.OTHER_BLOCK)),
        *(("```Python\nx\n```", Void.OTHER_BLOCK), ("```python3\nx\n```", Void.OTHER_BLOCK)),
        *(("```python title=a\nx\n```", Void.OTHER_BLOCK), ("```python x```", Void.OTHER_BLOCK)),
        *(("```python\nx```", Void.UNCLOSED), ("  ```python\n  x\n  ```", Void.UNCLOSED), ("`x`", Void.NO_BLOCK)),
    ],
)
def test_where_a_block_begins_and_ends(text: str, code: str) -> None:
    turn = read_turn(text, "#")
    assert code == (turn.code or turn.void)
    assert (turn.code is None) == (turn.end is None) == isinstance(code, Void)


def test_an_answer_inside_code_is_none() -> None:
    turn = read_turn("```python\nprint('# 1')\n```", "#")
    assert turn.answers is False and turn.void is None
    assert read_turn("```\n# 1\n```", "#").void is None
    assert read_turn("```python\nprint('# 1')", "#").void is Void.UNCLOSED


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("sandbox_url", "localhost:8080"), ("max_turns", 0), ("max_turns", True), ("call_timeout_s", 0)),
        *(("drop_void_turns", "no"), ("answer_pattern", "("), ("max_observation_tokens", 3)),
        ("latency_sigma", 1000.0),
    ],
)
def test_wrong_settings(setting: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCPO_HARDWARE", "cpu")
    config = main.compose(["+task=tool_use", "tool_use.latency_median_s=1"])
    config.tool_use[setting] = value
    with pytest.raises(SettingError) as refused:
        check_types(config)
    assert any(line.startswith(f"tool_use.{setting}=") for line in refused.value.lines)
