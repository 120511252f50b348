"""Agent-loop workers whose prompts can be taken back (extends verl/trainer/ppo/v1/agent_loop_tq.py)."""

import asyncio
import zlib
from typing import Any

import ray
import transfer_queue as tq
from ray.exceptions import RayTaskError
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

REASON = "reason"
"""The tag of a failed prompt that says why, in one line."""


def one_line(error: BaseException) -> str:
    """What went wrong, without the traceback, wherever it was raised."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[-1].strip()}"


class LagKAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker, which also knows the task of every prompt that it runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._task_of: dict[str, asyncio.Task[Any]] = {}

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        uid, task = prompt["uid"], asyncio.current_task()
        assert task is not None
        self._task_of[uid] = task
        try:
            await super()._run_prompt(prompt, *args, **kwargs)
        finally:
            if self._task_of.get(uid) is task:
                del self._task_of[uid]

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        if self.config["async"].deterministic:
            place = (trajectory["step"], trajectory["sample_index"], kwargs.get("session_id", 0))
            seed = zlib.crc32(repr((self.config.actor_rollout_ref.rollout.seed, *map(int, place))).encode())
            sampling_params = {**sampling_params, "seed": seed}
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            # The worker's log is a file among many. With the prompt it reaches the trainer, which says it.
            partition_id = "val" if trajectory["validate"] else "train"
            await tq.async_kv_put(key=kwargs["uid"], partition_id=partition_id, tag={REASON: one_line(error)})
            raise

    async def cancel(self, uids: list[str]) -> None:
        """Stop these prompts, those that run here: when this returns nothing more will be written of them."""
        tasks = [self._task_of[uid] for uid in uids if uid in self._task_of]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LagKAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager of `LagKAgentLoopWorker`s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(LagKAgentLoopWorker)
        self._row_in_validation: dict[str, int] = {}

    def generate_sequences(self, prompts: TensorDict) -> None:
        """As verl's. A validation's prompts, which nothing stores, are kept until the next ones."""
        if "validate" in prompts and str(prompts["uid"][0]) not in self._row_in_validation:
            self._in_validation = prompts
            self._row_in_validation = {str(uid): row for row, uid in enumerate(prompts["uid"])}
        super().generate_sequences(prompts)

    def prompts_in_validation(self, uids: list[str]) -> TensorDict:
        """The rows of these prompts, which are being validated on."""
        return tu.index_select_tensor_dict(self._in_validation, [self._row_in_validation[uid] for uid in uids])

    def cancel(self, uids: list[str]) -> None:
        """Stop these prompts on whichever worker runs them. Blocks until they have stopped."""
        ray.get([worker.cancel.remote(uids) for worker in self.agent_loop_workers])
