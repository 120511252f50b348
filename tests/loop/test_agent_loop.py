"""Agent loops begin as the samplers have room for them, those with the earliest deadline first."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from ray.exceptions import RayActorError
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils import tensordict_utils as tu

from tests.reliability.memory_queue import MemoryQueue
from verl_vcpo.common import stored_tags
from verl_vcpo.common.data_columns import OF_A_RESPONSE, OF_THE_LOOP
from verl_vcpo.common.data_rows import row_number
from verl_vcpo.common.truncated import soft_length_penalty
from verl_vcpo.loop.trainer import LagKTrainer
from verl_vcpo.samplers import agent_loop
from verl_vcpo.samplers.admission import AdmissionGate
from verl_vcpo.samplers.agent_loop import LagKAgentLoopManager, LagKAgentLoopWorker
from verl_vcpo.samplers.client import RequestEndsServers
from verl_vcpo.user_code.errors import UserCodeError

VERLS_WORKER = LagKAgentLoopWorker.__mro__[1]
"""verl's worker, which the tests' workers extend."""


def worker_of(places: int, samples: int = 1) -> LagKAgentLoopWorker:
    """A worker that has `places` for agent loops, and runs `samples` of them for a prompt of training."""
    worker = object.__new__(LagKAgentLoopWorker)
    rollout = SimpleNamespace(n=samples, val_kwargs=SimpleNamespace(n=1))
    worker.config = DictConfig(
        {"async": {"deterministic": False, "trajectory_timeout_s": 3600, "truncated": "train"}},
        flags={"allow_objects": True},
    )
    worker.config.actor_rollout_ref = {"rollout": rollout}
    worker._loops, worker._held, worker.background_tasks = AdmissionGate(places), {}, set()
    return worker


async def run_prompts(worker: LagKAgentLoopWorker, submitted: list[tuple[bool, int]]) -> None:
    """Run a prompt for each (validation or not, step)."""
    trajectories = [{"validate": validate, "step": step, "sample_index": 0} for validate, step in submitted]
    await asyncio.gather(*[worker._run_prompt({"uid": str(i)}, {}, t) for i, t in enumerate(trajectories)])


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statuses that are written to TransferQueue, in their order."""
    statuses: list[str] = []

    async def put(key: str, partition_id: str, tag: dict[str, Any]) -> None:
        statuses.append(tag["status"])

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put)
    return statuses


@pytest.mark.parametrize(
    ("reward", "beside", "kept", "reason"),
    [
        (0.5, None, {"score": 0.5, "acc": 0.5}, None),
        (0.5, {"acc": True, "ratio": float("nan")}, {"score": 0.5, "acc": 1.0}, None),
        (0.5, {"score": 1, "over": torch.tensor(-0.5)}, {"score": 1.0, "acc": 1.0, "over": -0.5}, None),
        (float("nan"), None, None, "returned nan"),
        (float("inf"), {"score": 1.0}, None, "returned inf"),
        (0.5, {"reward": 1.0}, None, "returned a dict with 'reward', a name of verl's own"),
        (0.5, [1.0], None, "has reward_extra_info [1.0] (list)"),
    ],
)
def test_a_reward_of_no_function_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, reward: float, beside: Any, kept: dict[str, Any] | None, reason: str | None
) -> None:
    """One that the agent loop itself gives, as an own one may, or a reward manager."""
    reasons: list[str] = []
    outputs: list[AgentLoopOutput] = []

    async def put(key: str, partition_id: str, tag: dict[str, Any]) -> None:
        reasons.extend(tag[name] for name in tag if name == agent_loop.REASON)

    async def respond(self: Any, sampling_params: Any, trajectory: dict[str, Any], **kwargs: Any) -> None:
        output = AgentLoopOutput(
            prompt_ids=[1], response_ids=[2], response_mask=[1], reward_score=reward, metrics=AgentLoopMetrics(),
            extra_fields={} if beside is None else {"reward_extra_info": beside},
        )  # fmt: skip
        await self._compute_score([output], kwargs)
        outputs.append(output)

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put)
    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    worker = worker_of(1)
    worker.reward_loop_worker_handles, worker.distillation_enabled = None, False
    worker.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"token {ids}")
    row = {"index": 7, "data_source": "toy", "raw_prompt": [{"role": "user", "content": "1 + 1?"}]}
    prompt = {"uid": "u", **row}
    asyncio.run(worker._run_prompt(prompt, {}, {"validate": False, "step": 1, "sample_index": 7}))
    assert reasons == [] if reason is None else len(reasons) == 1
    assert [output.extra_fields["reward_extra_info"] for output in outputs] == ([kept] if kept else [])
    for said in reasons:
        assert f"the reward of this run {reason}, on row 7 of 'toy'" in said
        assert "starts with 'token [2]'" in said and "(the prompt: '1 + 1?')" in said


