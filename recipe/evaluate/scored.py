"""What an evaluation is made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One response to one problem."""

    problem: int
    data_source: str
    response: str
    score: float
    correct: float
    """What the reward calls `acc`; the score where it has no `acc`."""
