"""Data and a small model, made by the project's own commands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# 4 prompts x 4 samples a step: small enough for seconds, large enough for groups with unequal rewards.
SMALL = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=3"]


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/{train,val}.parquet and model/, a warm start of a few steps."""
    folder = tmp_path_factory.mktemp("assets")
    for command in (
        ["scripts.prepare_data", "countdown", "--out", f"{folder}/data", "--train", "64", "--val", "16"],
        ["recipe.warm_start.train", "--data", f"{folder}/data", "--out", f"{folder}/model", "--steps", "20"],
    ):
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, capture_output=True)
    return folder


def overrides(assets: Path, run_dir: Path) -> list[str]:
    """The countdown preset on these assets, small."""
    return [
        "+task=countdown",
        f"data.train_files={assets}/data/train.parquet",
        f"data.val_files={assets}/data/val.parquet",
        f"actor_rollout_ref.model.path={assets}/model",
        f"run_dir={run_dir}",
        f"reward.custom_reward_function.path={ROOT}/tests/e2e/digits_reward.py",
        *SMALL,
    ]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
