"""A run of which every part is there: data, model, reward."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
from transformers import Qwen2Config

from recipe.tasks.countdown.problems import Difficulty
from recipe.warm_start.tokenizer import train_tokenizer

GOOD_ROW = {
    "prompt": [{"role": "user", "content": "1 + 1"}],
    "data_source": "countdown",
    "reward_model": {"style": "rule", "ground_truth": {"target": 2, "numbers": [1, 1]}},
    "extra_info": {"index": 0},
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a tokenizer; its weights are a file that nothing reads."""
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(Difficulty()).save_pretrained(folder)
    Qwen2Config(vocab_size=512, max_position_embeddings=512).save_pretrained(folder)
    (folder / "model.safetensors").write_text("weights")
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
