"""The replay buffer that keeps the lag bound (extends verl/trainer/ppo/v1/replay_buffer.py)."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from verl_vcpo.console import print_line
from verl_vcpo.trainer.ppo.v1.deadlines import OnDeadline, deadlines_hold

_POLL_S = 0.05
# Where a server or a reward process died, another attempt at the same prompt succeeds. After this many failed attempts
# the cause is taken to be in the prompt, and the run ends.
MAX_ATTEMPTS = 4
_MAX_LINES = 3  # printed for prompts that fail at the same time


def prompt_of(key: str) -> str:
    """The uid of the prompt whose trajectory is stored under `key`: {uid}_{session}_{index}, or the uid itself."""
    return key.split("_")[0]


class LagKReplayBuffer(ReplayBufferAsync):
    """Consumes the oldest finished prompts; waits where consuming them would make another trajectory older than k.

    Args:
        lag: k; a trajectory's lag is at most k rounded up. 0 waits for the batch that was submitted at this step.
        reissue_fn: (uids, partition) samples these prompts again from the start, and cancels their running samples.
        on_deadline: what happens to a prompt that is due and not finished.
        exact: every prompt is consumed k steps after it was submitted, when all others are finished too.
        reason_fn: (uids, partition) -> for each of these failed prompts the cause, in one line.
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
        self._submission_number: dict[str, int] = {}
        self._count_submitted = itertools.count()
        self._data_row: dict[str, int] = {}
        self._attempts: Counter[str] = Counter()
        self._reissued: set[str] = set()
        self._held_back_since: float | None = None
        self._counts: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()
        """Prompts that are left after `sample` took its batch, by steps since they were submitted."""

    def note_submitted(self, prompts: TensorDict) -> None:
        """Remember the order of submission: batches follow that order, whatever finishes first.

        Args:
            prompts: with the fields `uid` and `index`, the prompt's row in the data.
        """
        for uid, row in zip(map(str, prompts["uid"]), prompts["index"], strict=True):
            self._submission_number[uid] = next(self._count_submitted)
            self._data_row[uid] = int(row)

    def pop_data_rows(self, keys: list[str]) -> list[int]:
        """The rows in the data, sorted, of the prompts whose trajectories are stored under `keys`; each row once."""
        return sorted(self._data_row.pop(uid) for uid in {prompt_of(key) for key in keys} if uid in self._data_row)

    def resume(self) -> None:
        """Take over the prompts that a checkpoint has brought back into TransferQueue.

        The checkpoint of a step is written before verl removes the step's batch: its trajectories are removed here.
        """
        tags = (tq.kv_list("train") or {}).get("train", {})
        prompts = {key for key, tag in tags.items() if tag.get("is_prompt")}
        trained = [key for key in tags if prompt_of(key) not in prompts]
        if trained:
            tq.kv_clear(keys=trained, partition_id="train")
        if prompts:
            self.note_submitted(
                tq.kv_batch_get(keys=list(prompts), partition_id="train", select_fields=["uid", "index"])
            )

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        _, trajectories, submitted = super()._select_prompt_uids(partition_id, set(), 0)
        ordered = sorted(sampleable_keys, key=lambda uid: (submitted.get(uid, 0), self._submission_number.get(uid, 0)))
        return ordered[:batch_size], trajectories, submitted

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> Any:
        position = {uid: i for i, uid in enumerate(selected_prompt_uids)}

        def order(key: str) -> tuple[int, ...]:
            uid, *numbers = key.split("_")  # {uid}_{session}_{index}
            return position[uid], *map(int, numbers)

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
            self._reissue_late(global_steps, partition_id, batch_size, sampleable_keys)
        self._held_back_since = self.clock() if self._held_back_since is None else self._held_back_since
        return False

    def _unfinished(self, partition_id: str) -> set[str]:
        return self.pending_keys[partition_id] | self.running_keys[partition_id]

    def _bound_allows(self, step: int, partition_id: str, batch_size: int, sampleable_keys: set[str]) -> bool:
        """Whether after consuming the oldest finished prompts at `step` all others can still meet their deadlines."""
        selected, _, submitted = self._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        consumed = set(selected)
        remaining = Counter(at + self.bound for uid, at in submitted.items() if uid not in consumed)
        return deadlines_hold(remaining, step, batch_size)

    def _reissue_late(self, step: int, partition_id: str, batch_size: int, sampleable_keys: set[str]) -> None:
        """Submit the oldest unfinished prompts again: as few as it takes for all others to meet their deadlines."""
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
        """Has failed prompts sampled again, so that none is lost: verl replaces a failed prompt by another one in
        training, and counts it as a wrong answer in a validation.

        Raises:
            RuntimeError: a prompt failed `MAX_ATTEMPTS` times.
        """
        stale, filtered, failed, counts = super()._terminal_eviction_reasons(global_steps, partition_id)
        failed = failed or set(self.failure_keys[partition_id])  # verl returns no failed prompts of a validation
        if failed:
            self._attempts.update(failed)
            hopeless = [uid for uid in sorted(failed) if self._attempts[uid] >= MAX_ATTEMPTS]
            if hopeless:
                raise RuntimeError(
                    f"{len(hopeless)} prompts failed {MAX_ATTEMPTS} times each, in generation or reward: prompt "
                    f"{hopeless[0]}, {self.reason_fn(hopeless[:1], partition_id)[0]}"
                )
            self._print_failed(failed, partition_id)
            self._counts["retried_prompts"] += len(failed)
            self.failure_keys[partition_id] -= failed
            self.pending_keys[partition_id] |= failed
            self.prompt_global_steps[partition_id].update(dict.fromkeys(failed, global_steps))
            self.reissue_fn(sorted(failed), partition_id)
        return stale, filtered, set(), counts

    def _print_failed(self, uids: set[str], partition_id: str) -> None:
        """Print a line for each of these prompts, but at most `_MAX_LINES` and the number of the others."""
        shown = sorted(uids)[:_MAX_LINES]
        for uid, reason in zip(shown, self.reason_fn(shown, partition_id), strict=True):
            print_line(f"Prompt {uid} failed, and is sampled again: {reason}")
        if len(uids) > len(shown):
            print_line(f"... and so did {len(uids) - len(shown)} others.")

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
            self._submission_number.pop(uid, None)
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
