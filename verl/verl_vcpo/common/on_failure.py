"""What a run does with a prompt that always fails (`async.on_failure`)."""

from enum import StrEnum


class OnFailure(StrEnum):
    """The treatment of a prompt that always fails."""

    END = "end"
    """The run ends."""
    SKIP = "skip"
    """The prompt and all its samples are left out; in training the next prompt of the data takes their place."""
