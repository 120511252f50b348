"""A run that is resumed trains on the same prompts and takes the same steps as one that was never stopped."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, metrics, overrides

pytestmark = pytest.mark.e2e

STEPS, STOPPED_AFTER = 4, 2


def train(assets: Path, run_dir: Path, *settings: str) -> None:
    command = [sys.executable, "-m", "recipe.fully_async_policy.main", *overrides(assets, run_dir), "async.lag=0"]
    fixed = [
        "async.deterministic=true",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STOPPED_AFTER}",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
    ]
    subprocess.run([*command, *fixed, *settings], cwd=ROOT, check=True, capture_output=True, timeout=400)


def test_at_lag_0_stopped_and_resumed_is_the_same_run(assets: Path, tmp_path: Path) -> None:
    train(assets, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "checkpoints", tmp_path / "resumed" / "checkpoints")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"global_step_{STEPS}")
    # as if the process had been killed after it had written a later step's line, and the next one half
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "resumed" / "metrics.jsonl").write_text("".join(lines[: STOPPED_AFTER + 1]) + lines[-1][:40])
    train(assets, tmp_path / "resumed", "trainer.resume_mode=auto")

    whole, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "resumed")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    rows = [row for line in resumed for row in line["trained_rows"]]
    assert len(rows) == len(set(rows)) == STEPS * 4
    for a, b in zip(whole, resumed, strict=True):
        for name in ("trained_rows", "reward"):
            assert a[name] == b[name], (name, a["step"])
        for name in ("grad_norm", "baseline", "ess_ratio"):  # of step 4: the parameters after step 3
            assert a[name] == pytest.approx(b[name], rel=1e-5), (name, a["step"])
