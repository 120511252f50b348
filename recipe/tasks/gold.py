"""Responses that a reward should score highly: the ground truth in the forms in which answers are given."""

from typing import Any

from recipe.tasks.countdown import problems
from recipe.tasks.countdown.reward import parse_ground_truth
from recipe.tasks.countdown.solution import solve

FORMS = ("\\boxed{%s}", "#### %s", "<answer>%s</answer>", "%s")


def gold_responses(data_source: Any, ground_truth: Any) -> list[str]:
    """The responses to try, one for each form of an answer; none where the answer cannot be told from the row."""
    answer = ground_truth
    if data_source == problems.DATA_SOURCE:
        answer = solve(*parse_ground_truth(ground_truth))
    if not isinstance(answer, str | int | float):
        return []
    return [form % answer for form in FORMS]