@pytest.mark.parametrize(
    ("response", "own", "truncated"),
    [
        *[([5, 9], None, False), ([5] * 8, None, True), ([*[5] * 7, 9], None, False), ([*[5] * 7, 4], None, False)],
        *[([5, 9], True, True), ([5] * 8, False, True)],
    ],
)
@pytest.mark.parametrize("treatment", ["train", "mask", "drop", "penalty"])
def test_truncated_responses_are_marked_and_long_ones_lose_reward(
    monkeypatch: pytest.MonkeyPatch, treatment: str, response: list[int], own: bool | None, truncated: bool
) -> None:
    """At most 8 tokens, of which the last 4 cost; 9 and 4 are end tokens."""
    stored: list[dict[str, Any]] = []
    tags: dict[str, Any] = {}

    async def put(keys: list[str], partition_id: str, tags: list[dict[str, Any]], into: Any = tags) -> None:
        into.update(zip(keys, tags, strict=True))

    async def store(self: Any, outputs: list[AgentLoopOutput], validate: bool, **kwargs: Any) -> None:
        await self._compute_score(outputs, kwargs)
        stored.append(outputs[-1].extra_fields | {"score": outputs[-1].reward_score})

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", put)
    monkeypatch.setattr(VERLS_WORKER, "_agent_loop_postprocess", store)
    worker = worker_of(1)
    worker.config["async"].update(truncated=treatment, overlong_buffer_len=4, overlong_penalty_factor=2.0)
    worker.reward_loop_worker_handles = None
    worker.tokenizer, worker.rollout_config = SimpleNamespace(eos_token_id=9), SimpleNamespace(response_length=8)
    worker.model_config = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[9, 4]))
    for validate in (False, True):
        extra = {} if own is None else {"truncated": own}
        output = AgentLoopOutput(
            prompt_ids=[1], response_ids=response, response_mask=[1] * len(response), reward_score=1.0,
            metrics=AgentLoopMetrics(), extra_fields=extra,
        )  # fmt: skip
        asyncio.run(worker._agent_loop_postprocess([output], validate, uid="u", session_id=3))
    penalty = 2.0 if treatment == "penalty" and len(response) == 8 else 0.0
    assert [(of["truncated"], of["score"]) for of in stored] == [(truncated, 1.0 - penalty), (None, 1.0)]
    assert stored[0][agent_loop.RAW_REWARD] == 1.0 - penalty
    assert tags == ({"u_3_0": {"truncated": treatment}} if truncated and treatment in ("mask", "drop") else {})


def test_the_penalty_is_daposs_line() -> None:
    """Equation (13) of arXiv 2503.14476."""
    penalties = [soft_length_penalty(length, 20, 8, 1.0) for length in (1, 12, 13, 16, 20)]
    assert penalties == [0, 0, -1 / 8, -4 / 8, -1]


@pytest.mark.usefixtures("stored")
def test_as_many_at_a_time_as_the_gate_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[bool, int]] = []
    at_a_time: list[int] = []
    running = 0

    async def respond(self: Any, sampling_params: Any, trajectory: dict[str, Any], **_: Any) -> None:
        nonlocal running
        running += 1
        at_a_time.append(running)
        begun.append((trajectory["validate"], trajectory["step"]))
        await asyncio.sleep(0)
        running -= 1

    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    asyncio.run(run_prompts(worker_of(2), [(False, step) for step in (5, 4, 3, 2, 1)] + [(True, 6)]))
    assert max(at_a_time) == 2
    first_come, waited = begun[:2], begun[2:]
    assert first_come == [(False, 5), (False, 4)], "there was room for them"
    assert waited == [(True, 6), (False, 1), (False, 2), (False, 3)], "a validation, then by step"


