"""A first policy of the warm start's architecture, small and untrained, and a few problems."""

from pathlib import Path

import pytest
import torch

from recipe.tasks.countdown.problems import Difficulty
from recipe.warm_start.model import build_model
from recipe.warm_start.tokenizer import train_tokenizer
from tests.actor.conftest import checkpoints as checkpoints
from tests.actor.conftest import make_engine as make_engine


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ and model/, as scripts.prepare_data and recipe.warm_start.train write them."""
    from scripts.prepare_data import main as prepare_data

    folder = tmp_path_factory.mktemp("assets")
    assert prepare_data(["countdown", "--out", str(folder / "data"), "--train", "32", "--val", "8"]) == 0
    torch.manual_seed(0)
    tokenizer = train_tokenizer(Difficulty())
    model = build_model(tokenizer, layers=2, heads=2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros would hide a mistake
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "warm_start.json").write_text('{"settings": {"seed": 0}}')
    return folder


@pytest.fixture
def overrides(assets: Path, tmp_path: Path) -> list[str]:
    """Settings of a run on `assets` that takes a second."""
    return [
        "+task=countdown_lag",
        "method=vcpo",
        f"data.train_files={assets}/data/train.parquet",
        f"data.val_files={assets}/data/val.parquet",
        f"actor_rollout_ref.model.path={assets}/model",
        f"run_dir={tmp_path}/run",
        "data.train_batch_size=2",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=6",
        "trainer.test_freq=3",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        # the untrained policy solves nothing; digits it can learn
        "reward.custom_reward_function.path=pkg://tests.kit.digits_reward",
    ]


@pytest.fixture
def folder_settings(overrides: list[str]) -> tuple[str, ...]:
    """The settings of `overrides` that all runs of a grid's folder share: task, method and place are each run's."""
    return tuple(setting for setting in overrides if not setting.startswith(("+task", "method", "run_dir")))
