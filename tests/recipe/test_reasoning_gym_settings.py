"""`+task=reasoning_gym`: its rows are made before anything starts, and wrong settings are one line."""

from pathlib import Path

import pandas as pd
import pytest

from recipe.fully_async_policy.settings import reasoning_gym
from recipe.fully_async_policy.settings.reasoning_gym import make_files
from tests.recipe.refused import composed, run

pytest.importorskip("reasoning_gym", reason="scripts/test.sh installs requirements/tasks.txt")
pytestmark = pytest.mark.usefixtures("nothing_starts")


@pytest.fixture
def asked(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(reasoning_gym, "FOLDER", tmp_path / "rows")
    return {
        "+task": "reasoning_gym",
        "reasoning_gym.tasks": "{chain_sum: 2, gsm_symbolic: 1}",
        "reasoning_gym.train": "30",
        "reasoning_gym.val": "5",
        "actor_rollout_ref.model.path": str(model_folder),
        "run_dir": f"{tmp_path}/run",
    }


def test_files_of_tasks_with_shares(asked: dict[str, str]) -> None:
    config = composed(asked)
    make_files(config)
    assert (config.data.shares, config.data.levels) == ([2, 1], None)
    frames = [pd.read_parquet(file) for file in config.data.train_files]
    assert [*map(len, frames)] == [30, 30]
    assert [frame["data_source"][0] for frame in frames] == ["reasoning_gym/chain_sum", "reasoning_gym/gsm_symbolic"]
    before = [Path(file).stat().st_mtime_ns for file in config.data.val_files]
    make_files(config)
    assert [Path(file).stat().st_mtime_ns for file in config.data.val_files] == before
    other = composed({**asked, "reasoning_gym.seed": "2"})
    assert not {*other.data.train_files} & {*config.data.train_files}


def test_files_of_a_curriculum(asked: dict[str, str]) -> None:
    difficulty = {"reasoning_gym.difficulty": "{chain_sum: {max_digits: 1}}"}
    config = composed({**asked, **difficulty, "reasoning_gym.levels": "3"})
    assert (config.data.levels, config.data.shares, len(config.data.val_files)) == ([3, 1], [2, 1], 4)
    single = composed({**asked, "reasoning_gym.tasks": "{chain_sum: 1}", "reasoning_gym.levels": "2"})
    assert (single.data.levels, single.data.shares) == ([2], [1])
    single = composed({**asked, "reasoning_gym.tasks": "{chain_sum: 1}"})
    assert (single.data.levels, single.data.shares, len(single.data.train_files)) == (None, None, 1)


def test_a_preset_of_one_task_gets_others(asked: dict[str, str]) -> None:
    more = {"reasoning_gym.tasks": "{gcd: 1}", "reasoning_gym.difficulty": "{chain_sum: {allow_negation: true}}"}
    config = composed({**asked, "+task": "sums", **more})
    assert config.reasoning_gym.tasks == {"chain_sum": 1, "gcd": 1}
    assert config.reasoning_gym.difficulty.chain_sum.allow_negation
    assert config.reasoning_gym.difficulty.chain_sum.max_digits == 1, "the preset's"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"reasoning_gym.tasks": "null"},
            "reasoning_gym.tasks=null: give tasks, each with its share, '{gsm_symbolic: 2",
        ),
        ({"reasoning_gym.tasks": "[chain_sum]"}, "reasoning_gym.tasks=['chain_sum']: give tasks, each with its share"),
        ({"reasoning_gym.tasks": "{chain_sum: 0}"}, "reasoning_gym.tasks={'chain_sum': 0}: give tasks, each with"),
        ({"reasoning_gym.tasks": "{chain_sums: 1}"}, "reasoning_gym.tasks: chain_sums: reasoning-gym has no such task"),
        ({"reasoning_gym.tasks": "{n_queens: 1}"}, "reasoning_gym.tasks: n_queens: its verifier runs the answer as"),
        (
            {"reasoning_gym.difficulty": "{chain_sum: {terms: 3}}"},
            "reasoning_gym.tasks: chain_sum: has no setting terms, but min_terms, max_terms",
        ),
        (
            {"reasoning_gym.difficulty": "{chain_sum: {min_terms: 9}}"},
            "reasoning_gym.tasks: chain_sum: max_terms must be >= min_terms",
        ),
        ({"reasoning_gym.difficulty": "{gcd: {}}"}, "gcd is none of reasoning_gym.tasks"),
        (
            {"reasoning_gym.levels": "2", "reasoning_gym.tasks": "{gsm_symbolic: 1}"},
            "reasoning_gym.levels=2: none of the tasks has a curriculum",
        ),
        ({"reasoning_gym.answer": "last"}, "reasoning_gym.answer=last: choose one of tagged, last_number"),
        ({"reasoning_gym.train": "0"}, "reasoning_gym.train=0: give a whole number of at least 1"),
        ({"data.train_files": "mine.parquet"}, "data.train_files=mine.parquet: reasoning_gym.tasks decides"),
        ({"data.shares": "[1,1]"}, "data.shares=[1, 1]: reasoning_gym.tasks decides"),
    ],
)
def test_what_is_refused(
    asked: dict[str, str], wrong: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in run({**asked, **wrong}, capsys)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"data.levels": "[2]"}, "data.levels=[2]: needs data.shares"),
        ({"data.levels": "[1]", "data.shares": "[1]"}, "data.levels=[1]: its sum has to be the number of data.train_f"),
        ({"data.levels": "[0,2]", "data.shares": "[1,1]"}, "data.levels=[0, 2]: give the number of files of each task"),
        ({"data.levels": "[2]", "data.shares": "[1,1]"}, "data.shares=[1, 1]: give a share for each of the 1 tasks"),
        (
            {"data.levels": "[2]", "data.shares": "[1]", "data.level_mark": "70"},
            "data.level_mark=70: give a share above 0, at most 1",
        ),
    ],
)
def test_levels_of_own_files(
    good: dict[str, str], wrong: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"data.train_files": f"[{good['data.train_files']},{good['data.train_files']}]"}
    assert said in run({**good, **files, **wrong}, capsys)