def test_a_prompt_waits_as_one_and_gives_its_places_back_one_by_one(
    monkeypatch: pytest.MonkeyPatch, stored: list[str]
) -> None:
    ends = [asyncio.Event() for _ in range(8)]
    begun: list[int] = []

    async def respond(self: Any, sampling_params: Any, trajectory: dict[str, Any], session_id: int, **_: Any) -> None:
        begun.append(session_id)
        await ends[len(begun) - 1].wait()

    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    worker = worker_of(3, samples=4)

    async def settled() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def scenario() -> None:
        both = asyncio.ensure_future(run_prompts(worker, [(False, 1), (False, 2)]))
        await settled()
        assert begun == [0, 1, 2, 3], "a place was free: the prompt may take one more than there are"
        assert stored == ["running"] and len(asyncio.all_tasks()) == 8, "the other waits: this task, both, 2 + 4"
        ends[0].set()
        await settled()
        assert len(begun) == 4, "all places are taken"
        ends[1].set()
        await settled()
        assert begun == [0, 1, 2, 3, 0, 1, 2, 3]
        for end in ends:
            end.set()
        await both

    asyncio.run(scenario())
    assert worker._loops._free == 3 and stored == ["running", "running", "finished", "finished"]


def test_a_prompt_that_is_cancelled_gives_its_places_back(monkeypatch: pytest.MonkeyPatch, stored: list[str]) -> None:
    async def respond(self: Any, sampling_params: Any, trajectory: dict[str, Any], **_: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    worker = worker_of(2, samples=2)

    async def scenario() -> None:
        running = [asyncio.ensure_future(run_prompts(worker, [(False, step)])) for step in (1, 2)]
        for _ in range(50):
            await asyncio.sleep(0)
        running[1].cancel()  # it waits at the gate
        running[0].cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert worker._loops._free == 2 and stored == ["running"]


def test_a_row_of_the_data_may_have_a_name() -> None:
    assert [row_number(index) for index in (7, "7", np.int64(7))] == [7] * 3
    assert row_number("3f1a15a7") == row_number("3f1a15a7") != row_number("3f1a15a8")
    assert isinstance(row_number(None), int)


def test_nothing_is_written_for_a_stopped_prompt(monkeypatch: pytest.MonkeyPatch, stored: list[str]) -> None:
    async def respond(self: Any, *_: Any, **__: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    worker = worker_of(1)

    async def scenario() -> None:
        running = asyncio.ensure_future(run_prompts(worker, [(False, 1), (False, 2)]))
        for _ in range(50):
            await asyncio.sleep(0)
        await worker.stop(["0", "1", "another worker's"])
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    assert stored == ["running"] and worker._held == {} and worker._loops._free == 1


def test_a_prompt_that_ends_samplers_does_so_with_one_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    tags: list[dict[str, Any]] = []

    async def put(key: str, partition_id: str, tag: dict[str, Any]) -> None:
        tags.append(tag)

    async def respond(self: Any, *_: Any, session_id: int, **__: Any) -> None:
        if session_id == 1:
            raise RequestEndsServers("4 samplers failed")
        await asyncio.sleep(3600)

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put)
    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    asyncio.run(asyncio.wait_for(run_prompts(worker_of(3, samples=3), [(False, 1)]), 60))
    reason = {agent_loop.REASON: "RequestEndsServers: 4 samplers failed", agent_loop.FINAL: True}
    assert tags == [{"status": "running"}, reason, {"status": "failure"}]


def test_an_agent_loop_that_returns_no_output_has_failed() -> None:
    with pytest.raises(UserCodeError, match="the agent loop returned no output"):
        asyncio.run(worker_of(1)._agent_loop_postprocess([], False, uid="u", session_id=0))


class BusyWorker:
    """Of a Ray actor what the manager calls: calls are answered in an order and at a time that the test chooses."""

    def __init__(self, log: list[str]) -> None:
        self.generate_sequences = SimpleNamespace(remote=lambda chunk: log.append("sent") or "taken")
        self.stop = SimpleNamespace(remote=lambda uids: log.append("stop") or "stopped")


def manager_of_busy_workers(log: list[str], monkeypatch: pytest.MonkeyPatch, taken: list[str]) -> LagKAgentLoopManager:
    """`taken`: what `ray.wait` finds done at once. `ray.get` logs what was waited for."""
    manager = object.__new__(LagKAgentLoopManager)
    manager.agent_loop_workers, manager._handing_over = [BusyWorker(log), BusyWorker(log)], []
    manager._row_in_validation = {}
    monkeypatch.setattr(agent_loop.ray, "wait", lambda refs, **_: (taken, [ref for ref in refs if ref not in taken]))
    monkeypatch.setattr(agent_loop.ray, "get", lambda refs, timeout=None: log.extend(f"got {ref}" for ref in refs))
    return manager


def test_a_prompt_is_with_its_worker_before_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    manager = manager_of_busy_workers(log, monkeypatch, taken=[])
    manager.generate_sequences(TensorDict({"uid": torch.arange(4)}, batch_size=4))
    manager.stop(["0"])
    assert log == ["sent", "sent", "got taken", "got taken", "stop", "stop", "got stopped", "got stopped"]


def test_a_prompt_begins_again_without_the_trajectories_of_its_stopped_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = MemoryQueue()
    for module in (agent_loop, stored_tags):
        monkeypatch.setattr(module, "tq", queue)
    prompt = TensorDict({"index": torch.zeros(1)}, batch_size=1)
    tu.assign_non_tensor_stack(prompt, "uid", ["late"])
    queue.kv_batch_put(["late"], "train", fields=prompt, tags=[{"status": "running", "global_steps": 1}])
    for index in range(2):
        queue.kv_batch_put([f"late_0_{index}"], "train", tags=[{"global_steps": 1}])
    log: list[Any] = []
    manager = manager_of_busy_workers(log, monkeypatch, taken=[])
    manager.config = DictConfig({"actor_rollout_ref": {"rollout": {"n": 1}}})
    manager.resubmit(["late"], "train", step=7)
    assert log == ["stop", "stop", "got stopped", "got stopped", "sent"]
    assert queue.tags["train"] == {"late": {"is_prompt": True, "status": "pending", "global_steps": 7}}


def test_what_keeps_a_worker_from_taking_prompts_is_raised_while_their_samples_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = manager_of_busy_workers([], monkeypatch, taken=["taken"])

    def died(refs: list[str], timeout: float | None = None) -> None:
        if refs:
            raise RayActorError

    monkeypatch.setattr(agent_loop.ray, "get", died)
    manager.raise_errors()
    manager.generate_sequences(TensorDict({"uid": torch.arange(4)}, batch_size=4))
    trainer = object.__new__(LagKTrainer)
    trainer.agent_loop_manager = manager
    with pytest.raises(RayActorError):
        trainer._sleep(0.0)


def test_no_column_of_the_data_takes_the_place_of_what_was_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own code stores; the columns are all that it and the trainer's engine read, and a list of lists."""
    stored: dict[str, Any] = {}

    async def put(keys: list[str], partition_id: str, fields: Any, tags: list[dict[str, Any]]) -> None:
        stored.update({name: tu.get(fields, name)[0] for name in fields.keys()})  # noqa: SIM118  # of a TensorDict

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", put)
    worker = worker_of(1)
    worker.config["async"].truncated = "train"
    worker.reward_loop_worker_handles, worker.distillation_enabled, worker.processor = None, False, None
    worker.tokenizer, worker.rollout_config = SimpleNamespace(eos_token_id=9), SimpleNamespace(response_length=8)
    worker.model_config = SimpleNamespace(generation_config=None)
    output = AgentLoopOutput(
        prompt_ids=[1], response_ids=[2, 9], response_mask=[1, 1], response_logprobs=[-1.0, -2.0], reward_score=0.5,
        num_turns=2, metrics=AgentLoopMetrics(),
    )  # fmt: skip
    its_own = {**output.as_dict(), "position_ids": 0, "input_ids": 0, "loss_mask": 0, "multi_modal_inputs": 0}
    assert its_own.keys() <= {*OF_A_RESPONSE}, "what is said of the data knows verl's names"
    columns = dict.fromkeys([*OF_A_RESPONSE, "micro_batch_size_per_gpu", "table"], [[1, 2], [3]])
    asyncio.run(worker._agent_loop_postprocess([output], False, **columns, uid="u", session_id=3, global_steps=1))
    assert stored.keys() == {*its_own, "uid", "session_id", "global_steps"}
    assert (stored["responses"].tolist(), stored["rm_scores"].tolist(), stored["num_turns"]) == ([2, 9], [0, 0.5], 2)


def test_the_arguments_of_verls_workers_are_no_columns() -> None:
    loops = SingleTurnAgentLoop.run, ToolAgentLoop.run
    calls = VERLS_WORKER._run_agent_loop, VERLS_WORKER._agent_loop_postprocess, *loops
    taken = {name for call in calls for name in inspect.signature(call).parameters}
    assert {name for name in taken if not name.startswith("_")} - {"kwargs"} <= {*OF_THE_LOOP}  # Ray's begin with _
