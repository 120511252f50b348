"""The replay buffer that keeps the lag bound (extends verl/trainer/ppo/v1/replay_buffer.py).

Step s turns policy version s-1 into s. A prompt submitted at step j was sampled by version j-1 or a later one, so
its lag at step s is at most s-j: it must be consumed at step j+k at the latest. That is its deadline.
"""

from collections import Counter
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

_POLL_S = 0.05
# A reward function or an environment that always fails would be refilled for ever.
_MAX_FAILED_BATCHES = 4


def deadlines_hold(remaining: Counter[int], step: int, batch_size: int) -> bool:
    """Whether all `remaining` prompts can still be consumed in time, `batch_size` at each step after `step`.

    Args:
        remaining: number of prompts per deadline (a step).
        step: the step being sampled for; nothing of `remaining` is consumed by it.
        batch_size: prompts consumed per step.
    """
    waiting = 0
    for deadline in sorted(remaining):
        waiting += remaining[deadline]
        if waiting > (deadline - step) * batch_size:
            return False
    return True


class LagKReplayBuffer(ReplayBufferAsync):
    """Consumes the oldest finished prompts, and waits wherever anything else would break the bound.

    Args:
        lag: k, the bound; 0 waits for the batch that was submitted at this step.
        **kwargs: verl's.
    """

    def __init__(self, lag: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lag = lag
        self.poll_interval = _POLL_S
        self._failed = 0

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        if len(sampleable_keys) < batch_size:
            return False
        if partition_id == "val":
            return True
        selected, _, submitted = self._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        consumed = set(selected)
        remaining = Counter(step + self.lag for uid, step in submitted.items() if uid not in consumed)
        return deadlines_hold(remaining, global_steps, batch_size)

    def _evict_terminal_groups(
        self, global_steps: int, partition_id: str, eviction_reasons: tuple[set[str], set[str], set[str], Counter]
    ) -> tuple[set[str], int, int, dict]:
        evicted = super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)
        self._failed += len(eviction_reasons[2])
        return evicted

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict]:
        """The next batch of `batch_size` prompts with all their trajectories, and metrics. Blocks until it is due."""
        self._batch_size = batch_size
        self._failed = 0
        return super().sample(global_steps, partition_id, batch_size)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        if self._failed > _MAX_FAILED_BATCHES * self._batch_size:
            raise RuntimeError(
                f"{self._failed} prompts in a row failed while step waits for {self._batch_size}: their generation or "
                "reward function raises (reward.custom_reward_function); the agent loop workers' logs say why"
            )
        return super()._wait_for_next_poll(partition_id, last_debug_time)
