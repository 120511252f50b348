"""docs/guide/own-task.md, followed to the letter: its own commands, in an empty folder."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.kit.small_run import seeds
from verl_vcpo.report.run_log import ANSWERS, read_metrics

pytestmark = pytest.mark.e2e

PAGE = ROOT / "docs" / "guide" / "own-task.md"
STACK = "-m recipe.fully_async_policy.main "
VAL = 256
"""The page's held-out rows, of each of which one response is drawn."""
STEPS = 4
"""Of the run on the real stack, where the page makes as many as the simulator: not fewer than the page's lag."""


def commands() -> list[str]:
    """The page's bash blocks."""
    return re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all commands of the page have run."""
    folder = tmp_path_factory.mktemp("own_task")
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for command in commands():
        if STACK in command:
            command = f"{command.rstrip()} trainer.total_training_steps={STEPS} {' '.join(seeds())}\n"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
    return folder


def test_the_model_learns_the_task(followed: Path) -> None:
    accuracies = [line["val_accuracy"] for line in read_metrics(followed / "outputs" / "sort-simulated")]
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    assert 0.1 < known[0] < 0.6 and known[-1] > known[0] + 0.1, known


def test_the_real_stack_starts_from_the_same_policy_on_the_same_rows(followed: Path) -> None:
    real, simulated = (read_metrics(followed / "outputs" / name) for name in ("sort", "sort-simulated"))
    assert [line["step"] for line in real] == list(range(STEPS + 1))
    assert real[0][ANSWERS] == simulated[0][ANSWERS] == VAL
    accuracy = simulated[0]["val_accuracy"]
    error = math.sqrt(2 * accuracy * (1 - accuracy) / VAL)  # of the difference
    assert abs(real[0]["val_accuracy"] - accuracy) < 5 * error, "as many responses each, drawn"
    assert 0 < real[1]["reward"] < 1 and real[1]["grad_norm"] > 0


def test_what_the_page_looks_at(followed: Path) -> None:
    assert (followed / "outputs" / "sort-report" / "report.html").is_file()
    answers = (followed / "outputs" / "sort" / "answers" / f"{STEPS}.jsonl").read_text().splitlines()
    assert len(answers) == VAL and {"input", "output", "score"} <= json.loads(answers[0]).keys()
