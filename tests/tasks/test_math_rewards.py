"""The rewards of GSM8K, MATH and tool use, each on a table of answers: right, wrong, badly formed, hostile."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from recipe.tasks import math_reward, reward, verifier
from tests.tasks import scores
from tests.tasks.answers import ENDLESS, ODD

GSM8K_RIGHT = [
    *("She has 9 + 9 = 18.\n#### 18", "#### 18.0", "#### 18.", "####18", "#### $18", "#### 18 dollars"),
    *("#### 18 big red pens.", "#### \\frac{36}{2}", "#### 17\n#### 18", "\\boxed{18}"),
    *("first \\boxed{3}, then \\boxed{18}.", "#### 18\nThat was easy."),
]
GSM8K_WRONG = [
    *("#### 17", "#### -18", "#### 180", "#### 0.18", "#### 18\n#### 17", "\\boxed{18} and then #### 17"),
    *("#### 18/0", "#### 18 + 1"),
]
GSM8K_MALFORMED = [
    *("", "18", "The answer is 18.", "####", "#### ", "#### eighteen point", "# 18", "\\boxed{18", "####\n18"),
]

MATH_RIGHT = [
    *("\\boxed{\\frac{1}{2}}", "\\boxed{0.5}", "\\boxed{1/2}", "\\boxed{\\dfrac{1}{2}}", "\\boxed{\\frac12}"),
    *("\\boxed{ \\frac{2}{4} }", "\\boxed{2^{-1}}", "\\boxed{\\sqrt{0.25}}", "so \\boxed{7}, no: $\\boxed{0.50}$."),
    "\\boxed{\\left(\\frac{1}{2}\\right)}",
]
MATH_WRONG = [
    *("\\boxed{2}", "\\boxed{-\\frac{1}{2}}", "\\boxed{0.51}", "\\boxed{0.5} or \\boxed{1}", "\\boxed{x}"),
    *("\\boxed{\\frac{1}{2}, 1}", "\\boxed{\\text{one half}}", "\\boxed{\\frac{1}{0}}", "\\boxed{\\infty}"),
    "\\boxed{\\emptyset}",
]
MATH_MALFORMED = [
    *("", "0.5", "The answer is 1/2.", "\\boxed{}", "\\boxed{ }", "\\boxed{0.5", "\\boxed 0.5", "boxed{0.5}"),
    *("\\boxed{\\frac{1}{2}", "\\fbox{0.5}"),
]

TOOL_RIGHT = [
    *("```python\nprint(70)\n```\n70\nThe answer is \\boxed{70}.", "\\boxed{070}", "\\boxed{70.0}"),
    *("\\boxed{7 \\cdot 10}", "\\boxed{\\frac{140}{2}}", "\\boxed{m+n = 70}", "\\boxed{70^\\circ}", "\\boxed{70\\%}"),
    "```python\nprint('\\\\boxed{3}')\n```\n\\boxed{3}\n\\boxed{70}",
]
TOOL_WRONG = [
    *("\\boxed{71}", "\\boxed{-70}", "\\boxed{7}", "\\boxed{70, 71}", "\\boxed{70!}", "\\boxed{7000\\%}"),
    *("\\boxed{70} but really \\boxed{0}", "\\boxed{print(70)}"),
]
TOOL_MALFORMED = [
    *("", "70", "Answer: 70", "```python\nprint(70)\n```\n70", "\\boxed{70", "<answer>70</answer>", "\\boxed{}"),
]


def table(right: list[str], wrong: list[str], malformed: list[str]) -> list[tuple[str, float]]:
    return [(text, 1.0) for text in right] + [(text, 0.0) for text in [*wrong, *malformed]]


GSM8K = table(GSM8K_RIGHT, GSM8K_WRONG, GSM8K_MALFORMED)
MATH = table(MATH_RIGHT, MATH_WRONG, MATH_MALFORMED)
TOOL_USE = table(TOOL_RIGHT, TOOL_WRONG, TOOL_MALFORMED)


HOSTILE = {
    "gsm8k": ("#### {}", [*ODD, *ENDLESS]),
    "math-500": ("\\boxed{{{}}}", [*ODD, *ENDLESS]),
    "aime25": ("so \\boxed{{{}}}.", [*ODD, *ENDLESS[:1]]),  # the reward of MATH: the quick ones, and one that is not
}


@pytest.mark.parametrize(("text", "expected"), GSM8K, ids=range(len(GSM8K)))
def test_gsm8k(text: str, expected: float) -> None:
    assert reward.compute_score("gsm8k", text, "18")["score"] == expected


@pytest.mark.parametrize(("text", "expected"), MATH, ids=range(len(MATH)))
def test_math(text: str, expected: float) -> None:
    assert reward.compute_score("math-500", text, "\\frac{1}{2}")["score"] == expected


@pytest.mark.parametrize(("text", "expected"), TOOL_USE, ids=range(len(TOOL_USE)))
def test_tool_use(text: str, expected: float) -> None:
    assert reward.compute_score("aime25", text, "70")["score"] == expected


@pytest.mark.parametrize("data_source", HOSTILE)
def test_hostile(data_source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one is a zero, and the verifier works afterwards."""
    monkeypatch.setattr(verifier, "LIMIT_S", 0.5)
    form, answers = HOSTILE[data_source]
    with ThreadPoolExecutor() as threads:
        texts = [form.format(answer) for answer in answers]
        results = threads.map(lambda text: reward.compute_score(data_source, text, "18"), texts)
        assert [result["score"] for result in results] == [0.0] * len(answers)
    monkeypatch.undo()
    assert reward.compute_score(data_source, form.format("18.0"), "18")["score"] == 1.0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("(1,2)", "(1, 2)"),
        ("x^2+1", "1+x^2"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("\\text{Evelyn}", "Evelyn"),
        ("1,2", "2,1"),
        ("x=5", "5"),
        ("3\\pi", "3 \\pi"),
        ("[1,2)", "[1,2)"),
        ("1,000", "1000"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ],
)
def test_ground_truths_of_many_kinds(truth: str, answer: str) -> None:
    assert math_reward.score_answer(answer, truth)["score"] == 1.0
    assert math_reward.score_answer(f"{answer} + 10^7", truth)["score"] == 0.0


