"""Agent loops whose prompts can be stopped and sampled again (extends verl/trainer/ppo/v1/agent_loop_tq.py)."""

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import ray
import transfer_queue as tq
from ray.exceptions import RayTaskError
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from verl_vcpo.common.data_columns import KEPT
from verl_vcpo.common.data_rows import row_number
from verl_vcpo.common.stored_tags import Failure, clear_trajectories, sessions_of, tags_of
from verl_vcpo.common.truncated import TRUNCATED, Truncated, soft_length_penalty
from verl_vcpo.report.trajectory_metrics import BESIDE, RAW_REWARD
from verl_vcpo.samplers.admission import AdmissionGate, Places, agent_loops_per_worker, request_order
from verl_vcpo.samplers.client import RequestEndsServers, Seconds, at_samplers
from verl_vcpo.samplers.gathered_puts import gather_puts
from verl_vcpo.samplers.loop_objects import make_directly
from verl_vcpo.user_code.errors import UserCodeError, of_response, took_too_long, with_prompt
from verl_vcpo.user_code.reward import OwnReward, needs_no_workers
from verl_vcpo.user_code.reward_function import of_manager, score_of
from verl_vcpo.user_code.tool_limits import ToolFailure, limited

REASON = "reason"
"""The tag of a failed prompt with the cause of its failure, in one line."""

FINAL = "final"
"""The tag of a failed prompt that must not be sampled again."""

_places: ContextVar[Places] = ContextVar("_places")
"""The places that a prompt took at the gate of its worker: one for each of the prompt's agent loops."""

_sessions: ContextVar[set[asyncio.Task[Any]]] = ContextVar("_sessions")
"""The running agent loops of a prompt."""

_LOOK_S = 1.0  # the least time between two looks at how long a trajectory has taken
_ASK_S = 10.0  # the least time between two questions whether a worker is blocked
_STOP_LIMIT_S = 1800.0  # the event loop of a worker can be busy for minutes with prompts that were submitted at once


def failures(uids: list[str], partition_id: str) -> list[Failure]:
    """Return the cause of each failed prompt."""
    tags = tags_of(uids, partition_id)
    unknown = "for a reason that is in the agent loop workers' logs"
    return [Failure(tags[uid].get(REASON, unknown), tags[uid].get(FINAL, False)) for uid in uids]


