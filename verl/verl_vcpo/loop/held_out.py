"""Means over held-out answers whose rewards have different keys (extends verl/trainer/ppo/v1/trainer_base.py).

verl's statistics are of a prompt's answers: a prompt with three values of a metric is in `mean@3`, one with four in
`mean@4`; a vote of the answers that have a `pred` leaves out the other prompts; a text among numbers ends the run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from verl_vcpo.common.held_folders import checked
from verl_vcpo.user_code.reward_function import PRED


class HeldOutTrainer(PPOTrainerSeparateAsync):
    """verl's trainer, whose validation has a metric's mean over the answers that have the metric."""

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: Mapping[str, list[Any]],
        *more: Any,
        **named: Any,
    ) -> dict[str, float]:
        whole, means = apart(data_sources, sample_uids, reward_extra_infos_dict)
        metrics: dict[str, float] = super()._val_metrics_update(data_sources, sample_uids, whole, *more, **named)
        return metrics | means

    @staticmethod
    def _write_generations(*generations: Any) -> None:
        """Write the answers of a step below `trainer.validation_data_dir` or `rollout_data_dir`, in a thread."""
        *_, folder, _ = generations
        checked(folder)
        PPOTrainerSeparateAsync._write_generations(*generations)


def apart(
    sources: Sequence[str], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Separate what verl's statistics can be of from what some answers of a data source do not have.

    Args:
        sources: the data source of each of N answers.
        prompts: the prompt of each.
        columns: name -> what the rewards of the answers have under this name: a number, a text, or None.

    Returns:
        The columns, with None where a data source has the name in some answers alone; and the means of the numbers
        there, under verl's names of metrics.
    """
    whole = {name: list(values) for name, values in columns.items()}
    means = {}
    for source in dict.fromkeys(sources):
        rows = [row for row, of in enumerate(sources) if of == source]
        samples = max(Counter(prompts[row] for row in rows).values())
        for name, values in columns.items():
            numbers = [values[row] for row in rows if isinstance(values[row], Real)]
            votes = name == PRED and all(isinstance(values[row], str) for row in rows)
            if votes or len(numbers) == len(rows):
                continue
            for row in rows:
                whole[name][row] = None
            if numbers:
                means[f"val-aux/{source}/{name}/mean@{samples}"] = sum(numbers) / len(numbers)
    return whole, means
