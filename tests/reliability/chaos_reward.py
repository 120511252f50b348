"""The reward of an hour of chaos: each row has a value of its own, so that a batch's mean tells the batch's rows."""

import json
import os
import random
import re
import time
from pathlib import Path
from typing import Any

SPREAD = 1e-4
"""The bound of the difference between the rewards of a row's samples, which are never equal."""
FILTERED_OF = 7
"""One row in so many has equal rewards: group filtering takes the row out, and no step trains on the row."""
SCORED = "scored.jsonl"
FAULTS = ("hang", "die", "nan")
"""The names of files in the folder of marks; the call that removes a file has the fault of that name."""
_MADE_UP = "I do not know."
"""The response that a launcher has scored before the run starts (recipe/fully_async_policy/settings/own_code.py)."""


def is_filtered(row: int) -> bool:
    return row % FILTERED_OF == FILTERED_OF - 1


def value(row: int) -> float:
    """Return a row's value between 0.1 and 0.9, far from those of other rows: a multiple of the golden section."""
    return 0.1 + 0.8 * (row * 0.6180339887498949 % 1)


def compute_score(folder: str, marks: str, solution_str: str, extra_info: dict[str, Any], **_: Any) -> dict[str, float]:
    """Return the row's value, and note the call in `folder`/scored.jsonl; `marks` can make the call fail."""
    row = extra_info["index"]
    if solution_str == _MADE_UP:
        return {"score": value(row), "acc": 0.0}
    for fault in FAULTS:
        try:
            os.remove(Path(marks, fault))
        except FileNotFoundError:
            continue
        if fault == "hang":
            re.fullmatch("(a|aa)+", "a" * 99 + "!")  # holds the interpreter's lock for ever
        elif fault == "die":
            os._exit(1)
        return {"score": float("nan"), "acc": 0.0}
    with open(Path(folder, SCORED), "a") as file:
        file.write(json.dumps({"row": row, "at": time.monotonic()}) + "\n")
    jitter = 0.0 if is_filtered(row) else random.uniform(0, SPREAD)
    return {"score": value(row) + jitter, "acc": 0.0}
