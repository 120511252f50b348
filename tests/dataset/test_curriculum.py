"""`data.levels`: rows come from the level of each task, which rises by its answers, and is kept by a checkpoint."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import DictConfig, OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.dataset.rl_dataset import collate_fn

from verl_vcpo.dataset.curriculum import Curriculum
from verl_vcpo.dataset.files import gone_on_with, keep_files_apart, with_shares
from verl_vcpo.report.trajectory_metrics import FewFields

NAMES = ("easy", "middle", "hard", "other")


@pytest.fixture
def data(tmp_path: Path) -> DictConfig:
    """A task of three levels, and one of a single level, which gets a third of the prompts."""
    for name in NAMES:
        frame = pd.DataFrame({"data_source": [name] * 12})
        frame["prompt"] = [[{"role": "user", "content": f"{name} {row}"}] for row in range(12)]
        frame["reward_model"] = [{"ground_truth": row} for row in range(12)]
        frame["extra_info"] = [{"index": f"{name}/{row}"} for row in range(12)]
        frame.to_parquet(tmp_path / f"{name}.parquet")
    return OmegaConf.create(
        {
            "train_files": [f"{tmp_path}/{name}.parquet" for name in NAMES],
            "val_files": f"{tmp_path}/easy.parquet",
            "shares": [2, 1],
            "levels": [3, 1],
            "level_mark": 0.75,
            "level_answers": 8,
            "seed": 3,
            "shuffle": True,
            "prompt_key": "prompt",
            "filter_overlong_prompts": False,
            "custom_cls": {"path": None, "name": None},
        }
    )


def made_of(data: DictConfig, workers: int = 0) -> tuple[StatefulDataLoader, Curriculum]:
    keep_files_apart(data)
    dataset: Any = create_rl_dataset(data.train_files, data, None, None)
    plain = StatefulDataLoader(dataset, batch_size=1, num_workers=workers, drop_last=True, collate_fn=collate_fn)
    loader = with_shares(plain, data)
    return loader, Curriculum(dataset.dataframe.tables, loader.sampler, data)


def names(rows: Any, count: int) -> list[str]:
    return [next(rows)["data_source"][0] for _ in range(count)]


def answers(name: str, right: int, wrong: int) -> list[tuple[str, float]]:
    return [(f"{name}/0", 1.0)] * right + [(f"{name}/0", 0.0)] * wrong


def test_a_level_begins_where_enough_answers_are_right(data: DictConfig) -> None:
    loader, curriculum = made_of(data)
    rows = iter(loader)
    assert sorted(names(rows, 6)) == ["easy"] * 4 + ["other"] * 2
    assert curriculum.look_at(answers("easy", 7, 0)) == [], "fewer than data.level_answers"
    assert curriculum.look_at(answers("other", 20, 0)) == [], "there is no further level"
    assert curriculum.look_at(answers("easy", 0, 3)) == []
    (said,) = curriculum.look_at(answers("easy", 6, 0))
    assert said.startswith("level 2 of 3 begins, ") and "middle.parquet: 75% of the last answers" in said
    assert curriculum.levels == [2, 1]
    assert sorted(names(rows, 6)) == ["middle"] * 4 + ["other"] * 2
    assert curriculum.look_at(answers("easy", 20, 0)) == [], "late answers of the level before do not count"
    curriculum.look_at(answers("middle", 8, 0))
    assert curriculum.look_at(answers("hard", 20, 0)) == [] and curriculum.levels == [3, 1]
    assert sorted(names(rows, 3)) == ["hard", "hard", "other"]


@pytest.mark.parametrize("workers", [0, 2, 8])
def test_a_resumed_run_goes_on_at_its_levels(data: DictConfig, tmp_path: Path, workers: int) -> None:
    """No row of an earlier level follows, neither after a level has begun nor after a resume."""
    loader, curriculum = made_of(data, workers)
    rows = iter(loader)
    names(rows, 5)
    curriculum.look_at(answers("easy", 8, 0))
    assert set(names(rows, 6)) == {"middle", "other"}
    curriculum.look_at(answers("middle", 7, 0))
    curriculum.write(tmp_path)
    state = loader.state_dict()
    expected = [next(rows)["index"][0] for _ in range(9)]

    again, resumed = made_of(data, workers)
    again.load_state_dict(state)
    rows = gone_on_with(again)
    resumed.resume(tmp_path)
    assert resumed.levels == [2, 1]
    assert [next(rows)["index"][0] for _ in range(9)] == expected
    assert resumed.look_at(answers("middle", 1, 0)), "the answers before the checkpoint count"


def test_a_checkpoint_of_other_levels_is_refused(data: DictConfig, tmp_path: Path) -> None:
    _, curriculum = made_of(data)
    curriculum.look_at(answers("easy", 8, 0))
    curriculum.write(tmp_path)
    data.levels, data.shares = [1, 3], [1, 1]
    _, other = made_of(data)
    with pytest.raises(ValueError, match=r"data.levels=\[1, 3\]: the checkpoint is at \[1, 0\]"):
        other.resume(tmp_path)


def test_rows_that_cannot_be_told_apart(data: DictConfig) -> None:
    data.train_files[1] = data.train_files[0]
    with pytest.raises(ValueError, match=r"data\.levels: rows have the same extra_info\.index"):
        made_of(data)


def test_what_is_right() -> None:
    fields = [{"reward_extra_info": {"acc": 1.0}, "raw_reward": 0.3}, {"raw_reward": 0.5}]
    assert FewFields([0, 1], [2, 2], fields, ["a", "b"]).right() == [1.0, 0.5]
