"""A poll of the replay buffer where TransferQueue holds as many keys as in a large run: ours, and verl's."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from recipe.fully_async_policy import main as launcher

launcher.prepare_environment(["hardware=cpu"])

import torch  # noqa: E402
import transfer_queue as tq  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402

from recipe.fully_async_policy.launch import ray_access  # noqa: E402
from verl_vcpo.loop.replay_buffer import LagKReplayBuffer  # noqa: E402

_SAMPLES = 16
_AT_ONCE = 64  # prompts whose trajectories are written together
_POLLS = 10


def measure(keys: int) -> dict[str, float]:
    """Return the median seconds of a poll with `keys` keys, ours and verl's; one key in 17 is a prompt."""
    config = launcher.compose(["+task=countdown", "hardware=cpu"])
    config.transfer_queue.enable = True
    with ray_access.started({"num_cpus": 8, "include_dashboard": False, "log_to_driver": False}):
        tq.init(config.transfer_queue)
        try:
            buffer = _filled(keys)
            return {
                "poll_s": _median(buffer._sync_metadata_from_transfer_queue),
                "poll_by_listing_s": _median(lambda: ReplayBufferAsync._sync_metadata_from_transfer_queue(buffer)),
            }
        finally:
            tq.close()


def _median(call: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(_POLLS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _filled(keys: int) -> LagKReplayBuffer:
    """Make a replay buffer whose prompts are all running, and whose trajectories are stored."""
    uids = [f"{number:032x}" for number in range(keys // (_SAMPLES + 1))]
    buffer = LagKReplayBuffer(
        lag=8,
        samples=_SAMPLES,
        reissue_fn=lambda uids, partition_id: None,
        trainer_mode="lag_k",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="wait",
        sampler_kwargs={},
    )
    prompts = TensorDict({"index": torch.arange(len(uids))}, batch_size=len(uids))
    tu.assign_non_tensor_stack(prompts, "uid", uids)
    tags = [{"is_prompt": True, "status": "running", "global_steps": 1}] * len(uids)
    tq.kv_batch_put(keys=uids, partition_id="train", fields=prompts, tags=tags)
    buffer.note_submitted(prompts)
    for first in range(0, len(uids), _AT_ONCE):
        stored = [f"{uid}_{session}_0" for uid in uids[first : first + _AT_ONCE] for session in range(_SAMPLES)]
        tag = {"status": "success", "seq_len": 8200, "global_steps": 1, "min_global_steps": 0, "max_global_steps": 1}
        fields = TensorDict({"responses": torch.zeros(len(stored), 8)}, batch_size=len(stored))
        tq.kv_batch_put(keys=stored, partition_id="train", fields=fields, tags=[tag] * len(stored))
    return buffer
