"""A tool, or an agent loop, that never returns fails its prompt in time, and its worker goes on."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools import function_tool
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import load_function_tools_from_path
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.trainer.ppo.v1 import agent_loop_tq

from tests.loop.test_agent_loop import VERLS_WORKER, worker_of
from verl_vcpo.loop.trainer import LagKTrainer
from verl_vcpo.samplers import agent_loop
from verl_vcpo.samplers.client import Seconds
from verl_vcpo.user_code.tool_limits import LimitedFunctionTool, ToolFailure, limited

LIMIT_S, SHORT_S = 60.0, 1.0
FUNCTIONS = '''
import asyncio, os, time
from verl.tools.function_tool import function_tool

class Own:
    def __str__(self): return "shown"

@function_tool
def work(how: str) -> str:
    """Does as it is told.

    Args:
        how: what to do.
    """
    if how == "hang": time.sleep(3600)
    if how == "die": os._exit(3)
    if how == "raise": raise ValueError("no such thing")
    if how == "own": return Own()
    return str(os.getpid())

@function_tool("later")
async def _(how: str) -> str:
    """Does it later.

    Args:
        how: what to do.
    """
    await asyncio.sleep(3600 if how == "hang" else 0)
    return str(os.getpid())
'''


class State(BaseTool):
    """A tool with a state, which no process could be given."""

    lock = threading.Lock()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> tuple[ToolResponse, float, dict]:
        if parameters["how"] == "wait":
            await asyncio.sleep(3600)
        return ToolResponse(text="state"), 0.5, {}


SCHEMA = {
    "type": "function",
    "function": {
        "name": "state",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


def called(tools: list[Any], name: str, how: str) -> Any:
    """What verl's agent loop gets of a call that a model writes."""
    loop = object.__new__(ToolAgentLoop)
    loop.tools = {tool.name: tool for tool in tools}
    loop.max_tool_response_length, loop.tool_response_truncate_side = 256, "left"
    return loop._call_tool(FunctionCall(name=name, arguments=f'{{"how": "{how}"}}'), {}, None)


