"""Agent loops whose prompts can be cancelled and sampled again (extends verl/trainer/ppo/v1/agent_loop_tq.py)."""

import asyncio
import time
import zlib
from contextvars import ContextVar
from typing import Any

import ray
import transfer_queue as tq
from ray.exceptions import RayTaskError
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from verl_vcpo.experimental.agent_loop.agent_loop import make_without_copies
from verl_vcpo.trainer.ppo.v1.data_rows import row_number
from verl_vcpo.trainer.ppo.v1.replay_buffer import Failure
from verl_vcpo.trainer.ppo.v1.stored_tags import sessions_of, tags_of, trajectories_of
from verl_vcpo.trainer.ppo.v1.trajectory_metrics import OUTSIDE_S, RAW_REWARD, REWARD_S, TOOK
from verl_vcpo.workers.rollout.admission import AdmissionGate, Places, agent_loops_per_worker, request_order
from verl_vcpo.workers.rollout.llm_client import RequestEndsServers, Seconds, at_samplers

REASON = "reason"
"""The tag of a failed prompt with the cause of its failure, in one line."""

FINAL = "final"
"""The tag of a failed prompt that must not be sampled again."""

_places: ContextVar[Places] = ContextVar("_places")
"""What a prompt took at the gate of its worker: a place for each of its agent loops."""

_begun: ContextVar[float] = ContextVar("_begun")
"""When the agent loop began."""

_REPLY_S = 0.05  # in which Ray sends what an actor's method returned
_STOP_LIMIT_S = 1800.0  # the event loop of a worker can be busy for minutes with what was submitted at once


def failures(uids: list[str], partition_id: str) -> list[Failure]:
    """For each of these failed prompts the cause."""
    tags = tags_of(uids, partition_id)
    unknown = "for a reason that is in the agent loop workers' logs"
    return [Failure(tags[uid].get(REASON, unknown), tags[uid].get(FINAL, False)) for uid in uids]


