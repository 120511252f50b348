"""The published GPU hours beside forecasts from a data sheet (arXiv 2602.17616, its table of tasks)."""

from dataclasses import dataclass
from typing import Any

from lab.planner.answers import forecast
from lab.planner.device import guess
from lab.planner.rates import Layout
from recipe.fully_async_policy.plan.model_shape import KNOWN_SHAPES


@dataclass(frozen=True)
class PublishedTask:
    """A row of the paper's table, and the sizes of this repository's launch script for the task."""

    task: str
    lag: int
    synchronous: tuple[float, int]
    """GPU hours and steps at lag 0."""
    with_lag: tuple[float, int]
    batch: int
    longest: int
    """Of a response; its mean, which the paper does not give, is guessed to be a third of that."""
    gpus_of_side: int
    """Of the trainer, all in one replica of the model, and of the samplers."""


TASKS = (
    PublishedTask("Countdown", 10, (143.2, 400), (89.6, 400), batch=32, longest=1024, gpus_of_side=4),
    PublishedTask("MATH-500", 10, (134.4, 400), (92.8, 400), batch=32, longest=2048, gpus_of_side=4),
    PublishedTask("AIME 2025", 2, (420.2, 300), (168.9, 220), batch=128, longest=12288, gpus_of_side=2),
)
_DEVICE, _SAMPLES, _PROMPT = "h100", 16, 200
_GPUS_OF_SAMPLER = 2


def published() -> list[dict[str, Any]]:
    """Per task: GPU hours of a step as published, their ratio, and the ratio that the planner guesses."""
    rows = []
    for task in TASKS:
        rates = guess(
            KNOWN_SHAPES["Qwen2.5-7B"],
            _DEVICE,
            batch=task.batch,
            samples=_SAMPLES,
            prompt_tokens=_PROMPT,
            response_tokens=task.longest / 3,
            longest=task.longest,
            trainer_unit=task.gpus_of_side,
            sampler_gpus=_GPUS_OF_SAMPLER,
        )
        layouts = (Layout(task.gpus_of_side, task.gpus_of_side, lag) for lag in (0, task.lag))
        steps = [forecast(rates, layout, task.with_lag[1]).step_s for layout in layouts]
        hours = [cost / count for cost, count in (task.synchronous, task.with_lag)]
        rows.append(
            {
                "task": task.task,
                "lag": task.lag,
                "synchronous_hours": hours[0],
                "lag_hours": hours[1],
                "ratio": hours[0] / hours[1],
                "forecast_ratio": steps[0] / steps[1],
            }
        )
    return rows
