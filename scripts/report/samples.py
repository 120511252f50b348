"""The sampled responses of a run, as many as a page can hold."""

import heapq
import math
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from verl_vcpo.common.step_lines import read_lines
from verl_vcpo.report.run_log import SAMPLES_FILE

_NEWEST, _HEAVIEST = 500, 500
# Weight, log-weight, number, sample: truncation makes the largest weights equal, and not their logarithms.
_Entry = tuple[float, float, int, dict[str, Any]]


class Samples(NamedTuple):
    """The newest samples and those of the largest weight.

    rows: each with `step`, `group` (the prompt's number, in the order of the file), `reward`, `lag`, `weight`,
        `log_weight` (before truncation), `prompt` and `response`; None where the run did not record it.
    of: how many the run recorded.
    """

    rows: list[dict[str, Any]]
    of: int


def read_samples(folder: Path) -> Samples | None:
    """The samples in a run's folder; None where the run recorded none."""
    path = folder / SAMPLES_FILE
    if not path.is_file():
        return None
    newest: deque[_Entry] = deque(maxlen=_NEWEST)
    heaviest: list[_Entry] = []
    number, groups = -1, dict[str, int]()
    for number, line in enumerate(read_lines(path)):
        sample = _row(line, groups)
        entry = sample["weight"] or 0.0, _or_least(sample["log_weight"]), number, sample
        newest.append(entry)
        (heapq.heappush if len(heaviest) < _HEAVIEST else heapq.heappushpop)(heaviest, entry)
    kept = {number: sample for *_, number, sample in [*heaviest, *newest]}
    return Samples([kept[number] for number in sorted(kept)], number + 1)


def _row(sample: dict[str, Any], groups: dict[str, int]) -> dict[str, Any]:
    row = {name: sample.get(name) for name in ("step", "reward", "lag", "weight", "log_weight", "prompt", "response")}
    uid = sample.get("uid")
    return row | {"group": None if uid is None else groups.setdefault(uid, len(groups) + 1)}


def _or_least(log_weight: float | None) -> float:
    return -math.inf if log_weight is None else log_weight
