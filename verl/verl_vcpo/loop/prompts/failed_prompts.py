"""What becomes of a prompt that fails: it is sampled again, and after some attempts it ends the run or is skipped.

A prompt fails where one of its samples has no reward: the agent loop, a tool or the reward raised, hung, ended a
process or gave no finite number, or a request ended samplers.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from itertools import islice
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from verl_vcpo.common.console import print_line
from verl_vcpo.common.data_rows import data_row
from verl_vcpo.common.on_failure import OnFailure
from verl_vcpo.common.step_lines import StepLines, read_lines
from verl_vcpo.common.stored_tags import Failure
from verl_vcpo.report.run_log import SKIPPED_FILE

# After the death of a server or a reward process another attempt at the same prompt succeeds. After this many failed
# attempts the cause must be in the prompt.
MAX_ATTEMPTS = 4
_WINDOW = 100  # the share of skipped prompts is that among at least so many
_MAX_LINES = 3  # lines printed for prompts that fail at the same time


class FailedPrompts:
    """The attempts at prompts that fail, and the record of skipped prompts.

    Args:
        config: the run's settings; the run's folder gets `SKIPPED_FILE`.
        failures_fn: (uids, partition) -> the cause of each of these prompts' failures.
        prompts_fn: (uids, partition) -> the fields of these prompts, as they were submitted.
    """

    def __init__(
        self,
        config: Any,
        failures_fn: Callable[[list[str], str], list[Failure]],
        prompts_fn: Callable[[list[str], str], TensorDict],
    ) -> None:
        self._on_failure = OnFailure(config["async"].on_failure)
        self._max_skipped = float(config["async"].max_skipped)
        self._failures_fn, self._prompts_fn = failures_fn, prompts_fn
        self.record = StepLines(Path(config.run_dir) / SKIPPED_FILE)
        """The lines of `SKIPPED_FILE`."""
        self._attempts: Counter[str] = Counter()
        self._source: dict[str, str] = {}
        # partition, data source -> of its last prompts, in the order in which they left: whether each was skipped
        self._left: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
        self._held_out: set[str] = set()

    def resume(self, step: int) -> None:
        """Continue from the checkpoint of `step`. One failure more skips a prompt again that was skipped after it."""
        lines = list(read_lines(self.record.path)) if self.record.path.is_file() else []
        self._attempts.update({str(line.get("uid")): MAX_ATTEMPTS - 1 for line in lines if line["step"] > step})
        self.record.resume(step)

    def note_submitted(self, prompts: TensorDict) -> None:
        """Remember the data sources of prompts of training."""
        self._source |= dict(zip(map(str, prompts["uid"]), _sources(prompts), strict=True))

    def begin_validation(self) -> None:
        """Count the skipped prompts of a validation's next batch anew."""
        for which in [which for which in self._left if which[0] == "val"]:
            del self._left[which]

    def note_trained(self, uids: Set[str], in_flight: int) -> None:
        """Count prompts of training that were not skipped; `in_flight`: the number of prompts in the buffer."""
        for uid in uids & self._source.keys():
            self._leave("train", self._source[uid], False, max(_WINDOW, in_flight))

    def forget(self, uids: Iterable[str]) -> None:
        """Remember nothing more of these prompts."""
        for uid in uids:
            self._attempts.pop(uid, None)
            self._source.pop(uid, None)

    def to_skip(self, failed: set[str], partition_id: str, step: int, present: Collection[str]) -> set[str]:
        """Count an attempt at each of `failed`. Return those among them that are skipped; sample the others again.

        Args:
            failed: the prompts that have failed since the last call.
            step: the step, for the record.
            present: all prompts of the partition.

        Raises:
            RuntimeError: a prompt always fails, with `async.on_failure=end`; or too many prompts do.
        """
        self._attempts.update(failed)
        causes = dict(zip(sorted(failed), self._failures_fn(sorted(failed), partition_id), strict=True))
        given_up = {uid: why for uid, why in causes.items() if why.final or self._attempts[uid] >= MAX_ATTEMPTS}
        if given_up and self._on_failure is OnFailure.END:
            raise RuntimeError(self._end_of_run(given_up))
        again = {uid: cause for uid, cause in causes.items() if uid not in given_up}
        _tell([f"Prompt {uid} failed, and is sampled again: {cause.reason}" for uid, cause in again.items()])
        if given_up:
            self._skip(given_up, partition_id, step, present)
        return set(given_up)

    def without_skipped(self, asked: Mapping[tuple[str, str], int]) -> tuple[dict[tuple[str, str], int], int]:
        """Return `asked`, (data source, uid) -> value, without the held-out prompts that were skipped; and how many."""
        answered = {prompt: value for prompt, value in asked.items() if prompt[1] not in self._held_out}
        return answered, len(asked) - len(answered)

    def _end_of_run(self, given_up: dict[str, Failure]) -> str:
        final = next((uid for uid, cause in given_up.items() if cause.final), None)
        uid = final or next(iter(given_up))
        words = f"{len(given_up)} prompts failed {MAX_ATTEMPTS} times each, in generation or reward: prompt {uid}, "
        if final:
            words = f"prompt {uid} cannot be sampled: "
        return f"{words}{given_up[uid].reason}; async.on_failure=skip goes on without such a prompt"

    def _skip(self, given_up: dict[str, Failure], partition_id: str, step: int, present: Collection[str]) -> None:
        """Record prompts, say so, and raise RuntimeError if too many of a data source were skipped."""
        prompts, held_out = self._prompts_fn([*given_up], partition_id), partition_id == "val"
        fields = zip(given_up.items(), prompts["index"], _sources(prompts), prompts["raw_prompt"], strict=True)
        lines = [
            {
                "step": step,
                "row": data_row(row),
                "data_source": source,
                "held_out": held_out,
                "prompt": "\n\n".join(str(message["content"]) for message in messages),
                "reason": cause.reason,
                "tries": self._attempts[uid],
                "uid": uid,
            }
            for (uid, cause), row, source, messages in fields
        ]
        self.record.write(lines)
        then = "It is not in the held-out accuracy" if held_out else "The next prompt takes its place"
        _tell(
            [
                f"Row {line['row']} of {line['data_source']!r} is skipped after {line['tries']} failures: "
                f"{line['reason']}. {then}; {self.record.path} has the prompt."
                for line in lines
            ]
        )
        if held_out:
            self._held_out |= given_up.keys()
        last = dict(zip(_sources(prompts), (cause.reason for cause in given_up.values()), strict=True))
        for source, skipped in Counter(_sources(prompts)).items():
            window = self._window(partition_id, source, present)
            for _ in range(skipped):
                self._leave(partition_id, source, True, window)
            self._check_share(partition_id, source, window, last[source])

    def _window(self, partition_id: str, source: str, present: Collection[str]) -> int:
        """Return the number of prompts among which the share of skipped ones counts.

        All prompts in flight are among them: those that hang leave last, one after another. In a validation it is all
        prompts of the data source.
        """
        if partition_id != "val":
            return max(_WINDOW, len(present))
        return _sources(self._prompts_fn([*present], partition_id)).count(source) + len(self._left["val", source])

    def _leave(self, partition_id: str, source: str, skipped: bool, window: int) -> None:
        left = self._left[partition_id, source]
        left.append(skipped)
        del left[:-window]

    def _check_share(self, partition_id: str, source: str, window: int, reason: str) -> None:
        """Raise RuntimeError if more of the last `window` prompts were skipped than the setting allows, or all."""
        skipped, allowed = sum(self._left[partition_id, source]), max(1, int(self._max_skipped * window + 1e-9))
        if skipped > min(allowed, window - 1):
            which = "held-out prompts" if partition_id == "val" else "prompts in a row"
            raise RuntimeError(
                f"async.max_skipped={self._max_skipped:g}: {skipped} of {window} {which} of {source!r} always fail, as "
                f"{self.record.path} says: mend what they have in common, or raise the setting; the last one: {reason}"
            )


def _sources(prompts: TensorDict) -> list[str]:
    return list(map(str, prompts["data_source"] if "data_source" in prompts else ["unknown"] * len(prompts["uid"])))


def _tell(lines: list[str]) -> None:
    """Print the first few of the lines, and how many others there are."""
    for line in islice(lines, _MAX_LINES):
        print_line(line)
    if len(lines) > _MAX_LINES:
        print_line(f"... and {len(lines) - _MAX_LINES} others.")
