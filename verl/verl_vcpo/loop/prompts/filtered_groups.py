"""What group filtering takes away while a batch is waited for, and the end of a run to which it leaves nothing."""

from collections import Counter

MOST = 1_000
"""So many filtered groups without one that is kept end a run."""
_SHOWN = 3


class FilteredGroups:
    """The groups that were filtered since the last one that was kept."""

    def __init__(self) -> None:
        self._kept: set[str] = set()
        self._number = 0
        self._values: Counter[float] = Counter()

    def note(self, filtered: int, values: Counter[float], kept: set[str]) -> None:
        """Count groups that are filtered now.

        Args:
            filtered: the number of these.
            values: value of `algorithm.filter_groups.metric` -> the number of these groups whose samples all have it.
            kept: the finished prompts that were not filtered and wait for their batch.

        Raises:
            RuntimeError: `MOST` groups in a row were filtered.
        """
        if kept - self._kept:  # those filtered at the same look may have finished before or after it
            self._number, self._values = 0, Counter()
        else:
            self._number += filtered
            self._values += values
        self._kept = set(kept)
        if self._number >= MOST:
            raise RuntimeError(
                f"there is nothing to learn: {self.in_words()}; give easier or harder prompts, another first policy, "
                "more samples of a prompt (actor_rollout_ref.rollout.n) or rewards between right and wrong, or leave "
                "algorithm.filter_groups.enable=true out"
            )

    def in_words(self) -> str:
        """Return how many groups were filtered in a row, and by which values; '' for none."""
        if not self._number:
            return ""
        shown = self._values.most_common(_SHOWN)
        parts = [f"in {number} every sample has {value:g}" for value, number in shown]
        if others := self._values.total() - sum(number for _, number in shown):
            parts.append(f"in {others} every sample has another one value")
        if without := self._number - self._values.total():
            parts.append(f"in {without} async.truncated leaves nothing to compare")
        return f"{self._number} groups in a row were filtered (algorithm.filter_groups): {', '.join(parts)}"
