"""The importance weight of each sequence in a batch's update, for the record of sampled responses."""

from collections.abc import Iterator
from typing import NamedTuple

from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

Session = tuple[str, int]
"""A prompt's uid, and the number of the sample among those of the prompt."""


class SequenceWeight(NamedTuple):
    """The importance weight of one sequence.

    log_weight: log w, before truncation; NaN or infinite where the sequence has none.
    weight: what the sequence's gradient is multiplied by; 0 where the sequence is excluded.
    """

    log_weight: float
    weight: float


class SequenceWeights:
    """The weights of this data-parallel rank's sequences in the last batch: those of the first epoch."""

    def __init__(self) -> None:
        self._of: dict[Session, list[SequenceWeight]] = {}

    def clear(self) -> None:
        """Forget the last batch."""
        self._of.clear()

    def note(self, data: TensorDict, log_weight: Tensor, weight: Tensor) -> None:
        """Keep log w [b] and weights [b] of this rank's sequences; nothing where no agent loop has made them."""
        if "session_id" not in data:
            return
        of_mini_batch: dict[Session, list[SequenceWeight]] = {}
        for session, *pair in zip(sessions(data), log_weight.tolist(), weight.tolist(), strict=True):
            of_mini_batch.setdefault(session, []).append(SequenceWeight(*pair))
        self._of = of_mini_batch | self._of

    def of_sessions(self) -> dict[Session, SequenceWeight]:
        """Return the weights, except those of sessions with several trajectories, which the key cannot tell apart."""
        return {session: weights[0] for session, weights in self._of.items() if len(weights) == 1}


def sessions(data: TensorDict) -> Iterator[Session]:
    """Return the session of each sequence."""
    return zip(map(str, tu.get(data, "uid")), map(int, tu.get(data, "session_id")), strict=True)
