"""The replay buffer that keeps the lag bound (extends verl/trainer/ppo/v1/replay_buffer.py)."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from verl_vcpo.trainer.ppo.v1.deadlines import OnDeadline, deadlines_hold
from verl_vcpo.trainer.ppo.v1.run_log import say

_POLL_S = 0.05
# A prompt whose generation or reward fails this often fails for a reason of its own.
MAX_ATTEMPTS = 4
_SAID_AT_ONCE = 3


def prompt_of(key: str) -> str:
    """The uid of the prompt whose trajectory is stored under `key`: {uid}_{session}_{index}, or the uid itself."""
    return key.split("_")[0]


class LagKReplayBuffer(ReplayBufferAsync):
    """Consumes the oldest finished prompts, and waits wherever anything else would break the bound.

    Args:
        lag: k; the bound of a trajectory is k rounded up. 0 waits for the batch that was submitted at this step.
        reissue_fn: (uids, partition) submits these prompts again, cancelling what runs of them.
        on_deadline: what happens to a prompt that is due and not finished.
        exact: every prompt is consumed k steps after it was submitted, when all others are finished too.
        reason_fn: why prompts failed: (uids, partition) -> one line for each.
        **kwargs: verl's.
    """

    def __init__(
        self,
        lag: float,
        reissue_fn: Callable[[list[str], str], None],
        on_deadline: OnDeadline = OnDeadline.WAIT,
        exact: bool = False,
        reason_fn: Callable[[list[str], str], list[str]] = lambda uids, partition_id: uids,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.bound = math.ceil(lag)
        self.reissue_fn = reissue_fn
        self.on_deadline = on_deadline
        self.exact = exact
        self.reason_fn = reason_fn
        self.poll_interval = _POLL_S
        self.clock: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], None] = time.sleep
        self._place: dict[str, int] = {}
        self._count_submitted = itertools.count()
        self._attempts: Counter[str] = Counter()
        self._reissued: set[str] = set()
        self._held_back_since: float | None = None
        self._counts: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()
        """Prompts that are left after `sample` took its batch, by steps since they were submitted."""

    def note_submitted(self, uids: list[str]) -> None:
        """Remember the order of submission: batches follow it, whatever finishes first."""
        for uid in uids:
            self._place[uid] = next(self._count_submitted)

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        _, trajectories, submitted = super()._select_prompt_uids(partition_id, set(), 0)
        ordered = sorted(sampleable_keys, key=lambda uid: (submitted.get(uid, 0), self._place.get(uid, 0)))
        return ordered[:batch_size], trajectories, submitted

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> Any:
        place = {uid: i for i, uid in enumerate(selected_prompt_uids)}

        def order(key: str) -> tuple[int, ...]:
            uid, *numbers = key.split("_")  # {uid}_{session}_{index}
            return place[uid], *map(int, numbers)

        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        batch.reorder(sorted(range(len(batch)), key=lambda i: order(batch.keys[i])))
        return batch

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        if len(sampleable_keys) < batch_size:
            return False
        if partition_id == "val":
            return True
        if self.exact:
            return not self._unfinished(partition_id)
        if self._bound_allows(global_steps, partition_id, batch_size, sampleable_keys):
            self._stop_waiting()
            return True
        if self.on_deadline is OnDeadline.REISSUE:
            self._reissue_what_is_late(global_steps, partition_id, batch_size, sampleable_keys)
        self._held_back_since = self.clock() if self._held_back_since is None else self._held_back_since
        return False

    def _unfinished(self, partition_id: str) -> set[str]:
        return self.pending_keys[partition_id] | self.running_keys[partition_id]

    def _bound_allows(self, step: int, partition_id: str, batch_size: int, sampleable_keys: set[str]) -> bool:
        """Whether consuming the oldest finished prompts at `step` leaves every other one its time."""
        selected, _, submitted = self._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        consumed = set(selected)
        remaining = Counter(at + self.bound for uid, at in submitted.items() if uid not in consumed)
        return deadlines_hold(remaining, step, batch_size)

    def _reissue_what_is_late(self, step: int, partition_id: str, batch_size: int, sampleable_keys: set[str]) -> None:
        """Submit the oldest unfinished prompts again, as few as give all others their time."""
        submitted = self.prompt_global_steps[partition_id]
        late = []
        for uid in sorted(self._unfinished(partition_id) - self._reissued, key=submitted.__getitem__):
            if submitted[uid] == step or self._bound_allows(step, partition_id, batch_size, sampleable_keys):
                break
            submitted[uid] = step
            late.append(uid)
        if late:
            self._reissued.update(late)
            self._counts["reissued_prompts"] += len(late)
            self.reissue_fn(late, partition_id)

    def _terminal_eviction_reasons(
        self, global_steps: int, partition_id: str
    ) -> tuple[set[str], set[str], set[str], Counter]:
        """verl replaces a failed prompt by another one, and counts it as wrong in a validation. Here the same prompt is
        sampled again, so none is lost.

        Raises:
            RuntimeError: a prompt failed `MAX_ATTEMPTS` times.
        """
        stale, filtered, failed, counts = super()._terminal_eviction_reasons(global_steps, partition_id)
        failed = failed or set(self.failure_keys[partition_id])  # of a validation, too
        if failed:
            self._attempts.update(failed)
            hopeless = [uid for uid in sorted(failed) if self._attempts[uid] >= MAX_ATTEMPTS]
            if hopeless:
                raise RuntimeError(
                    f"{len(hopeless)} prompts failed {MAX_ATTEMPTS} times each, in generation or reward: prompt "
                    f"{hopeless[0]}, {self.reason_fn(hopeless[:1], partition_id)[0]}"
                )
            self._say_failed(failed, partition_id)
            self._counts["retried_prompts"] += len(failed)
            self.failure_keys[partition_id] -= failed
            self.pending_keys[partition_id] |= failed
            self.prompt_global_steps[partition_id].update(dict.fromkeys(failed, global_steps))
            self.reissue_fn(sorted(failed), partition_id)
        return stale, filtered, set(), counts

    def _say_failed(self, uids: set[str], partition_id: str) -> None:
        """A line for each of these prompts; of many, for the first."""
        shown = sorted(uids)[:_SAID_AT_ONCE]
        for uid, reason in zip(shown, self.reason_fn(shown, partition_id), strict=True):
            say(f"Prompt {uid} failed, and is sampled again: {reason}")
        if len(uids) > len(shown):
            say(f"... and so did {len(uids) - len(shown)} others.")

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict]:
        """The next batch of `batch_size` prompts with all their trajectories, and metrics. Blocks until it is due."""
        self._counts.clear()
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if partition_id != "val":
            metrics |= self._metrics(global_steps, partition_id, {prompt_of(key) for key in batch.keys})
        return batch, metrics

    def _metrics(self, step: int, partition_id: str, consumed: set[str]) -> dict[str, float]:
        for uid in consumed:
            self._attempts.pop(uid, None)
            self._place.pop(uid, None)
            self._reissued.discard(uid)
        submitted = self.prompt_global_steps[partition_id]
        self.ages = Counter(step - at for uid, at in submitted.items() if uid not in consumed)
        unfinished = self._unfinished(partition_id)
        return {
            "vcpo/async/deadline_wait_s": self._counts["deadline_wait_s"],
            "vcpo/async/reissued_prompts": self._counts["reissued_prompts"],
            "vcpo/async/retried_prompts": self._counts["retried_prompts"],
            "vcpo/buffer/unfinished": len(unfinished),
            "vcpo/buffer/finished": self.ages.total() - len(unfinished),
            "vcpo/buffer/age/max": max(self.ages, default=0),
        }

    def wait_until_finished(self, global_steps: int, partition_id: str) -> None:
        """Block until every submitted prompt is finished."""
        while True:
            self._sync_metadata_from_transfer_queue()
            self._terminal_eviction_reasons(global_steps, partition_id)
            if not self._unfinished(partition_id):
                return
            self.sleep(self.poll_interval)

    def _stop_waiting(self) -> None:
        if self._held_back_since is not None:
            self._counts["deadline_wait_s"] += self.clock() - self._held_back_since  # type: ignore[assignment]  # not int
            self._held_back_since = None

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.sleep(self.poll_interval)
        return last_debug_time
