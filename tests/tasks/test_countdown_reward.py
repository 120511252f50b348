"""The Countdown reward: exact, strict, unbreakable and quick."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.tasks.countdown.reward import MAX_ANSWER_CHARS, compute_score, extract_answer

TRUTH = {"target": 22, "numbers": [3, 5, 7]}


def score(answer: str, truth: dict = TRUTH) -> float:
    """The score of an answer inside its tags."""
    return compute_score("countdown", f"<answer>{answer}</answer>", truth)["score"]


@pytest.mark.parametrize(
    "answer", ["3*5+7", "7+3*5", " ( 3 * 5 ) + 7 ", "7+\n(5*3)", "((((7))))+((5)*(3))", "3*5+7=22", "3×5+7", "３*5+7"]
)
def test_right(answer: str) -> None:
    assert score(answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        *("3*5+7,", r"3*5+7 = \boxed{22}", "3*5+7 = 22.0", "3*5+7==22", "3*5+7 = 22,", "(3*5+7 = 22)", "{3*5}+7"),
        *(r"7+\bigl(3*5\bigr)", r"3\*5+7", r"3*5\quad+7", "```python\n3*5+7\n```", '"3*5+7"', r"\text{3*5+7}"),
        *(
            "3\u200b*5+7",
            "3*5+7<|im_end|>",
            "3*5+7 = **22**",
            "𝟑*5+7",
            r"the \boxed{3*5+7}",
            "(3*5)+7 = -3+25 = (22)",
        ),
    ],
)
def test_right_as_models_write_it(answer: str) -> None:
    assert score(answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "target", "numbers", "right"),
    [
        *(
            ("2-5+10 = -3+10 = 7", 7, [2, 5, 10], 1),
            ("10+(2-5)=10+(-3)=7", 7, [2, 5, 10], 1),
            ("2-5 = -3", -3, [2, 5], 1),
        ),
        *((r"\cfrac{8}{3-\frac83}", 24, [3, 3, 8, 8], 1), ("5/2*4 = 2.5*4 = 10", 10, [5, 2, 4], 1)),
        *(("5-(-2)", 7, [5, 2], 0), ("-2+5", 3, [2, 5], 0), ("2-5 = 3", -3, [2, 5], 0), ("2.5*4", 10, [2, 5, 4], 0)),
        *(
            ("1²*1", 12, [12, 1], 0),
            ("8²-2-71", 9, [82, 2, 71], 0),
            ("1①", 11, [11], 0),
            ("8<sup>2</sup>", 82, [82], 0),
        ),
        *((r"\sqrt{9}", 9, [9], 0), (r"\boxed{1}2", 12, [12], 0), ("(1+2)*(3=9)", 9, [1, 2, 3], 0), ("1½", 1, [1], 0)),
    ],
)
def test_results_and_glued_digits(answer: str, target: int, numbers: list[int], right: int) -> None:
    assert score(answer, {"target": target, "numbers": numbers}) == right


def test_arithmetic_is_exact() -> None:
    assert score("8/(3-8/3)", {"target": 24, "numbers": [3, 3, 8, 8]}) == 1.0
    # In floating point this is 1.
    big = 10**20
    assert score(f"({big}+1)/{big}", {"target": 1, "numbers": [1, big, big]}) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        *("3+5+7", "22", "3*5+7+7-7", "3*5", "35-13", "3*5+7=23", "22=3*5+7"),  # another value, or other numbers
        *("", " ", "3*5+7=", "3*5--7", "+3*5+7", "3*5+7.0", "3*5+0x7", "3*5+07", "3**5+7", "3//5+7"),
        *("3*5+7*", "(3,5,7)", "3(5)+7", "3 5 7", "(3*5+7", "3*5+7)", "3*5+7#", "True*3*5+7"),
        *("__import__('os')", "(lambda: 22)()", "7/(5-5)", "3/0"),
    ],
)
def test_wrong(answer: str) -> None:
    assert compute_score("countdown", f"<answer>{answer}</answer>", TRUTH) == {"score": 0.0, "acc": 0.0}


def test_division_by_zero_with_the_right_numbers() -> None:
    assert score("3/(5-5)", {"target": 1, "numbers": [3, 5, 5]}) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no answer", None),
        ("<answer>1+2", None),
        ("1+2</answer>", None),
        ("</answer><answer>", None),
        ("<answer>1</answer> no, <answer>2</answer> then", "2"),
        ("<answer><answer>2</answer>", "2"),
        (r"<answer>1</answer> \boxed{2}", "1"),
        (r"\boxed{2} <answer>1</answer>", "1"),
        (r"<answer>1</answer> \boxed{}", "1"),
        ("<answer>1</answer> </answer> <answer>", "1"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{a{b}c} }", "a{b}c"),
        (r"<answer>1</answer> \boxed{2", "1"),
        (r"\boxed{" + "1" * (MAX_ANSWER_CHARS + 1) + "}", None),
        ("<answer>" + "1" * (MAX_ANSWER_CHARS + 1) + "</answer>", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("numbers", [[3, 5, 7], (3, 5, 7), np.array([7, 5, 3]), np.array([3, 5, 7], dtype=object)])
def test_numbers_as_any_parquet_reader_gives_them(numbers) -> None:
    assert score("3*5+7", {"target": np.int64(22), "numbers": numbers}) == 1.0


@pytest.mark.parametrize(
    "truth",
    [
        *(None, "22", {}, {"target": 22}),
        *({"target": target, "numbers": [1]} for target in (None, 22.0, True)),
        *({"target": 22, "numbers": numbers} for numbers in (None, [], "357", [3, "5"])),
    ],
)
def test_a_malformed_ground_truth_is_an_error(truth) -> None:
    with pytest.raises(ValueError, match="ground_truth"):
        compute_score("countdown", "<answer>1</answer>", truth)


@given(st.text(st.characters(codec=None)) | st.text("0123456789+-*/() \n"))
@settings(max_examples=500, deadline=None)
def test_no_text_raises(text: str) -> None:
    for response in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}"):
        assert compute_score("countdown", response, TRUTH)["score"] in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    ["(" * 100_000 + ")" * 100_000, "9" * MAX_ANSWER_CHARS, "*".join(["99"] * (MAX_ANSWER_CHARS // 3)), "9**9**9**9"],
    ids=["deep", "integer", "product", "powers"],
)
def test_hostile_text_is_cheap(text: str) -> None:
    """tests/tasks/test_linear_time.py has texts that are long."""
    start = time.thread_time()  # other processes on the same machine take nothing of it
    assert compute_score("countdown", f"<answer>{text}</answer>", TRUTH)["score"] == 0.0
    assert time.thread_time() - start < 0.2