def one_line(error: BaseException) -> str:
    """Return the type and message of an error without traceback; those of the cause for a Ray task's error."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[-1].strip()}"


class LagKAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker, which can also stop a prompt."""

    _own_reward: OwnReward | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tools = self.config.actor_rollout_ref.rollout.multi_turn.function_tool_path
        self.tools: list[Any] = limited(self.tools, tools, self.config["async"].tool_timeout_s)
        self._held: dict[str, asyncio.Task[Any]] = {}
        self._loops = AdmissionGate(agent_loops_per_worker(self.config.actor_rollout_ref.rollout))
        if needs_no_workers(self.config):
            self._own_reward = OwnReward(self.config)
        gather_puts()
        make_directly()

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any
    ) -> None:
        uid, task = prompt["uid"], asyncio.current_task()
        assert task is not None
        rollout = self.config.actor_rollout_ref.rollout
        samples = rollout.val_kwargs.n if trajectory["validate"] else rollout.n
        sessions = int(prompt.get("__rollout_n__", samples))
        self._held[uid] = task
        order = not trajectory["validate"], int(trajectory["step"]), row_number(trajectory["sample_index"])
        request_order.set(order)
        try:
            async with self._loops.admitted(order, sessions) as places:
                _places.set(places)
                _sessions.set(set())
                await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, **kwargs)
        finally:
            if self._held.get(uid) is task:
                del self._held[uid]

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        if self.config["async"].deterministic:
            sample = (trajectory["step"], row_number(trajectory["sample_index"]), kwargs.get("session_id", 0))
            seed = zlib.crc32(repr((self.config.actor_rollout_ref.rollout.seed, *map(int, sample))).encode())
            sampling_params = {**sampling_params, "seed": seed}
        at_samplers.set(Seconds())
        task = asyncio.current_task()
        assert task is not None
        _sessions.get().add(task)
        limit_s = self.config["async"].trajectory_timeout_s
        try:
            async with _time_outside(limit_s, at_samplers.get() or Seconds()):
                try:
                    return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
                except ToolFailure as failure:
                    raise failure.error from None
        except Exception as error:
            # A worker's log is one file among many. The tag carries the cause to the driver, which prints it.
            partition_id, final = "val" if trajectory["validate"] else "train", isinstance(error, RequestEndsServers)
            if final:  # each other sample of the prompt would end as many samplers
                await asyncio.sleep(0)  # now all have begun
                for session in _sessions.get() - {task}:
                    session.cancel()
            reason = with_prompt(one_line(error), list(kwargs.get("raw_prompt", [])))
            tag = {REASON: reason, FINAL: final}
            await tq.async_kv_put(key=kwargs["uid"], partition_id=partition_id, tag=tag)
            raise
        finally:
            _places.get().give_back()

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> None:
        """Store what an agent loop returned, marked if one of its responses is truncated; a validation has no marks.

        verl stores the prompt's columns over it: these are only the columns that are not the response's own.

        Raises:
            UserCodeError: the loop returned an empty list.
        """
        kwargs = {name: value for name, value in kwargs.items() if name in KEPT}
        outputs = output if isinstance(output, list) else [output]
        if not outputs:  # verl would store nothing, and call the prompt finished
            raise UserCodeError("the agent loop returned no output", "have it return one at least")
        truncated = any(one.extra_fields.get(TRUNCATED) or self._fills_limit(one) for one in outputs)
        for one in outputs:
            one.extra_fields[TRUNCATED] = None if validate else truncated
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        treatment = Truncated(self.config["async"].truncated)
        if truncated and not validate and treatment.leaves_out:
            keys = [f"{kwargs['uid']}_{kwargs['session_id']}_{index}" for index in range(len(outputs))]
            await agent_loop_tq.tq.async_kv_batch_put(
                keys=keys, partition_id="train", tags=[{TRUNCATED: str(treatment)} for _ in keys]
            )

    def _fills_limit(self, output: AgentLoopOutput) -> bool:
        """Return True for a response as long as the limit whose last token is no end token."""
        tokens, of_model = output.response_ids, getattr(self.model_config.generation_config, "eos_token_id", None)
        ends = of_model if isinstance(of_model, list) else [of_model]
        return len(tokens) >= self.rollout_config.response_length and (
            tokens[-1] not in [self.tokenizer.eos_token_id, *ends]
        )

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        if self._own_reward and outputs[-1].reward_score is None:
            await self._score(self._own_reward, outputs[-1], kwargs)
        else:
            await super()._compute_score(outputs, kwargs)
        self._check_score(outputs[-1], kwargs)
        self._penalize_length(outputs[-1])
        for output in outputs:  # all of a session's outputs are stored with the reward of the last one
            output.extra_fields[RAW_REWARD] = outputs[-1].reward_score

    async def _score(self, reward: OwnReward, output: AgentLoopOutput, kwargs: dict[str, Any]) -> None:
        began = time.perf_counter()
        response = self.tokenizer.decode(output.response_ids, skip_special_tokens=True)
        result = await reward.result(response, output, kwargs)
        output.reward_score, output.extra_fields[BESIDE] = score_of(result), result
        output.metrics.compute_score = time.perf_counter() - began

    def _check_score(self, output: AgentLoopOutput, kwargs: dict[str, Any]) -> None:
        """Keep a reward, and what is reported beside the reward, in the form that all rewards have.

        Raises:
            UserCodeError: the reward has not that form. Custom functions are checked in their processes already.
        """
        if output.reward_score is None:
            return
        extra = output.extra_fields
        try:
            output.reward_score, extra[BESIDE] = of_manager(output.reward_score, extra.get(BESIDE))
        except UserCodeError as error:
            response = self.tokenizer.decode(output.response_ids, skip_special_tokens=True)
            raise of_response(error, "of this run", kwargs.get("index"), kwargs.get("data_source"), response) from None

    def _penalize_length(self, output: AgentLoopOutput) -> None:
        settings, in_training = self.config["async"], output.extra_fields.get(TRUNCATED) is not None
        if settings.truncated == Truncated.PENALTY and in_training and output.reward_score is not None:
            penalty = settings.overlong_buffer_len, settings.overlong_penalty_factor
            output.reward_score += soft_length_penalty(
                len(output.response_ids), self.rollout_config.response_length, *penalty
            )

    async def answer(self) -> None:
        """Return nothing: an answer at all says that no tool and no agent loop blocks the worker."""

    async def stop(self, uids: list[str]) -> None:
        """Stop the prompts that this worker samples among `uids`. Nothing more is written for a stopped prompt."""
        tasks = [self._held[uid] for uid in uids if uid in self._held]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _time_outside(limit_s: float, requests: Seconds) -> AsyncIterator[None]:
    """Limit the block to `limit_s` outside of `requests` to samplers, which have a limit of their own.

    Raises:
        UserCodeError: the block took longer, and was cancelled.
    """
    loop, begun = asyncio.get_running_loop(), time.monotonic()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        left_s = limit_s - (time.monotonic() - begun - requests.total)
        if left_s > 0:
            timer = loop.call_later(max(left_s, _LOOK_S), look)
        else:
            clock.reschedule(loop.time())

    timer = loop.call_later(limit_s, look)
    try:
        async with asyncio.timeout(None) as clock:
            yield
    except TimeoutError:
        if not clock.expired():
            raise
        # A call that the block has left in one of the event loop's threads keeps the thread for ever.
        loop.set_default_executor(ThreadPoolExecutor())
        late = took_too_long("async.trajectory_timeout_s", limit_s, " outside of its requests to samplers")
        raise UserCodeError(f"the agent loop, with its reward, {late.what}", late.fix) from None
    finally:
        timer.cancel()


class LagKAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager of agent-loop workers, which can also stop prompts and sample them again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(LagKAgentLoopWorker)
        self._row_in_validation: dict[str, int] = {}
        self._handing_over: list[ray.ObjectRef[None]] = []
        self._answers: list[ray.ObjectRef[None]] = []
        self._asked = time.monotonic()

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Submit prompts as verl does, but do not wait until the workers, which may be busy, have taken the prompts.

        A validation's prompts are kept until the next validation: TransferQueue does not have them.
        """
        if "validate" in prompts and str(prompts["uid"][0]) not in self._row_in_validation:
            self._in_validation = prompts
            self._row_in_validation = {str(uid): row for row, uid in enumerate(prompts["uid"])}
        self.raise_errors()
        chunks = prompts.chunk(len(self.agent_loop_workers))
        workers = zip(self.agent_loop_workers, chunks, strict=False)  # prompts may be fewer than workers
        self._handing_over += [worker.generate_sequences.remote(chunk) for worker, chunk in workers]

    def raise_errors(self) -> None:
        """Raise the error of a worker that died or raised, so that its prompts would never be sampled; do not wait."""
        if self._handing_over:
            over, self._handing_over = ray.wait(self._handing_over, num_returns=len(self._handing_over), timeout=0)
            ray.get(over)

    def raise_blocked(self) -> None:
        """Raise an error if a tool or an agent loop blocks a worker, so that no limit in the worker can work.

        Raises:
            RuntimeError: a worker has not answered for `async.trajectory_timeout_s`.
            RayError: a worker died.
        """
        answers = self._answers
        answered, waiting = ray.wait(answers, num_returns=len(answers), timeout=0) if answers else ([], [])
        ray.get(answered)
        now, limit_s = time.monotonic(), self.config["async"].trajectory_timeout_s
        if not waiting and now - self._asked >= _ASK_S:
            self._answers, self._asked = [worker.answer.remote() for worker in self.agent_loop_workers], now
        elif waiting and now - self._asked >= limit_s:
            raise RuntimeError(
                f"async.trajectory_timeout_s={limit_s:g}: {len(waiting)} agent-loop worker(s) have not answered for "
                "so long: a tool or an agent loop blocks them; have it await, or make it a function tool"
            )

    def resubmit(self, uids: list[str], partition_id: str, step: int) -> None:
        """Stop prompts that workers still sample, and sample them from the start, as if submitted at `step`.

        Raises:
            GetTimeoutError: see `stop`.
        """
        self.stop(uids)
        rollout, prompts = self.config.actor_rollout_ref.rollout, self.prompts_of(uids, partition_id)
        samples = rollout.val_kwargs.n if partition_id == "val" else rollout.n
        clear_trajectories(sessions_of(prompts, samples), partition_id)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id=partition_id, tags=tags)
        tu.assign_non_tensor_data(prompts, "global_steps", step)
        self.generate_sequences(prompts)

    def prompts_of(self, uids: list[str], partition_id: str) -> TensorDict:
        """Return the fields of prompts, as they were submitted."""
        if partition_id == "val":  # verl keeps the prompts of a validation out of TransferQueue
            rows = [self._row_in_validation[uid] for uid in uids]
            return tu.index_select_tensor_dict(self._in_validation, rows)
        return tq.kv_batch_get(keys=uids, partition_id=partition_id)

    def stop(self, uids: list[str]) -> None:
        """Stop prompts on whichever workers sample them, and wait until they have stopped.

        Raises:
            GetTimeoutError: workers have not stopped all prompts after `_STOP_LIMIT_S`.
        """
        over, self._handing_over = self._handing_over, []
        ray.get(over, timeout=_STOP_LIMIT_S)  # a prompt that arrives after it was stopped would be sampled twice
        ray.get([worker.stop.remote(uids) for worker in self.agent_loop_workers], timeout=_STOP_LIMIT_S)
