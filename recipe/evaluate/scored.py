"""The scored answers of an evaluation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One response to one problem."""

    problem: int
    data_source: str
    response: str
    score: float
    correct: float
    """The reward's `acc`; the score if the reward has no `acc`."""
