"""The level that each task of `data.levels` is at: raised when enough of the last answers to its problems are right.

The sampler of training rows (shares.py) draws from the file of that level alone. A checkpoint has the levels, and
the last answers, in a file of its own: the loader's state has neither.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verl_vcpo.common.data_rows import DataRow, data_row
from verl_vcpo.common.whole_file import write_whole
from verl_vcpo.dataset.shares import InShares

CURRICULUM_FILE = "curriculum.json"


class Curriculum:
    """The watch over the levels of a sampler.

    Args:
        tables: the rows of each training file.
        sampler: the order of rows, which has the levels.
        data: the settings `data`.
    """

    def __init__(self, tables: Sequence[Any], sampler: InShares, data: Any) -> None:
        self._files, self._mark, self._levels = list(data.train_files), data.level_mark, list(data.levels)
        places = [(task, level) for task, levels in enumerate(data.levels) for level in range(levels)]
        self._place: dict[DataRow, tuple[int, int]] = {}
        for place, table in zip(places, tables, strict=True):
            self._place |= {data_row(extra["index"]): place for extra in table["extra_info"]}
        if len(self._place) < sum(map(len, tables)):
            raise ValueError("data.levels: rows have the same extra_info.index; number the rows of all files")
        self._sampler = sampler
        self._recent: list[deque[float]] = [deque(maxlen=data.level_answers) for _ in data.levels]

    @property
    def levels(self) -> list[int]:
        """The level of each task, from 1."""
        return [level + 1 for level in self._sampler.level]

    def look_at(self, answers: Iterable[tuple[DataRow, float]]) -> list[str]:
        """Take in a step's answers: row, and 1 where it is right. Return a line for each task that rises."""
        for row, value in answers:
            task, level = self._place[row]
            if level == self._sampler.level[task]:
                self._recent[task].append(value)
        said, first = [], 0
        for task, (recent, levels) in enumerate(zip(self._recent, self._levels, strict=True)):
            level, share = self._sampler.level[task] + 1, sum(recent) / max(1, len(recent))
            if level < levels and len(recent) == recent.maxlen and share >= self._mark:
                self._sampler.level[task] = level
                recent.clear()
                file = self._files[first + level]
                said.append(f"level {level + 1} of {levels} begins, {file}: {share:.0%} of the last answers were right")
            first += levels
        return said

    def write(self, checkpoint: Path) -> None:
        """Write the levels into the folder of a checkpoint."""
        recent = [list(values) for values in self._recent]
        write_whole(checkpoint / CURRICULUM_FILE, json.dumps({"levels": self._sampler.level, "recent": recent}))

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint, if it has levels. Raises ValueError: these are of other tasks."""
        if not (checkpoint / CURRICULUM_FILE).is_file():
            return
        state = json.loads((checkpoint / CURRICULUM_FILE).read_text())
        fits = len(state["levels"]) == len(self._levels) and all(map(int.__lt__, state["levels"], self._levels))
        if not fits:
            raise ValueError(
                f"data.levels={self._levels}: the checkpoint is at {state['levels']}; resume with its levels"
            )
        self._sampler.level[:] = state["levels"]
        for recent, values in zip(self._recent, state["recent"], strict=True):
            recent.extend(values)
