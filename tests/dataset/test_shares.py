"""`data.shares` in verl's own loader: exact shares, every row of a file in turn, the same order after a resumption."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import DictConfig, OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

from verl_vcpo.dataset.files import FilesDataset, gone_on_with, keep_files_apart, with_shares
from verl_vcpo.dataset.shares import InShares

SIZES = (40, 12)


@pytest.fixture
def data(tmp_path: Path) -> DictConfig:
    """Two files: numbers are the truth of one, records of the other, which alone has a column `answer`."""
    files = []
    for name, size in zip(("sums", "games"), SIZES, strict=True):
        frame = pd.DataFrame({"data_source": [name] * size})
        frame["prompt"] = [[{"role": "user", "content": f"{name} {row}"}] for row in range(size)]
        truths = range(size) if name == "sums" else [{"target": row, "numbers": [row]} for row in range(size)]
        frame["reward_model"] = [{"ground_truth": truth} for truth in truths]
        frame["extra_info"] = [{"index": row} for row in range(size)]
        if name == "games":
            frame["answer"] = "yes"
        frame.to_parquet(tmp_path / f"{name}.parquet")
        files.append(str(tmp_path / f"{name}.parquet"))
    return OmegaConf.create(
        {
            "train_files": files,
            "val_files": files[0],
            "shares": [0.75, 0.25],
            "seed": 3,
            "shuffle": True,
            "prompt_key": "prompt",
            "filter_overlong_prompts": False,
            "custom_cls": {"path": None, "name": None},
        }
    )


def dataset_of(data: DictConfig, most: int = -1) -> Any:
    keep_files_apart(data)
    return create_rl_dataset(data.train_files, data, None, None, max_samples=most)


def loader_of(data: DictConfig, workers: int = 0) -> StatefulDataLoader:
    """As verl makes it, then with shares."""
    plain = StatefulDataLoader(
        dataset_of(data), batch_size=1, num_workers=workers, drop_last=True, collate_fn=collate_fn
    )
    return with_shares(plain, data)


def drawn(batches: Any) -> list[tuple[str, int]]:
    return [(row["data_source"][0], row["index"][0]) for row in batches]


def test_a_pass_has_exact_shares_and_the_next_goes_on(data: DictConfig) -> None:
    loader = loader_of(data)
    rows = drawn(loader)
    assert len(rows) == sum(SIZES)
    names = [name for name, _ in rows]
    for n in range(1, len(rows) + 1):
        assert abs(names[:n].count("games") - n / 4) < 1
    assert all(names[n : n + 4].count("games") == 1 for n in range(0, len(rows), 4))
    rows += drawn(loader)
    for name, size in zip(("sums", "games"), SIZES, strict=True):
        indices = [index for of, index in rows if of == name]
        first, second = indices[:size], indices[size : 2 * size]
        assert sorted(first) == list(range(size)), "every row before one comes again"
        assert len(set(second)) == len(second) and second != first[: len(second)] != list(range(size))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("after", [17, sum(SIZES)])
def test_resumed_it_is_the_same_order(data: DictConfig, workers: int, after: int) -> None:
    def some(loader: StatefulDataLoader, count: int) -> list[tuple[str, int]]:
        rows, batches = [], iter(loader)
        for _ in range(count):
            batch = next(batches, None)
            if batch is None:  # as verl begins an epoch
                batches = iter(loader)
                batch = next(batches)
            rows += drawn([batch])
        return rows

    whole = some(loader_of(data), after + 60)
    stopped = loader_of(data, workers)
    assert some(stopped, after) == whole[:after]
    resumed = loader_of(data, workers)
    resumed.load_state_dict(stopped.state_dict())
    assert some(resumed, 60) == whole[after:]


def test_a_checkpoint_without_shares_and_one_with_shares(data: DictConfig) -> None:
    def plain() -> StatefulDataLoader:
        rows = dataset_of(data)
        return StatefulDataLoader(rows, collate_fn=collate_fn, sampler=create_rl_sampler(data, rows))

    mixed = loader_of(data)
    for begun, other, expected in (
        (
            mixed,
            plain(),
            "data.shares=null: the checkpoint's order of rows is one of shares; resume with the data.shar",
        ),
        (plain(), mixed, "data.shares: the checkpoint's order of rows is of no files with shares, not of 2; resume"),
    ):
        next(iter(begun))
        other.load_state_dict(begun.state_dict())
        with pytest.raises(ValueError, match=expected):
            gone_on_with(other)


def test_a_file_without_rows(data: DictConfig) -> None:
    data.train_max_samples, data.max_prompt_length = 1, 8
    loader = StatefulDataLoader(dataset_of(data, most=1), batch_size=1)
    with pytest.raises(ValueError, match=r"data.train_max_samples=1 .* leave no row of .*.parquet; raise them, or"):
        with_shares(loader, data)


def test_other_shares_hold_from_the_resumption_on(data: DictConfig) -> None:
    order = InShares(SIZES, [0.5, 0.5], seed=1)
    before = iter(order)
    for _ in range(20):
        next(before)
    other = InShares(SIZES, [9, 1], seed=1)
    rows = iter(other)
    rows.load_state_dict(before.state_dict())
    assert other.drawn == [10, 10]
    later = [next(rows) >= SIZES[0] for _ in range(20)]
    assert later.count(True) == 2, "what was drawn before is not made up for"
    with pytest.raises(ValueError, match=r"data.shares: .* of 2 files with shares, not of 3"):
        iter(InShares((1, 1, 1), [1, 1, 1], seed=1)).load_state_dict(before.state_dict())


def test_three_tasks_have_their_shares() -> None:
    rows = iter(InShares((100, 100, 100), [5, 3, 2], seed=None))
    drawn_of = [next(rows) // 100 for _ in range(100)]
    assert [drawn_of.count(task) for task in range(3)] == [50, 30, 20]


def test_rows_are_those_of_verls_dataset(data: DictConfig) -> None:
    """Of files that verl can join too; and where rows are drawn of all, the same."""
    data.train_files = [data.train_files[0]] * 2
    for most in (-1, 30):
        rows, joined = dataset_of(data, most), RLHFDataset(data.train_files, None, data, max_samples=most)
        assert isinstance(rows, FilesDataset) and len(rows) == len(joined)
        assert sorted(row["index"] for row in rows) == sorted(row["index"] for row in joined)


def test_rows_of_other_columns(data: DictConfig) -> None:
    rows = dataset_of(data)
    first, last = rows[0], rows[len(rows) - 1]
    assert first.keys() == last.keys() and (first["answer"], last["answer"]) == (None, "yes")
    assert first["reward_model"]["ground_truth"] == 0
    assert last["reward_model"]["ground_truth"] == {"target": 11, "numbers": [11]}


def test_a_json_file_of_any_rows(data: DictConfig, tmp_path: Path) -> None:
    """A column of two types, rows without an index, and columns that verl's workers would take for their own."""
    rows = [
        {"prompt": [], "data_source": "a", "reward_model": {"ground_truth": truth}, "answer": "2020-01-01"}
        for truth in (1, "a", {"b": [10**25]})
    ]
    rows[1] |= {"priority": "high", "validate": True, "extra_info": {"index": "one"}, "agent_name": "single_turn_agent"}
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    for files, first in ((str(file), 0), ([data.train_files[0], str(file)], SIZES[0])):
        data.train_files, data.custom_cls = files, {"path": None, "name": None}
        read = [dataset_of(data)[first + number] for number in range(3)]
        assert [row["reward_model"]["ground_truth"] for row in read] == [1, "a", {"b": [10**25]}]
        assert [row["index"] for row in read] == [first, "one", first + 2] and read[0]["answer"] == "2020-01-01"
        assert not read[1].keys() & {"priority", "validate", "agent_name"}
