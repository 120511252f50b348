"""A run of which every part is there: data, model, reward."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config

from recipe.fully_async_policy import main
from recipe.tasks.countdown.problems import Difficulty
from recipe.warm_start.tokenizer import train_tokenizer
from tests.recipe.refused import quick_compose

GOOD_ROW = {
    "prompt": [{"role": "user", "content": "1 + 1"}],
    "data_source": "countdown",
    "reward_model": {"style": "rule", "ground_truth": {"target": 2, "numbers": [1, 1]}},
    "extra_info": {"index": 0},
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a tokenizer; its weights are those of no model."""
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(Difficulty()).save_pretrained(folder)
    Qwen2Config(vocab_size=512, max_position_embeddings=512).save_pretrained(folder)
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def good(tmp_path: Path, model_folder: Path) -> dict[str, str]:
    """Overrides of a run that passes every check of ours."""
    pd.DataFrame([GOOD_ROW] * 16).to_parquet(tmp_path / "train.parquet")
    return {
        "+task": "countdown",
        "data.train_files": f"{tmp_path}/train.parquet",
        "data.val_files": f"{tmp_path}/train.parquet",
        "actor_rollout_ref.model.path": str(shutil.copytree(model_folder, tmp_path / "model")),
        "run_dir": f"{tmp_path}/run",
    }


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that would start fails the test, and so does any process but that of the reward's trial."""

    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("a run would have started")

    real = subprocess.Popen.__init__

    def reward_alone(self: Any, command: Any, *args: Any, **kwargs: Any) -> None:
        of_megatron = command[0] == "git"  # Megatron's version, when it is imported
        assert of_megatron or "verl_vcpo.user_code.killable_process" in command, f"{command} was started"
        real(self, command, *args, **kwargs)

    monkeypatch.setattr(main, "train", refuse)
    monkeypatch.setattr(main, "compose_unchecked", quick_compose)
    monkeypatch.setattr(subprocess.Popen, "__init__", reward_alone)
