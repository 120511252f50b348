"""The replay buffer that keeps the lag bound (extends verl/trainer/ppo/v1/replay_buffer.py)."""

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from verl_vcpo.common.console import print_line
from verl_vcpo.common.data_rows import DataRow, data_row, in_order
from verl_vcpo.common.stored_tags import PromptTags, Tag, clear_trajectories, prompt_of, sessions_of, trajectories_of
from verl_vcpo.common.truncated import TRUNCATED, Truncated
from verl_vcpo.loop.prompts import withheld_prompts
from verl_vcpo.loop.prompts.deadlines import OnDeadline, deadlines_hold, deadlines_without_oldest, resume_prompts
from verl_vcpo.loop.prompts.dropped import groups_without_signal
from verl_vcpo.loop.prompts.failed_prompts import FailedPrompts
from verl_vcpo.loop.prompts.filtered_groups import FilteredGroups
from verl_vcpo.report.run_log import SKIPPED

_POLL_S = 0.05  # the shortest time between two looks for finished prompts
_REST = 4  # after a poll that took t seconds, wait at least 4 t
_TELL_S = 60.0  # after every so many seconds a line says what the wait is for


class LagKReplayBuffer(ReplayBufferAsync):
    """A buffer that gives out the oldest finished prompts, and waits where another trajectory would get older than k.

    Args:
        lag: k; a trajectory's lag is at most k rounded up. 0 waits for the batch that was submitted at this step.
        samples: n, the sessions of a prompt whose row gives no other number.
        reissue_fn: (uids, partition) samples these prompts again from the start, and cancels their running samples.
        failed_prompts: what decides about prompts that fail.
        sleep: pauses for so many seconds between two looks; raises the error that keeps samples away.
        on_deadline: the treatment of a prompt that is due and not finished.
        exact: every prompt is consumed k steps after its submission.
        **kwargs: verl's arguments.
    """

    def __init__(
        self,
        lag: float,
        samples: int,
        reissue_fn: Callable[[list[str], str], None],
        failed_prompts: FailedPrompts,
        sleep: Callable[[float], None] = time.sleep,
        on_deadline: OnDeadline = OnDeadline.WAIT,
        exact: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lag = lag
        self.bound = math.ceil(lag)
        self.samples = samples
        self.reissue_fn = reissue_fn
        self.on_deadline = on_deadline
        self.exact = exact
        self.failed_prompts = failed_prompts
        self.poll_interval = _POLL_S
        self.clock: Callable[[], float] = time.monotonic
        self.sleep = sleep
        self._partition = "train"
        self._poll_s = 0.0
        self._prompt_tags = PromptTags()
        self._sessions: dict[str, int] = {}
        self._submission_number: dict[str, int] = {}
        self._count_submitted = itertools.count()
        self._data_row: dict[str, DataRow] = {}
        self._reissued: set[str] = set()
        self._held_back_since: float | None = None
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)  # of each partition
        self._filtered = FilteredGroups()
        self._start_wait()
        self.row_of: dict[str, DataRow] = {}
        """The rows in the data of the prompts in the last batch of `sample`."""
        self.data_rows: list[DataRow] = []
        """The sorted rows in the data of the prompts in the last batch of `sample`."""
        self.ages: Counter[int] = Counter()
        """The number of prompts left after the last batch of `sample`, by steps since submission."""

    def note_submitted(self, prompts: TensorDict) -> None:
        """Remember the order of submission, which batches follow, whatever finishes first."""
        self._sessions |= sessions_of(prompts, self.samples)
        self._prompt_tags.add(map(str, prompts["uid"]))
        self.failed_prompts.note_submitted(prompts)
        for uid, row in zip(map(str, prompts["uid"]), prompts["index"], strict=True):
            self._submission_number[uid] = next(self._count_submitted)
            self._data_row[uid] = data_row(row)

    def resume(self, step: int, batch_size: int) -> int:
        """Take over the prompts that a checkpoint has brought back into TransferQueue, as far as the bound allows.

        `step` is the first of the resumed run. Returns the number of prompts in flight.
        """
        tags = (tq.kv_list("train") or {}).get("train", {})
        submitted = {key: tag["global_steps"] for key, tag in tags.items() if tag.get("is_prompt")}
        submitted = dict(sorted(submitted.items(), key=lambda item: item[1]))  # stable: of one step, as they were put
        finished = {uid for uid in submitted if tags[uid]["status"] == "finished"}
        resumed = resume_prompts(submitted, finished, step=step, lag=self.lag, batch_size=batch_size)
        kept = {*resumed.kept}
        trajectories = [key for key, tag in tags.items() if not tag.get("is_prompt") and prompt_of(key) not in kept]
        if trajectories:  # also of the batch of the checkpoint's step, which was written before verl removed the batch
            tq.kv_clear(keys=trajectories, partition_id="train")
        if resumed.withheld:
            withheld_prompts.withhold(tq.kv_batch_get(keys=resumed.withheld, partition_id="train"))
            tq.kv_clear(keys=resumed.withheld, partition_id="train")
        if resumed.again:  # verl submits what is pending
            tq.kv_batch_put(keys=resumed.again, partition_id="train", tags=[{"status": "pending"}] * len(resumed.again))
        in_flight = [*resumed.kept, *resumed.again]
        if in_flight:
            self.note_submitted(tq.kv_batch_get(keys=in_flight, partition_id="train"))
        late = finished - kept - {*resumed.withheld}
        if late or resumed.withheld:
            print_line(
                f"The checkpoint has more prompts than a lag of {self.lag:g} with data.train_batch_size={batch_size} "
                f"allows: {len(late)} are sampled again, {len(resumed.withheld)} wait for their turn."
            )
        return len(in_flight)

    def _sync_metadata_from_transfer_queue(self) -> None:
        """Read the states of the partition's prompts; upstream's method lists all keys of all partitions.

        Trajectories of training prompts are read when a batch is chosen; only group filtering needs all of them here.
        """
        start, partition = self.clock(), self._partition
        if partition == "train" and self.filter_groups_metric is None:
            self._take_over(partition, self._prompt_tags.current(partition), {})
        else:
            tags = (tq.kv_list(partition) or {}).get(partition, {})
            prompts = {key: tag for key, tag in tags.items() if tag.get("is_prompt")}
            self._take_over(partition, prompts, {key: tag for key, tag in tags.items() if key not in prompts})
        self._poll_s = self.clock() - start

    def _take_over(self, partition: str, prompts: dict[str, Tag], trajectories: dict[str, Tag]) -> None:
        keys = self.pending_keys, self.running_keys, self.finished_keys, self.failure_keys
        for of_status, status in zip(keys, ("pending", "running", "finished", "failure"), strict=True):
            of_status[partition] = {uid for uid, tag in prompts.items() if tag["status"] == status}
        self.prompt_global_steps[partition] = {uid: tag["global_steps"] for uid, tag in prompts.items()}
        self.partitions[partition] = trajectories

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, Tag], dict[str, int]]:
        chosen = self._oldest_first(partition_id, sampleable_keys)[:batch_size]
        if not self.partitions[partition_id]:
            self.partitions[partition_id] = trajectories_of({uid: self._sessions[uid] for uid in chosen}, partition_id)
        _, trajectories, submitted = super()._select_prompt_uids(partition_id, set(), 0)
        return chosen, trajectories, submitted

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, Tag]
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
        if partition_id == "val":
            return len(sampleable_keys) >= batch_size - self._counts[partition_id]["skipped_prompts"]
        if len(sampleable_keys) < batch_size:
            return False
        if self.exact:
            in_flight = sampleable_keys | self._unfinished(partition_id)
            return sampleable_keys.issuperset(self._oldest_first(partition_id, in_flight)[: batch_size or None])
        remaining = self._deadlines_without_oldest(partition_id, batch_size, sampleable_keys)
        if deadlines_hold(remaining, global_steps, batch_size):
            self._stop_waiting()
            return True
        if not self._unfinished(partition_id):
            raise RuntimeError(
                f"a lag of {self.lag:g}: every prompt is finished, and at step {global_steps} the deadlines "
                f"{dict(sorted(remaining.items()))} (step: prompts) cannot hold with {batch_size} prompts a step"
            )
        if self.on_deadline is OnDeadline.REISSUE:
            self._reissue_late(global_steps, partition_id, batch_size, remaining)
        self._held_back_since = self.clock() if self._held_back_since is None else self._held_back_since
        return False

    def _unfinished(self, partition_id: str) -> set[str]:
        return self.pending_keys[partition_id] | self.running_keys[partition_id]

    def _oldest_first(self, partition_id: str, uids: set[str]) -> list[str]:
        submitted, number = self.prompt_global_steps[partition_id], self._submission_number
        return sorted(uids, key=lambda uid: (submitted[uid], number.get(uid, 0)))

    def _deadlines_without_oldest(self, partition_id: str, batch_size: int, sampleable_keys: set[str]) -> Counter[int]:
        submitted = self.prompt_global_steps[partition_id]
        finished = Counter(submitted[uid] for uid in sampleable_keys)
        return deadlines_without_oldest(Counter(submitted.values()), finished, bound=self.bound, batch_size=batch_size)

    def _reissue_late(self, step: int, partition_id: str, batch_size: int, remaining: Counter[int]) -> None:
        """Submit the oldest unfinished prompts again: as few as let all others meet their deadlines."""
        submitted = self.prompt_global_steps[partition_id]
        late = []
        for uid in self._oldest_first(partition_id, self._unfinished(partition_id) - self._reissued):
            if submitted[uid] == step or deadlines_hold(remaining, step, batch_size):
                break
            remaining[submitted[uid] + self.bound] -= 1
            remaining[step + self.bound] += 1
            submitted[uid] = step
            late.append(uid)
        if late:
            self._reissued.update(late)
            self._counts[partition_id]["reissued_prompts"] += len(late)
            self.reissue_fn(late, partition_id)

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        """Filter groups as verl does, without the rewards of dropped samples; also those with nothing to train on."""
        tags, finished = self.partitions[partition_id], self.finished_keys[partition_id]
        nothing = groups_without_signal(tags) & finished
        self.partitions[partition_id] = {key: tag for key, tag in tags.items() if tag.get(TRUNCATED) != Truncated.DROP}
        self.finished_keys[partition_id] = finished - nothing
        try:
            filtered, counts = super()._dapo_filtered_keys(partition_id)
        finally:
            self.partitions[partition_id], self.finished_keys[partition_id] = tags, finished
        return filtered | nothing, counts

    def _terminal_eviction_reasons(
        self, global_steps: int, partition_id: str
    ) -> tuple[set[str], set[str], set[str], Counter[str]]:
        """Have failed prompts sampled again, so that none is lost, and return only those to skip as failed.

        verl clears the prompts that are returned, and submits as many others. In a validation, where verl counts a
        prompt that is missing as wrong and submits no others, skipped prompts are cleared here.

        Raises:
            RuntimeError: see `FailedPrompts.to_skip`.
        """
        stale, filtered, failed, counts = super()._terminal_eviction_reasons(global_steps, partition_id)
        failed = failed or set(self.failure_keys[partition_id])  # verl returns no failed prompts of a validation
        if not failed:
            return stale, filtered, failed, counts
        submitted = self.prompt_global_steps[partition_id]
        skipped = self.failed_prompts.to_skip(failed, partition_id, global_steps, submitted.keys())
        self._counts[partition_id]["skipped_prompts"] += len(skipped)
        if again := failed - skipped:
            self._counts[partition_id]["retried_prompts"] += len(again)
            self.failure_keys[partition_id] -= again
            self.pending_keys[partition_id] |= again
            submitted.update(dict.fromkeys(again, global_steps))
            self.reissue_fn(sorted(again), partition_id)
        if partition_id == "val":
            self._clear_groups(partition_id, skipped)
            skipped = set()
        return stale, filtered, skipped, counts

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        """Clear what verl filters, and count it. Raises RuntimeError where nothing is left, see `FilteredGroups`."""
        evicted = super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)
        if partition_id == "train":
            _, filtered, _, values = eviction_reasons
            self._filtered.note(len(filtered), values, self.finished_keys[partition_id])
        if evicted[0]:  # verl looks again at once
            self._tell_of_waiting(partition_id)
        return evicted

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Wait for the next batch of `batch_size` prompts, and return all its trajectories, and metrics."""
        self._partition = partition_id
        if partition_id == "val":
            self.failed_prompts.begin_validation()
            self._counts.pop("val", None)
        self._start_wait()
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if partition_id != "val":
            metrics |= self._metrics(global_steps, partition_id, {prompt_of(key) for key in batch.keys})
        return batch, metrics

    def _metrics(self, step: int, partition_id: str, consumed: set[str]) -> dict[str, float]:
        self.row_of = {uid: self._data_row[uid] for uid in consumed if uid in self._data_row}
        self.data_rows = in_order(self.row_of.values())
        submitted = self.prompt_global_steps[partition_id]
        self.failed_prompts.note_trained(consumed, len(submitted))
        self._forget(consumed)
        self.ages = Counter(step - at for uid, at in submitted.items() if uid not in consumed)
        unfinished = self._unfinished(partition_id)
        return self._done(partition_id) | {
            "vcpo/buffer/unfinished": len(unfinished),
            "vcpo/buffer/finished": self.ages.total() - len(unfinished),
            "vcpo/buffer/age/max": max(self.ages, default=0),
        }

    def _done(self, partition_id: str) -> dict[str, float]:
        """Return the metrics of what was done to prompts since the last call."""
        counts = self._counts.pop(partition_id, Counter())
        return {
            "vcpo/async/deadline_wait_s": counts["deadline_wait_s"],
            "vcpo/async/reissued_prompts": counts["reissued_prompts"],
            "vcpo/async/retried_prompts": counts["retried_prompts"],
            SKIPPED: counts["skipped_prompts"],
        }

    def _forget(self, uids: set[str]) -> None:
        self._prompt_tags.remove(uids)
        self.failed_prompts.forget(uids)
        for uid in uids:
            self._sessions.pop(uid, None)
            self._submission_number.pop(uid, None)
            self._data_row.pop(uid, None)
            self._reissued.discard(uid)

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        """Remove prompts with all their samples; verl knows those that the last look has listed."""
        if partition_id == "train" and self.filter_groups_metric is None:
            clear_trajectories({uid: self._sessions[uid] for uid in uids}, partition_id)
        super()._clear_groups(partition_id, uids)
        self._forget(uids)

    def wait_until_finished(self, global_steps: int, partition_id: str, metrics: dict[str, Any]) -> None:
        """Block until every submitted prompt is finished; add what is done meanwhile to the step's `metrics`."""
        self._partition = partition_id
        self._start_wait()
        _, evicted = self.wait_for_sampleable(global_steps, partition_id, 0)  # 0 prompts of an exact buffer: all
        for name, value in {**evicted, **self._done(partition_id)}.items():
            before = metrics.get(name, 0)
            metrics[name] = dict(Counter(before or {}) + Counter(value)) if isinstance(value, dict) else before + value

    def _stop_waiting(self) -> None:
        if self._held_back_since is not None:
            held_s = self.clock() - self._held_back_since
            self._counts[self._partition]["deadline_wait_s"] += held_s  # type: ignore[assignment]  # not int
            self._held_back_since = None

    def _start_wait(self) -> None:
        self._waiting_since = self._last_told = self.clock()

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.sleep(max(self.poll_interval, _REST * self._poll_s))
        self._tell_of_waiting(partition_id)
        return last_debug_time

    def _tell_of_waiting(self, partition_id: str) -> None:
        now = self.clock()
        if now - self._last_told >= _TELL_S:
            self._last_told = now
            self._print_waiting(partition_id, now - self._waiting_since)

    def _print_waiting(self, partition_id: str, seconds: float) -> None:
        submitted, unfinished = self.prompt_global_steps[partition_id], self._unfinished(partition_id)
        what, which = "The trainer", ""
        if partition_id == "val":  # its prompts are submitted together
            what = "Validation"
        elif unfinished:
            oldest = min(unfinished, key=submitted.__getitem__)
            which = f"; the oldest, {oldest}, was submitted at step {submitted[oldest]}"
        if partition_id == "train" and (filtered := self._filtered.in_words()):
            which += f"; {filtered}"
        print_line(f"{what} has waited {seconds:.0f} s for samples: {len(unfinished)} prompts are unfinished{which}.")
