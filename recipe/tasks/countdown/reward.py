"""The Countdown reward: 1 for an exact solution, 0 for anything else. Nothing the model writes is ever executed."""

import ast
import re
import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from numbers import Integral
from typing import Any

from recipe.tasks.boxed import last_boxed, last_tagged

# An honest answer over six three-digit numbers needs fewer than 64 characters. Everything longer is rejected unread,
# which bounds the parser's time, its nesting depth and the size of the integers.
MAX_ANSWER_CHARS = 256
MAX_DEPTH = 32
_MOST_FRACTIONS = 8  # inside one another

_ALLOWED_CHARS = frozenset("0123456789+-*/() \t\n")
_OF_RESULTS = _ALLOWED_CHARS | {"."}
# How people and models write the same operations.
_OPERATORS = (
    (re.compile(r"<[^<>\s\d]+>"), " "),  # a model's special tokens, and tags
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|[a-z]+style|(?:text|math)[a-z]*|boxed|q?quad)(?![A-Za-z])"), " "),
    (re.compile(r"\\[,;:! ()\[\]]|\$"), " "),
    (re.compile(r"\\(?=[^A-Za-z0-9\s\\])"), ""),  # Markdown's escapes
    (re.compile(r"[−–—﹣－]"), "-"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|[×✕✖·⋅∙∗]|(?<=[0-9) ])[xX](?=[0-9( ])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|[÷⁄∕]"), "/"),
    (re.compile(r"\\[cdt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))"), r"((\1\2)/(\3\4))"),
)
_BRACKETS = str.maketrans("[]{}", "()()")
_QUOTES, _END_MARKS = "`\"'“”‘’_", ".,;:!"
_CODE_BLOCK = re.compile(r"\A`{3,}\w*[ \t]*\n")
_EMPHASIS = re.compile(r"\A(\*{1,3})(.*)\1\Z", re.DOTALL)
_RESULT = re.compile(r"=+")
_NOT_IN_LINE = ("<super>", "<sub>", "<circle>")


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
    r"""The answer with + - * / and parentheses alone: `$3 \times 5$` and `\boxed{3 \cdot 5}` are 3*5, or (3*5)."""
    text = "".join(c for c in answer if unicodedata.category(c) != "Cf")  # invisible
    for pattern, plain in _OPERATORS:
        for _ in range(_MOST_FRACTIONS):
            before, text = text, pattern.sub(plain, text)
            if text == before:
                break
    return _bare("".join(map(_in_line, _bare(text))).translate(_BRACKETS))


@lru_cache(maxsize=2**14)  # of a group's answers many are the same
def evaluate(expression: str, is_result: bool = False) -> tuple[Fraction, tuple[int, ...]]:
    """The exact value of the expression and the integers it uses, left to right.

    Only integers, parentheses and the binary + - * / are allowed; in a result decimals and signs too. Raises
    MalformedAnswer for anything else.
    """
    allowed = _OF_RESULTS if is_result else _ALLOWED_CHARS
    if len(expression) > MAX_ANSWER_CHARS or not allowed.issuperset(expression):
        raise MalformedAnswer("too long, or a character that is no part of an arithmetic expression")
    if max(_depths(expression), default=0) > MAX_DEPTH:
        raise MalformedAnswer(f"parentheses nested more than {MAX_DEPTH} deep")
    # Inside parentheses Python, too, ignores line breaks; outside them an answer may still be wrapped.
    flat = " ".join(expression.split())
    try:
        tree = ast.parse(flat, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise MalformedAnswer("not an expression") from error
    used: list[int] = []
    return _value(tree.body, used, is_result), tuple(used)


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

    What may follow after `=` has that value too: `3*5+7 = 15+7 = 22`. If the answer holds a box,
    what is in the box may be the expression.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    candidates = dict.fromkeys(text for text in (answer, last_boxed(answer, MAX_ANSWER_CHARS)) if text is not None)
    return any(_solves(plain_expression(text), target, numbers) for text in candidates)


def _solves(equation: str, target: int, numbers: list[int]) -> bool:
    expression, *results = map(_bare, _RESULT.split(equation))
    try:
        value, used = evaluate(expression)
        values = [value, *(evaluate(result, is_result=True)[0] for result in results)]
    except MalformedAnswer:
        return False
    return sorted(used) == sorted(numbers) and all(one == target for one in values)


def _bare(text: str) -> str:
    """The text without the quotes, emphasis, block of code or pair of parentheses around it, and marks at its end."""
    before = None
    while text != before:
        before = text
        text = _CODE_BLOCK.sub("", text.strip()).strip(_QUOTES).rstrip(_END_MARKS)
        text = _EMPHASIS.sub(r"\2", text)
        if text[:1] == "(" and text[-1:] == ")" and min(_depths(text[:-1])) > 0:
            text = text[1:-1]
    return text


def _in_line(character: str) -> str:
    """The usual form of a wide, small or bold character; a raised digit is no digit of the number before it."""
    tag = unicodedata.decomposition(character).split(" ")[0]
    usual = unicodedata.normalize("NFKC", character)
    return character if tag in _NOT_IN_LINE or len(usual) > 1 else usual


def _value(node: ast.expr, used: list[int], is_result: bool) -> Fraction:
    """Exact value of a syntax tree; appends its integers to `used`. Recursion is bounded by the answer's length."""
    # `type(...) is int`: True and False are integers to isinstance.
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if is_result and isinstance(node, ast.Constant) and type(node.value) is float:
        return Fraction(str(node.value))
    if is_result and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, used, is_result)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise MalformedAnswer(f"{type(node).__name__} is not allowed")
    left, right = _value(node.left, used, is_result), _value(node.right, used, is_result)
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


def _depths(text: str) -> list[int]:
    """The nesting of parentheses after each character."""
    return list(accumulate((character == "(") - (character == ")") for character in text))


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
