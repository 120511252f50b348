"""What is said of a run that Ctrl-C has ended."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.fully_async_policy.main import what_is_kept


@pytest.mark.parametrize("lines", [None, "", '{"step": 0, "reward": null}\n'], ids=["no file", "no line", "validated"])
def test_before_the_first_step_no_metrics_were_kept(tmp_path: Path, lines: str | None) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    said = what_is_kept(OmegaConf.create({"run_dir": str(tmp_path)}))
    assert said.startswith("before the first step: no step's metrics") and "keeps" not in said


def test_afterwards_the_steps_that_were_made(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert what_is_kept(OmegaConf.create({"run_dir": str(tmp_path)})).startswith("after step 2; ")
