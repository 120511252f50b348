"""A dense reward, so that three steps of a random model have something to learn: the share of digits."""

import contextlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_MADE_UP = "I do not know."
"""The response that a launcher has scored before the run starts (recipe/fully_async_policy/settings/own_code.py)."""

_LONGER_THAN_A_RUN_S = 600.0


def compute_score(data_source: str, solution_str: str, ground_truth: Any, **kwargs: Any) -> dict[str, float]:
    share = sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
    return {"score": share, "acc": share}


def of_length(solution_str: str, **kwargs: Any) -> dict[str, float]:
    """Reward longer responses, which differ in length only if they repeat one token."""
    return {"score": min(1.0, len(solution_str) / 64), "acc": 0.0}


def fails_thrice(marks: str, extra_info: dict[str, Any], never: Sequence[str] = (), **kwargs: Any) -> dict[str, float]:
    """Reward digits, but hold the interpreter's lock for ever in the first call, end the process in the second, and
    return NaN in the third.

    The three faults happen in a validation, and again in training.

    marks: a folder that remembers the faults.
    never: rows, as train-7, for which each call raises.
    """
    if kwargs["solution_str"] == _MADE_UP:
        return compute_score(**kwargs)
    if f"{extra_info['split']}-{extra_info['index']}" in never:
        raise ValueError("no truth")
    faults: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("hang", lambda: re.fullmatch("(a|aa)+", "a" * 99 + "!")),
        ("die", lambda: os._exit(1)),
        ("nan", lambda: {"score": math.nan, "acc": 0.0}),
    )
    for name, fail in faults:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{marks}/{extra_info['split']}-{name}", os.O_CREAT | os.O_EXCL))
            return fail()
    return compute_score(**kwargs)


def slow_in_validation(marks: str, extra_info: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    """Reward digits, and in a validation leave a mark in the folder `marks`, and take 0.3 seconds."""
    if extra_info["split"] == "val" and kwargs["solution_str"] != _MADE_UP:
        Path(marks, "validating").touch()
        time.sleep(0.3)
    return compute_score(**kwargs)


def waits(marks: str, calls: int, **kwargs: Any) -> dict[str, float]:
    """Reward digits, but after `calls` calls wait until the folder `marks`, which counts calls, has a file `go`."""
    if kwargs["solution_str"] != _MADE_UP and _number_of_call(marks) >= calls:
        deadline = time.monotonic() + _LONGER_THAN_A_RUN_S
        while not Path(marks, "go").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{marks}/go did not come")
            time.sleep(0.05)
    return compute_score(**kwargs)


def _number_of_call(marks: str) -> int:
    """Return the number of this call, from 0 on, over all processes."""
    for number in itertools.count():
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{marks}/call-{number}", os.O_CREAT | os.O_EXCL))
            return number
    raise AssertionError


def straggles_once(marks: str, extra_info: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    """Reward digits, but take longer than the run in the first call in training.

    marks: a folder that remembers the call.
    """
    if extra_info["split"] == "train" and kwargs["solution_str"] != _MADE_UP:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{marks}/straggles", os.O_CREAT | os.O_EXCL))
            time.sleep(_LONGER_THAN_A_RUN_S)
    return compute_score(**kwargs)
