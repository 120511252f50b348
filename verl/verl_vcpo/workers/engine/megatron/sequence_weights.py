"""Which importance weight each sequence of a batch had in the update, for the record of sampled responses."""

from collections.abc import Iterator

from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

Session = tuple[str, int]
"""A prompt's uid, and the number of the sample among those of the prompt."""


class SequenceWeights:
    """The weights of this data-parallel rank's sequences in the last batch. In later epochs the first one stands."""

    def __init__(self) -> None:
        self._of: dict[Session, list[float]] = {}

    def clear(self) -> None:
        """Forget the last batch."""
        self._of.clear()

    def note(self, data: TensorDict, weight: Tensor) -> None:
        """Keep the weights of a mini-batch.

        Args:
            data: this rank's b sequences, with `uid`, and `session_id` where an agent loop has made them.
            weight: [b]; NaN for a sequence without one.
        """
        if "session_id" not in data:
            return
        of_mini_batch: dict[Session, list[float]] = {}
        for session, value in zip(_sessions(data), weight.tolist(), strict=True):
            of_mini_batch.setdefault(session, []).append(value)
        self._of = of_mini_batch | self._of

    def of_sessions(self) -> dict[Session, float]:
        """The weights, without those of sessions that have several trajectories: the fields of these are the same."""
        return {session: weights[0] for session, weights in self._of.items() if len(weights) == 1}


def _sessions(data: TensorDict) -> Iterator[Session]:
    return zip(map(str, tu.get(data, "uid")), map(int, tu.get(data, "session_id")), strict=True)
