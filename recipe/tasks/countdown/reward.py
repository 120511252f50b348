"""The Countdown reward: 1 for an exact solution, 0 for anything else. Nothing the model writes is ever executed."""

import ast
import re
import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from numbers import Integral
from typing import Any

from recipe.tasks.boxed import last_boxed, last_tagged

# An honest answer over six three-digit numbers needs fewer than 64 characters. Everything longer is rejected unread,
# which bounds the parser's time, its nesting depth and the size of the integers.
MAX_ANSWER_CHARS = 256
MAX_DEPTH = 32
_MOST_FRACTIONS = 8  # inside one another

_ALLOWED_CHARS = frozenset("0123456789+-*/() \t\n")
# How people and models write the same operations.
_OPERATORS = (
    (re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;:! ]|\\[()\[\]]|\$"), " "),
    (re.compile(r"[−–—﹣－]"), "-"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|[×✕✖·⋅∙∗]|(?<=[0-9) ])[xX](?=[0-9( ])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|[÷⁄∕]"), "/"),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"((\1)/(\2))"),
)
_BRACKETS = str.maketrans("[]", "()")


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
    r"""The last <answer>...</answer>, which the prompt asks for; where there is none, the last \boxed{...}; else None.

    Every search is one pass over the text. An answer longer than MAX_ANSWER_CHARS counts as none.
    """
    tagged = last_tagged(text, MAX_ANSWER_CHARS)
    return last_boxed(text, MAX_ANSWER_CHARS) if tagged is None else tagged


def plain_expression(answer: str) -> str:
    r"""The answer with + - * / and parentheses alone: `$3 \times 5$` and `\boxed{3 \cdot 5}` are 3*5."""
    boxed = last_boxed(answer, MAX_ANSWER_CHARS)
    text = answer if boxed is None else boxed
    for pattern, plain in _OPERATORS:
        for _ in range(_MOST_FRACTIONS):
            before, text = text, pattern.sub(plain, text)
            if text == before:
                break
    text = unicodedata.normalize("NFKC", text).translate(_BRACKETS).strip()
    return text.removeprefix("**").removesuffix("**").strip("` \n").removesuffix(".")


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
    """Whether an answer, an expression, has the value `target` and uses each of `numbers` once.

    What may follow after `=` has that value too: `3*5+7 = 15+7 = 22`.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    expression, *results = plain_expression(answer).split("=")
    try:
        value, used = evaluate(expression)
        return sorted(used) == sorted(numbers) and all(v == target for v in (value, *(evaluate(r)[0] for r in results)))
    except MalformedAnswer:
        return False


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