@pytest.fixture
def tools(tmp_path: Path) -> Any:
    """Limited ones, of both kinds; the processes end with the test."""
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    state = State({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
    tools = limited([*load_function_tools_from_path(str(file)), state], str(file), SHORT_S)
    yield tools
    function_tool.FUNCTION_TOOL_REGISTRY.clear()


async def and_close(work: Coroutine[Any, Any, None], tools: list[Any]) -> None:
    """Do this work with the tools, and end their processes."""
    try:
        await work
    finally:
        for tool in tools:
            if isinstance(tool, LimitedFunctionTool):
                tool.pool.close()


def test_calls_that_hang_fail_and_later_ones_run(tools: list[Any]) -> None:
    async def scenario() -> None:
        for name, how in (("work", "hang"), ("later", "hang"), ("state", "wait")):
            with pytest.raises(ToolFailure) as failed:
                await called(tools, name, how)
            said = str(failed.value.error)
            assert said == f"the tool {name} took longer than 1 s; raise async.tool_timeout_s, or mend the function"
        hung = [asyncio.ensure_future(called(tools, "work", "hang")) for _ in range(7)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "runs"), LIMIT_S) == "runs"
        results = await asyncio.gather(*hung, return_exceptions=True)
        assert all(isinstance(result, ToolFailure) for result in results)
        response, reward, _ = await called(tools, "state", "now")
        assert (response.text, reward) == ("state", 0.5)
        for name in ("work", "later"):
            response, _, _ = await called(tools, name, "now")
            assert response.text.isdigit(), "in a process of its own"

    asyncio.run(and_close(scenario(), tools))


def test_the_workers_tools_are_limited(tools: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tools[0].pool._function.path
    rollout = {"multi_turn": {"function_tool_path": path}}
    reward = {"custom_reward_function": {}, "reward_manager": {"source": "register", "name": "naive"}}
    others = {"async": {"tool_timeout_s": 7}, "reward": {**reward, "reward_model": {"enable": False}}}
    config = DictConfig({"actor_rollout_ref": {"rollout": rollout}, **others})

    def verls(self: Any) -> None:
        self.config, self.tools = config, load_function_tools_from_path(path)

    monkeypatch.setattr(VERLS_WORKER, "__init__", verls)
    monkeypatch.setattr(agent_loop, "agent_loops_per_worker", lambda _: 1)
    for of_its_process in ("gather_puts", "make_directly"):
        monkeypatch.setattr(agent_loop, of_its_process, lambda: None)
    limits_s = {tool.name: tool.pool._function.timeout_s for tool in agent_loop.LagKAgentLoopWorker().tools}
    assert limits_s == {"work": 7, "later": 7}


def test_a_process_that_ends_fails_and_what_is_raised_is_told_to_the_model(tools: list[Any]) -> None:
    async def scenario() -> None:
        with pytest.raises(ToolFailure) as failed:
            await called(tools, "work", "die")
        assert "the tool work gave no result: its process ended with exit code 3" in str(failed.value.error)
        assert (await called(tools, "work", "raise"))[0].text == "Error executing tool 'work': no such thing"
        assert (await called(tools, "work", "own"))[0].text == "shown"

    asyncio.run(and_close(scenario(), tools))


def failing(monkeypatch: pytest.MonkeyPatch, limit_s: float, respond: Any, tools: Any = ()) -> list[str]:
    """Why a prompt failed whose agent loop is `respond`."""
    reasons: list[str] = []
    statuses: list[str] = []

    async def put(key: str, partition_id: str, tag: dict[str, Any]) -> None:
        reasons.extend(tag[name] for name in tag if name == agent_loop.REASON)
        statuses.extend(tag[name] for name in tag if name == "status")

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put)
    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    worker = worker_of(1)
    worker.config["async"].trajectory_timeout_s = limit_s
    prompt = {"uid": "u", "raw_prompt": [{"role": "user", "content": "1 + 1?"}]}

    async def scenario() -> None:
        await and_close(worker._run_prompt(prompt, {}, {"validate": False, "step": 1, "sample_index": 7}), tools)
        await asyncio.wait_for(asyncio.to_thread(lambda: None), LIMIT_S / 6)

    asyncio.run(scenario())
    assert statuses == ["running", "failure" if reasons else "finished"]
    return reasons


def test_the_prompt_of_a_tool_that_hangs_fails(tools: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def respond(self: Any, *_: Any, **__: Any) -> None:
        await called(tools, "work", "hang")

    (reason,) = failing(monkeypatch, LIMIT_S, respond, tools)
    assert "the tool work took longer than 1 s" in reason and "(the prompt: '1 + 1?')" in reason


def test_an_agent_loop_that_hangs_fails_and_its_threads_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    async def respond(self: Any, *_: Any, **__: Any) -> None:
        await asyncio.gather(*[asyncio.to_thread(goes_on.wait, LIMIT_S) for _ in range(64)])

    try:
        (reason,) = failing(monkeypatch, 0.2, respond)
    finally:
        goes_on.set()
    assert "the agent loop, with its reward, took longer than 0.2 s outside of its requests to samplers" in reason
    assert "raise async.trajectory_timeout_s" in reason


def test_the_time_of_requests_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def respond(self: Any, *_: Any, **__: Any) -> None:
        requests = agent_loop.at_samplers.get()
        with requests.counted():
            await asyncio.sleep(0.5)

    assert failing(monkeypatch, 0.3, respond) == []


def test_a_worker_that_is_blocked_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, blocked = object.__new__(agent_loop.LagKAgentLoopManager), False
    manager.agent_loop_workers = [SimpleNamespace(answer=SimpleNamespace(remote=lambda: "answer"))] * 2
    manager.config = DictConfig({"async": {"trajectory_timeout_s": 50}})
    manager._answers, manager._asked, now = [], 0.0, 0.0
    monkeypatch.setattr(agent_loop.time, "monotonic", lambda: now)
    monkeypatch.setattr(agent_loop.ray, "wait", lambda refs, **_: ([], refs) if blocked else (refs, []))
    monkeypatch.setattr(agent_loop.ray, "get", lambda refs: refs)
    trainer = object.__new__(LagKTrainer)
    trainer.agent_loop_manager, manager._handing_over = manager, []
    trainer.sampler_keeper = SimpleNamespace(sleep=lambda seconds: None)
    for now in (10.0, 100.0):  # between them the trainer did not wait for samples  # noqa: B007
        trainer._sleep(0.0)
    assert manager._asked == 100.0
    blocked = True
    now = 149.0
    trainer._sleep(0.0)
    now = 150.0
    with pytest.raises(RuntimeError, match=r"2 agent-loop worker\(s\) have not answered for so long"):
        trainer._sleep(0.0)


def test_two_requests_at_a_time_count_once() -> None:
    spent = Seconds()
    with spent.counted(), spent.counted():
        time.sleep(0.05)
    total = spent.total
    with spent.counted():
        assert spent.total >= total >= 0.05
    assert spent._ended < 2 * total, "not one after the other"
