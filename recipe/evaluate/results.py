"""The results of a followed run's models, one folder each: RUN/evaluations/step_N."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_vcpo.common.whole_file import write_whole
from verl_vcpo.report.run_log import EVALUATIONS_FOLDER, mean_accuracy

RESULT, ANSWERS = "result.json", "answers.json"


@dataclass(frozen=True)
class Evaluation:
    """The result of the policy after a step."""

    step: int
    accuracies: dict[str, float]
    """The share of right answers of each data source, as a run's metrics have them."""
    answers: int
    as_the_run: bool
    """Whether the run's own evaluation would have these settings."""
    settings: dict[str, Any]
    """Those that decide, with their values."""
    model: str
    model_written: int
    """When the model was written, in nanoseconds: a model that was written again has no result."""

    @property
    def accuracy(self) -> float:
        """The mean over the data sources."""
        return mean_accuracy(self.accuracies)


def folder(run: Path, step: int) -> Path:
    """Return the folder of a step's result."""
    return run / EVALUATIONS_FOLDER / f"step_{step}"


def accuracies_of(answers_file: Path) -> tuple[dict[str, float], int]:
    """Return the accuracy of each data source, and the number of answers, of a file of `recipe.evaluate --json`."""
    of_source: dict[str, list[float]] = defaultdict(list)
    for answer in json.loads(answers_file.read_text())["answers"]:
        of_source[answer["data_source"]].append(answer["correct"])
    return {source: sum(c) / len(c) for source, c in sorted(of_source.items())}, sum(map(len, of_source.values()))


def write(result: Evaluation, place: Path) -> Evaluation:
    """Write a result into a folder, and return it."""
    write_whole(place / RESULT, json.dumps(asdict(result), indent=1) + "\n")
    return result


def read(run: Path) -> list[Evaluation]:
    """Return the results in a run's folder, by step. Raises JSONDecodeError and TypeError for other files."""
    found = (run / EVALUATIONS_FOLDER).glob(f"step_*/{RESULT}")
    return sorted((Evaluation(**json.loads(file.read_text())) for file in found), key=lambda result: result.step)
