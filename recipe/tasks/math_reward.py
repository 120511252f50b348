r"""The reward of an answer in \boxed{}: 1 if it is mathematically equal to the ground truth, else 0."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from recipe.tasks.boxed import last_boxed
from recipe.tasks.verifier import MAX_ANSWER_CHARS, Verdict, compare


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | float,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Score one response by its last \\boxed{...} (verl's custom reward function).

    Returns {"score": 0.0 or 1.0, "acc": the same, "over_limit": 1.0 where the answer was wrong because comparing it
    took too long}. Raises ValueError for a ground truth that cannot be read, RuntimeError where the verifier fails.
    """
    return score_answer(last_boxed(solution_str, MAX_ANSWER_CHARS), ground_truth)


def score_answer(answer: str | None, ground_truth: Any) -> dict[str, float]:
    """The same for an answer that was extracted already; None: there is none. A list's only element is the truth."""
    if not isinstance(ground_truth, str | Real | Mapping) and hasattr(ground_truth, "__len__"):
        ground_truth = ground_truth[0] if len(ground_truth) == 1 else ground_truth  # verl's pages show ["72"]
    if not isinstance(ground_truth, str | Real) or isinstance(ground_truth, bool):
        raise ValueError(f"ground_truth must be text or a number: {ground_truth!r}")
    verdict = Verdict.DIFFERENT if answer is None else compare(str(ground_truth), answer)
    score = float(verdict is Verdict.EQUAL)
    return {"score": score, "acc": score, "over_limit": float(verdict is Verdict.OVER_LIMIT)}