def one_line(error: BaseException) -> str:
    """Type and message of an error without its traceback; of a Ray task's error, of its cause."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[-1].strip()}"


class LagKAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker, which also keeps the asyncio task of every prompt that is being sampled, to cancel the task."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make_without_copies()
        self._task_of: dict[str, asyncio.Task[Any]] = {}
        self._loops = AdmissionGate(agent_loops_per_worker(self.config.actor_rollout_ref.rollout))

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any
    ) -> None:
        uid, task = prompt["uid"], asyncio.current_task()
        assert task is not None
        self._task_of[uid] = task
        rollout = self.config.actor_rollout_ref.rollout
        samples = rollout.val_kwargs.n if trajectory["validate"] else rollout.n
        sessions = int(prompt.get("__rollout_n__", samples))
        order = not trajectory["validate"], int(trajectory["step"]), row_number(trajectory["sample_index"])
        request_order.set(order)
        try:
            async with self._loops.admitted(order, sessions) as places:
                _places.set(places)
                await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, **kwargs)
        finally:
            if self._task_of.get(uid) is task:
                del self._task_of[uid]

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        if self.config["async"].deterministic:
            sample = (trajectory["step"], row_number(trajectory["sample_index"]), kwargs.get("session_id", 0))
            seed = zlib.crc32(repr((self.config.actor_rollout_ref.rollout.seed, *map(int, sample))).encode())
            sampling_params = {**sampling_params, "seed": seed}
        at_samplers.set(Seconds())
        _begun.set(time.monotonic())
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            # A worker's log is one file among many. The tag carries the cause to the driver, which prints it.
            partition_id = "val" if trajectory["validate"] else "train"
            tag = {REASON: one_line(error), FINAL: isinstance(error, RequestEndsServers)}
            await tq.async_kv_put(key=kwargs["uid"], partition_id=partition_id, tag=tag)
            raise
        finally:
            _places.get().give_back()

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        start, requests = time.monotonic(), at_samplers.get() or Seconds()
        await super()._compute_score(outputs, kwargs)
        took = {OUTSIDE_S: start - _begun.get() - requests.total, REWARD_S: time.monotonic() - start}
        for output in outputs:  # all of a session's outputs are stored with the reward of the last one
            output.extra_fields |= {RAW_REWARD: outputs[-1].reward_score, TOOK: took}

    async def cancel(self, uids: list[str]) -> None:
        """Stop those of these prompts that this worker samples. After that nothing more is written for them."""
        tasks = [self._task_of[uid] for uid in uids if uid in self._task_of]
        # Places that a cancelled prompt leaves would go to another one at once, whose agent loops would prepare their
        # prompts before the event loop has seen the last cancellation, and sent the reply.
        self._loops.close()
        try:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            asyncio.get_running_loop().call_later(_REPLY_S, self._loops.open)


class LagKAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager of agent-loop workers, which can also stop prompts and sample them again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(LagKAgentLoopWorker)
        self._row_in_validation: dict[str, int] = {}
        self._handing_over: list[ray.ObjectRef[None]] = []

    def generate_sequences(self, prompts: TensorDict) -> None:
        """As verl's, without verl's wait until the workers, which may be busy, have taken the prompts.

        A validation's prompts are kept until the next validation: TransferQueue does not have them.

        Raises:
            RayError: as `raise_errors`, of the prompts that were submitted before these.
        """
        if "validate" in prompts and str(prompts["uid"][0]) not in self._row_in_validation:
            self._in_validation = prompts
            self._row_in_validation = {str(uid): row for row, uid in enumerate(prompts["uid"])}
        self.raise_errors()
        chunks = prompts.chunk(len(self.agent_loop_workers))
        workers = zip(self.agent_loop_workers, chunks, strict=False)  # prompts may be fewer than workers
        self._handing_over += [worker.generate_sequences.remote(chunk) for worker, chunk in workers]

    def raise_errors(self) -> None:
        """Raise what kept a worker from taking the prompts that were submitted to it. Does not wait for workers.

        Raises:
            RayError: the worker died, or its method raised; the prompts would never be sampled.
        """
        if self._handing_over:
            over, self._handing_over = ray.wait(self._handing_over, num_returns=len(self._handing_over), timeout=0)
            ray.get(over)

    def resubmit(self, uids: list[str], partition_id: str, step: int) -> None:
        """Sample these prompts again from the start, as if they had been submitted at `step`."""
        self.cancel(uids)
        rollout = self.config.actor_rollout_ref.rollout
        if partition_id == "val":  # verl keeps the prompts of a validation out of TransferQueue
            rows = [self._row_in_validation[uid] for uid in uids]
            prompts, samples = tu.index_select_tensor_dict(self._in_validation, rows), rollout.val_kwargs.n
        else:
            prompts, samples = tq.kv_batch_get(keys=uids, partition_id=partition_id), rollout.n
        begun = {uid for uid, tag in tags_of(uids, partition_id).items() if tag["status"] != "pending"}
        sessions = {uid: count for uid, count in sessions_of(prompts, samples).items() if uid in begun}
        if stale := list(trajectories_of(sessions, partition_id)):
            tq.kv_clear(keys=stale, partition_id=partition_id)
        tu.assign_non_tensor_data(prompts, "global_steps", step)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id=partition_id, tags=tags)
        self.generate_sequences(prompts)

    def cancel(self, uids: list[str]) -> None:
        """Stop these prompts on whichever worker samples them. Blocks until they have stopped.

        Raises:
            GetTimeoutError: workers have not stopped them after `_STOP_LIMIT_S`.
        """
        over, self._handing_over = self._handing_over, []
        ray.get(over, timeout=_STOP_LIMIT_S)  # a prompt that arrives after its cancellation would be sampled twice
        ray.get([worker.cancel.remote(uids) for worker in self.agent_loop_workers], timeout=_STOP_LIMIT_S)
