"""The Countdown reward: 1 for an exact solution, 0 for anything else. Nothing the model writes is ever executed."""

import ast
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from numbers import Integral
from typing import Any

from recipe.tasks.boxed import last_boxed

# An honest answer over six three-digit numbers needs fewer than 64 characters. Everything longer is rejected unread,
# which bounds the parser's time, its nesting depth and the size of the integers.
MAX_ANSWER_CHARS = 256
MAX_DEPTH = 32

_ALLOWED_CHARS = frozenset("0123456789+-*/() \t\n")
_OPEN, _CLOSE = "<answer>", "</answer>"


class MalformedAnswer(ValueError):
    """The answer is no plain arithmetic expression, or it has no value (division by zero)."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Score one response (verl's custom reward function).

    solution_str: the decoded response, any string at all; it never raises and costs a few milliseconds at most.
    ground_truth: {"target": int, "numbers": list or array of int}. Raises ValueError if it is not: that is an error
        in the data, and a silent zero would hide it.
    Returns {"score": 0.0 or 1.0, "acc": the same}: verl makes `acc` the main validation metric.
    """
    target, numbers = parse_ground_truth(ground_truth)
    answer = extract_answer(solution_str)
    score = 1.0 if answer is not None and solves(answer, target, numbers) else 0.0
    return {"score": score, "acc": score}


def extract_answer(text: str) -> str | None:
    r"""The last \boxed{...} if its braces close, else the last <answer>...</answer>, else None.

    Every search is one pass over the text. An answer longer than MAX_ANSWER_CHARS counts as none.
    """
    boxed = last_boxed(text, MAX_ANSWER_CHARS)
    if boxed is not None:
        return boxed
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, max(end, 0))
    if start < 0:
        return None
    start += len(_OPEN)
    return text[start:end] if end - start <= MAX_ANSWER_CHARS else None


@lru_cache(maxsize=2**14)  # of a group's answers many are the same
def evaluate(expression: str) -> tuple[Fraction, tuple[int, ...]]:
    """The exact value of the expression and the integers it uses, left to right.

    Only integers, parentheses and the binary + - * / are allowed. Raises MalformedAnswer for anything else.
    """
    if len(expression) > MAX_ANSWER_CHARS or not _ALLOWED_CHARS.issuperset(expression):
        raise MalformedAnswer("too long, or a character that is no part of an arithmetic expression")
    if _depth(expression) > MAX_DEPTH:
        raise MalformedAnswer(f"parentheses nested more than {MAX_DEPTH} deep")
    # Inside parentheses Python, too, ignores line breaks; outside them an answer may still be wrapped.
    flat = " ".join(expression.split())
    try:
        tree = ast.parse(flat, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise MalformedAnswer("not an expression") from error
    used: list[int] = []
    return _value(tree.body, used), tuple(used)


def parse_ground_truth(ground_truth: Mapping[str, Any]) -> tuple[int, list[int]]:
    """(target, numbers) as Python ints. Parquet readers hand back lists, tuples or numpy arrays: all are accepted.

    Raises ValueError if a key is missing or a value is no integer.
    """
    if not isinstance(ground_truth, Mapping) or not {"target", "numbers"} <= set(ground_truth):
        raise ValueError(f"countdown ground_truth must be {{'target': int, 'numbers': [int, ...]}}: {ground_truth!r}")
    target, numbers = ground_truth["target"], ground_truth["numbers"]
    if isinstance(numbers, str | bytes | Mapping) or not hasattr(numbers, "__iter__"):
        raise ValueError(f"countdown ground_truth['numbers'] must be a list of integers: {numbers!r}")
    numbers = list(numbers)
    if not numbers or not all(_is_integer(value) for value in [target, *numbers]):
        raise ValueError(f"countdown ground_truth must hold integers, and at least one number: {ground_truth!r}")
    return int(target), [int(number) for number in numbers]


def solves(answer: str, target: int, numbers: list[int]) -> bool:
    """Whether an answer, an expression, has the value `target` and uses each of `numbers` once."""
    try:
        value, used = evaluate(answer)
    except MalformedAnswer:
        return False
    return value == target and sorted(used) == sorted(numbers)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Exact value of a syntax tree; appends its integers to `used`. Recursion is bounded by the answer's length."""
    # `type(...) is int`: True and False are integers to isinstance.
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise MalformedAnswer(f"{type(node).__name__} is not allowed")
    left, right = _value(node.left, used), _value(node.right, used)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div() if right != 0:
            return left / right
        case ast.Div():
            raise MalformedAnswer("division by zero")
        case _:
            raise MalformedAnswer(f"operator {type(node.op).__name__} is not allowed")


def _depth(expression: str) -> int:
    """The deepest nesting of parentheses."""
    depth = deepest = 0
    for character in expression:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