def test_answers_as_people_and_models_write_them() -> None:
    """Right forms that were refused and wrong ones that were accepted, here or elsewhere, and others of their kinds."""
    rows = scores.read_rows()
    with ThreadPoolExecutor(4) as threads:
        given = list(threads.map(scores.score, rows))
    assert [row for row, score in zip(rows, given, strict=True) if row["right"] != score] == []


def test_a_ground_truth_in_a_list_as_verls_pages_have_it() -> None:
    right: list[object] = [["72"], np.array(["72"], dtype=object), ("72",), [72]]
    for truth in right:
        assert reward.compute_score("gsm8k", "#### 72", truth)["score"] == 1.0
    for bad in ([], ["72", "73"], [["72"]]):
        with pytest.raises(ValueError, match="ground_truth must be text or a number"):
            reward.compute_score("gsm8k", "#### 72", bad)


def test_over_the_limit_is_counted_in_the_result() -> None:
    result = reward.compute_score("math", "\\boxed{9^{9^{9^{9}}}}", "18")
    assert result == {"score": 0.0, "acc": 0.0, "over_limit": 1.0}


READY_MADE = {
    "countdown": ({"target": 22, "numbers": [3, 5, 7]}, "<answer>3*5+7</answer>"),
    "math-500": ("\\frac{1}{2}", "\\boxed{0.5}"),
    "dapo_filter": ("34", "\\boxed{34}"),
    "test-math-aime25": ("70", "\\boxed{70}"),
    "deepscaler": ("x+1", "\\boxed{1+x}"),
}


@pytest.mark.parametrize("data_source", READY_MADE)
def test_the_keys_of_the_ready_made_set(data_source: str) -> None:
    truth, right = READY_MADE[data_source]
    assert reward.compute_score(data_source, right, truth) == {"score": 1.0, "acc": 1.0, "over_limit": 0.0}
    assert reward.compute_score(data_source, "I give up", truth) == {"score": 0.0, "acc": 0.0, "over_limit": 0.0}


def test_an_unknown_data_source_is_an_error() -> None:
    with pytest.raises(ValueError, match="data_source='gsm9k' has no reward: use one of calculate, countdown, gsm8k"):
        reward.compute_score("gsm9k", "#### 18", "18")


@pytest.mark.parametrize("truth", ["", None, True, {"target": 1}])
def test_a_bad_ground_truth_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match="ground.truth"):
        reward.compute_score("gsm8k", "#### 18", truth)
