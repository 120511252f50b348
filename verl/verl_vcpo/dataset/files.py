"""The rows of the files (extends verl/utils/dataset/rl_dataset.py).

verl joins all files to one table, in which a column has one type: files of two tasks, whose `ground_truth` is a number
in one and a record in the other, cannot be joined. Here each file stays a table, and the rows of a JSON file objects.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from omegaconf import DictConfig, open_dict
from torch.utils.data import ConcatDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_vcpo.common.data_columns import OF_THE_LOOP
from verl_vcpo.common.json_rows import SUFFIXES, json_rows
from verl_vcpo.dataset.shares import InShares, check_sizes


class JsonTable:
    """The rows of a JSON file, with what is used here and by verl of a `datasets.Dataset`."""

    def __init__(self, texts: datasets.Dataset, column_names: list[str]) -> None:
        self._texts, self.column_names = texts, column_names

    @classmethod
    def of(cls, file: Path) -> "JsonTable":
        """Read a file. Raises ValueError naming what is wrong, and the line."""
        names: dict[str, None] = {}
        texts = []
        for _, row in json_rows(file):
            names |= dict.fromkeys(row)
            texts.append(json.dumps(row))
        return cls(datasets.Dataset.from_dict({"row": texts}), list(names))

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, key: int | str) -> Any:
        """Return a row, whose values are nobody else's, or a column; None where a row does not have the column."""
        if isinstance(key, str):
            return [json.loads(text).get(key) for text in self._texts["row"]]
        row: dict[str, Any] = json.loads(self._texts[key]["row"])
        return row

    def select(self, rows: Sequence[int]) -> "JsonTable":
        """Return a table of these rows."""
        return JsonTable(self._texts.select(rows), self.column_names)

    def filter(self, keeps: Callable[[dict[str, Any]], bool], **how: Any) -> "JsonTable":
        """Return a table of the rows that `keeps` is true for; `how`: arguments of `datasets.Dataset.filter`."""
        return JsonTable(self._texts.filter(lambda one: keeps(json.loads(one["row"])), **how), self.column_names)


class Tables:
    """The rows of several tables, one table after the other; None for a column that a row's table does not have."""

    def __init__(self, tables: list[Any]) -> None:
        self.tables, self.sizes = tables, [len(table) for table in tables]
        self._rows: ConcatDataset[dict[str, Any]] = ConcatDataset(tables)
        self._columns = list(dict.fromkeys(column for table in tables for column in table.column_names))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = self._rows[int(row)]
        return {column: found.get(column) for column in self._columns}


class FilesDataset(RLHFDataset):
    """verl's dataset over `Tables`."""

    dataframe: Any
    data_files: list[str]
    max_samples: int
    filter_overlong_prompts: bool

    def _read_files_and_tokenize(self) -> None:
        files, most, filters = self.data_files, self.max_samples, self.filter_overlong_prompts
        self.max_samples, self.filter_overlong_prompts = -1, False  # below: rows are drawn from all files together
        tables = []
        for file in files:
            self.data_files = [file]
            if Path(file).suffix in SUFFIXES:
                self.dataframe = JsonTable.of(Path(file))
            else:
                super()._read_files_and_tokenize()
            tables.append(self.dataframe)
        self.data_files, self.max_samples, self.filter_overlong_prompts = files, most, filters
        drawn = self._drawn([len(table) for table in tables])
        kept = [table if rows is None else table.select(rows) for table, rows in zip(tables, drawn, strict=True)]
        self.dataframe = Tables([self.maybe_filter_out_long_prompts(table) for table in kept])

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Return verl's row without what workers would take for their own; rows without an index are numbered."""
        row = super().__getitem__(item)
        if row["extra_info"].get("index") is None:  # verl gives all of these rows the index 0
            row["index"] = int(item)
        return {name: value for name, value in row.items() if name not in OF_THE_LOOP}

    def _drawn(self, sizes: list[int]) -> list[list[int]] | list[None]:
        """Return the used rows of each file, which are those that verl draws from joined files; None: all rows."""
        total = sum(sizes)
        if not 0 < self.max_samples < total:
            return [None] * len(sizes)
        rows = np.arange(self.max_samples)
        if self.shuffle:
            rows = np.random.default_rng(self.seed).choice(total, size=self.max_samples, replace=False)
        if len(sizes) > 1:
            rows = np.sort(rows)
        bounds = np.cumsum([0, *sizes])
        return [(rows[(rows >= start) & (rows < end)] - start).tolist() for start, end in pairwise(bounds)]


def keep_files_apart(data: DictConfig) -> None:
    """Have verl read `train_files` and `val_files` with `FilesDataset`, unless a class is given."""
    if data.custom_cls.path is None:
        with open_dict(data):
            data.custom_cls = {"path": f"pkg://{__name__}", "name": FilesDataset.__name__}


def with_shares(loader: StatefulDataLoader, data: DictConfig) -> StatefulDataLoader:
    """Return a loader of the training rows that draws by `data.shares`; `loader` is verl's, over a FilesDataset.

    With levels no worker process reads ahead: rows of the level before would come after the next level has begun, and
    after a resume.
    """
    dataset: Any = loader.dataset
    check_sizes(dataset.dataframe.sizes, data)
    return StatefulDataLoader(
        dataset=dataset,
        batch_size=loader.batch_size,
        num_workers=0 if data.get("levels") else loader.num_workers,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        sampler=InShares(dataset.dataframe.sizes, data.shares, data.seed if data.shuffle else None, data.get("levels")),
    )


def gone_on_with(loader: StatefulDataLoader) -> Iterator[Any]:
    """Return an iterator of a loader with a checkpoint's state. Raises ValueError: the state is of another order."""
    try:
        return iter(loader)
    except KeyError:  # torchdata's sampler reads only its own state; `InShares` says itself what is wrong
        raise ValueError(
            "data.shares=null: the checkpoint's order of rows is one of shares; resume with the data.shares of the run"
        ) from None
