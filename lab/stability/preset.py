"""The methods there are, and what all runs of a task begin with: the data and the first policy."""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab.simulator.grid import fingerprint
from recipe.fully_async_policy.settings import method

METHODS = tuple(name for name in method.names() if name not in ("a2c", "tba"))
"""Of the simulator, which has neither a critic nor a reference policy."""
FIRST_POLICIES = Path(__file__).resolve().parents[2] / "docs/measurements/stability/first_policy"


@dataclass(frozen=True)
class BenchTask:
    """What runs are made on."""

    preset: str
    """A file of config/task."""
    data: Path
    model: Path
    """The folders that the preset names."""
    rows: tuple[str, ...]
    """Arguments of scripts.prepare_data."""
    lesson: tuple[str, ...]
    """Arguments of recipe.warm_start.train, beside --data and --out."""

    @property
    def published(self) -> Path:
        """The checkpoint that runs begin with unless told otherwise."""
        return FIRST_POLICIES / self.preset

    @property
    def answers(self) -> str | None:
        """The column with the answers that the first policy is taught; None: the task makes its own."""
        return self.lesson[self.lesson.index("--answers") + 1] if "--answers" in self.lesson else None


# Countdown: a policy that solves half of the problems, by reading them: from one that guesses, RL goes for the sum of
# all numbers, which is right for 46 %, and stays there.
TASKS = {
    "countdown": BenchTask(
        preset="countdown_lag",
        data=Path("data/countdown"),
        model=Path("models/countdown-lag"),
        rows=("countdown",),
        lesson=("--layers", "2", "--heads", "2", "--steps", "900", "--correct-fraction", "0.4", "--samples", "4"),
    ),
    "countdown4": BenchTask(
        preset="countdown4_lag",
        data=Path("data/countdown4"),
        model=Path("models/countdown4-lag"),
        rows=("countdown", "--numbers", "4"),
        lesson=("--layers", "2", "--heads", "2", "--steps", "900", "--correct-fraction", "0.6", "--samples", "4"),
    ),
    "sort_digits": BenchTask(
        preset="sort_digits_lag",
        data=Path("data/sort_digits"),
        model=Path("models/sort-digits-lag"),
        rows=("sort_digits",),
        lesson=(
            *("--layers", "2", "--heads", "2", "--steps", "600", "--correct-fraction", "0.6", "--samples", "4"),
            *("--answers", "reward_model.ground_truth"),
        ),
    ),
}


def prepare(task: BenchTask, new_policy: bool = False) -> None:
    """The data and the first policy that all runs begin with; nothing where they are there.

    Args:
        task: which.
        new_policy: train one, or go on with the one that was trained, instead of taking the published one.

    Raises:
        ValueError: the folder of the first policy holds another one, or it was taught with other data.
    """
    from recipe.warm_start.rows import load_answered_rows
    from recipe.warm_start.train import Lesson, load_held_out
    from recipe.warm_start.train import main as warm_start
    from scripts.prepare_data import main as prepare_data

    if not (task.data / "meta.json").is_file() and prepare_data([*task.rows, "--out", str(task.data)]):
        raise SystemExit(2)
    taught = task.data / "train.parquet" if task.answers else task.data
    if new_policy:
        if warm_start(["--data", str(taught), "--out", str(task.model), *task.lesson]):  # or reuse
            raise SystemExit(2)
        return
    if not task.model.exists():
        _copy(task.published, task.model)
    elif fingerprint(task.model) != fingerprint(task.published):
        raise ValueError(f"{task.model}: not the published first policy; remove it, or go on with it by --new-policy")
    lesson: Lesson = load_answered_rows(taught, task.answers) if task.answers else load_held_out(taught)
    settings = json.loads((task.model / "warm_start.json").read_text())["settings"]
    if any(settings.get(name) != value for name, value in lesson.fingerprint.items()):
        raise ValueError(f"{task.data}: the first policy was taught with other data; remove the folder")


def _copy(source: Path, target: Path) -> None:
    """The whole folder, or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        shutil.copytree(source, Path(scratch) / "new").rename(target)
