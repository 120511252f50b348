"""The order of training rows of several files, mixed exactly by `data.shares`.

Every draw adds to each file's credit the file's share. A row is drawn from the file with the most credit, and costs 1:
after any number of draws a file is less than one row above its share of the draws. The rows of a file come in an order
of their own, and in another order each time that the file begins again.
"""

import functools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
from torch.utils.data import Sampler


def check_sizes(sizes: Sequence[int], data: Any) -> None:
    """Refuse a file of `data.train_files` that has no row left, by a ValueError; `data` are the settings `data`."""
    for file, size in zip(data.train_files, sizes, strict=True):
        if not size:
            raise ValueError(
                f"data.shares: data.train_max_samples={data.train_max_samples} and data.max_prompt_length="
                f"{data.max_prompt_length} leave no row of {file}; raise them, or leave the file out"
            )


class InShares(Sampler[int]):
    """An endless sequence of row numbers; one round has as many as all files together, and the next round goes on.

    Args:
        sizes: the number of rows of each file; the files' rows are numbered one file after the other.
        shares: the share of each task, above 0; the sum is free.
        seed: the seed of the order of each file's rows; None: the order in the file.
        levels: how many files in a row are a task's levels, of which one is drawn from; None: each file is a task.
    """

    def __init__(
        self, sizes: Sequence[int], shares: Sequence[float], seed: int | None, levels: Sequence[int] | None = None
    ) -> None:
        given = [Fraction(str(share)) for share in shares]
        self._shares = [share / sum(given) for share in given]
        self._sizes, self._first, self._seed = sizes, [0, *accumulate(sizes)], seed
        self._first_file = [0, *accumulate(levels or [1] * len(sizes))]
        self.level = [0] * len(given)
        """The level that each task is at; a curriculum raises it."""
        self.drawn, self.credit = [0] * len(sizes), [Fraction(0)] * len(given)

    def __len__(self) -> int:
        return sum(self._sizes)

    def __iter__(self) -> "_Round":
        return _Round(self)

    def next_row(self) -> int:
        """Draw one row."""
        self.credit = [credit + share for credit, share in zip(self.credit, self._shares, strict=True)]
        task = self.credit.index(max(self.credit))
        self.credit[task] -= 1
        file = self._first_file[task] + self.level[task]
        times, place = divmod(self.drawn[file], self._sizes[file])
        self.drawn[file] += 1
        if self._seed is not None:
            place = int(_order(self._seed, file, times, self._sizes[file])[place])
        return self._first[file] + place


@functools.lru_cache
def _order(seed: int, file: int, times: int, size: int) -> Any:
    """Return the order of a file's rows after the file has been drawn whole so many times."""
    return np.random.default_rng([seed, file, times]).permutation(size)


class _Round(Iterator[int]):
    """One round over as many rows as all files have; torchdata keeps its state in a checkpoint."""

    def __init__(self, order: InShares) -> None:
        self._order, self._left = order, len(order)

    def __next__(self) -> int:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._order.next_row()

    def state_dict(self) -> dict[str, Any]:
        return {"left": self._left, "drawn": list(self._order.drawn), "credit": list(self._order.credit)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned. Raises ValueError: the state is of other files."""
        drawn = state.get("drawn", ())
        if len(drawn) != len(self._order.drawn) or len(state["credit"]) != len(self._order.credit):
            raise ValueError(
                f"data.shares: the checkpoint's order of rows is of {len(drawn) or 'no'} files with shares, not of "
                f"{len(self._order.drawn)}; resume with the files and shares of the run, or start a new one"
            )
        self._left, self._order.drawn, self._order.credit = state["left"], list(drawn), list(state["credit"])
