r"""Whether two answers are equal, by math-verify, and exactly: math-verify calls numbers below about 5e-17 equal.

It may take for ever; recipe/tasks/verifier.py ends it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

from recipe.tasks.answer import Answer, percentages
from recipe.tasks.numerals import Numeral, read_number, stands_for
from recipe.tasks.units import is_balanced

_DOTS = "\\ldots"
_DIGITS = 50
_CLOSE = {"(": ")", "[": "]", "\\{": "\\}"}
_INTERVAL = re.compile(r"[\[\]]|\\infty|\\cup")
_GROUPED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_APART = re.compile(r"(?<![_^0-9])[0-9]+ +[0-9]")
_BASED = re.compile(r"[0-9]\s*_\s*(?:\{[^{}]*\}|\S)")
# not `3(6)`, of which math-verify makes no product
_SUM = re.compile(r"(?=.*[0-9])(?!.*[0-9]\()(?:[0-9+\-*/().,^{}\s]|\\(?:frac|cdot|times|div|sqrt)(?![A-Za-z]))+")
_LETTER = re.compile(r"\\math[a-z]+\s*\{[^{}]*\}|\\text\s*\{[^{}]*\}|\\[A-Za-z]+|([A-Za-z])")
_CLOSED_INFINITY = re.compile(r"\\infty\s*\]|\[\s*-\s*\\infty")
_SEVERAL = re.compile(r"[<>;]|(?<![0-9]),|,(?![0-9])|\\text|\b(?:or|and)\b")
_AND = re.compile(r"(?:,\s*)?\\text\s*\{\s*,?\s*and\s*\}|;")
_NAME = re.compile(r"[A-Za-z]")
_LONG = re.compile(r"[0-9]{5,}\s*!|!\s*!")


def are_equal(gold: Answer, given: Answer) -> bool:
    """Whether `given` has the value of `gold`: LaTeX that was read, with units that fit."""
    if not given.unit.percent and "=" not in gold.value and not _SEVERAL.search(given.value):
        sums = [side for side in given.value.split("=") if _SUM.fullmatch(side) and is_balanced(side)]
        if not all(_are_equal(gold.value, side) for side in sums):
            return False  # 6 = 5
    if gold.words in ("", gold.value):
        gold, given = _with_own_letters(gold, given)
    return any(_are_equal(a.value, b.value) for a, b in percentages(gold, given))


def _are_equal(gold: str, given: str) -> bool:
    gold, given = (_GROUPED.sub(lambda found: found[0].replace(" ", ""), text) for text in (gold, given))
    if gold != given and (_APART.search(gold) or _APART.search(given)):
        return False  # math-verify reads `1 2` as 12
    if "".join(gold.split()) == "".join(given.split()):
        return True
    if given.startswith(("_", "^")) or any(p.search(given) and not p.search(gold) for p in (_CLOSED_INFINITY, _LONG)):
        return False
    if (named := _are_equal_named(gold, given)) is not None:
        return named
    if max(gold.count(":"), given.count(":")) > 1 and "\\{" not in gold + given:
        ratios = [[f"({part})/({text.partition(':')[0]})" for part in text.split(":")] for text in (gold, given)]
        return len(ratios[0]) == len(ratios[1]) and all(map(_are_equal, *ratios))
    opens = [next((mark for mark in _CLOSE if _encloses(mark, text)), "") for text in (gold, given)]
    if "\\{" in opens and opens[0] != opens[1] and all(opens) and len(_items(gold)) > 1:
        return False  # a set is no point
    if opens[1] == "" and len(_items(gold)) < len(items := _items(given)) and len(set(items)) < len(items):
        return False
    if sorted(map(_plain, _BASED.findall(gold))) != sorted(map(_plain, _BASED.findall(given))):
        return False
    if _DOTS in gold or _DOTS in given:
        return _are_equal_items(gold, given, opens)
    return _by_math_verify(gold, given)


def _with_own_letters(*answers: Answer) -> list[Answer]:
    """Other letters for capitals that occur as small letters too: math-verify takes R for r."""
    letters = {found[1] for answer in answers for found in _LETTER.finditer(answer.value)} - {None}
    free = iter(sorted(set("abcghjklmnopqrstuvwxyz") - {letter.lower() for letter in letters}))
    other = {capital: next(free, capital) for capital in sorted(letters) if capital.lower() in letters - {capital}}

    def read(found: re.Match[str]) -> str:
        return str(other.get(found[1], found[0]))

    return [replace(answer, value=_LETTER.sub(read, answer.value)) for answer in answers]


def _values_by_name(text: str) -> dict[str, str]:
    """3 and -1 of `x = 3, y = -1` and of `(x, y) = (3, -1)`; none where a name is given twice, or an item has none."""
    text = _AND.sub(",", text)
    left, equals, right = text.partition("=")
    if equals and "=" not in right and _encloses("(", left.strip()) and _encloses("(", right.strip()):
        pairs = list(zip(_items(left.strip()), _items(right.strip()), strict=False))
    else:
        pairs = [(name, value) for name, _, value in (item.partition("=") for item in _items(text))]
    named = dict(pairs)
    return named if len(named) == len(pairs) > 1 and all(map(_NAME.fullmatch, named)) and all(named.values()) else {}


def _are_equal_named(gold: str, given: str) -> bool | None:
    """Values with the same names, or the items of a point in the order of the names; None: neither has names."""
    ours, theirs = _values_by_name(gold), _values_by_name(given)
    if ours and theirs:
        return ours.keys() == theirs.keys() and all(_are_equal(ours[name], theirs[name]) for name in ours)
    named, other = (ours, given) if ours else (theirs, gold)
    other = other.partition("=")[2].strip() or other
    if not named or not (ours or _encloses("(", other)):
        return None
    items = _items(other)
    return len(items) == len(named) and all(map(_are_equal, (named[name] for name in sorted(named)), items))


def _are_equal_items(gold: str, given: str, opens: list[str]) -> bool:
    """Lists with dots have the same items, and the dots at the same place."""
    ours, theirs = (
        _items(text.removeprefix(mark).removesuffix(_CLOSE.get(mark, "")))
        for text, mark in zip((gold, given), opens, strict=True)
    )
    if len(ours) != len(theirs) or len(ours) == 1:
        return False
    return all(a == b if _DOTS in a + b else _are_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _encloses(mark: str, text: str) -> bool:
    return text.startswith(mark) and text.endswith(_CLOSE[mark])


def _items(text: str) -> list[str]:
    """What commas outside all brackets separate, without the outer brackets."""
    mark = next((mark for mark in _CLOSE if _encloses(mark, text)), "")
    text = text.removeprefix(mark).removesuffix(_CLOSE.get(mark, ""))
    items, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return ["".join(item.split()) for item in items]


def _plain(based: str) -> str:
    return re.sub(r"[{}\s]|\\text", "", based)


def _by_math_verify(gold: str, given: str) -> bool:
    from math_verify import verify

    as_sets = _INTERVAL.search(gold) is not None  # (0,1) may be a point
    parsed, other = _parsed(gold), _parsed(given)
    with _exact():
        if verify(parsed, other, allow_set_relation_comp=as_sets, timeout_seconds=None):
            return True
        return any(_equal_functions(a, b) or _equal_complex(a, b) for a in parsed for b in other)


def _parsed(latex: str) -> list[Any]:
    """math-verify's expressions. It reads LaTeX alone: a number inside a text that is none is not the answer."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    rules = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    latex = latex.replace("\\degree", "^\\circ").replace("%", "\\%")
    if latex.startswith(("\\le ", "\\ge ", "\\ne ", "<", ">")):
        latex = f"x {latex}"
    parsed: list[Any] = parse(
        f"\\boxed{{{latex}}}", [LatexExtractionConfig(normalization_config=rules)], parsing_timeout=None
    )
    return parsed


def _equal_complex(a: Any, b: Any) -> bool:
    """Whether two expressions are equal where i, their only letter, is the imaginary unit."""
    import sympy
    from math_verify import verify

    symbols = {str(symbol): symbol for x in (a, b) if isinstance(x, sympy.Expr) for symbol in x.free_symbols}
    if symbols.keys() != {"i"} or not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return False
    return bool(verify(*(x.xreplace({symbols["i"]: sympy.I}) for x in (a, b)), timeout_seconds=None))


def _equal_functions(a: Any, b: Any) -> bool:
    r"""Whether two expressions are equal wherever one of them is real: `\sqrt{1/n}` and `1/\sqrt{n}`.

    math-verify takes a symbol for any real number. Roots and logarithms of positive numbers obey more laws; where these
    are needed, a few negative numbers tell `\sqrt{n^2}` from `n`.
    """
    import sympy
    from math_verify import verify

    if not all(isinstance(x, sympy.Expr) for x in (a, b)) or a.free_symbols != b.free_symbols:
        return False
    symbols, powers = sorted(a.free_symbols, key=str), a.atoms(sympy.Pow, sympy.log) | b.atoms(sympy.Pow, sympy.log)
    if not 1 <= len(symbols) <= 3 or all(power.is_Pow and power.exp.is_integer for power in powers):
        return False
    positive = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in symbols}
    if not verify(a.xreplace(positive), b.xreplace(positive), timeout_seconds=None):
        return False
    for signs in product((1, -1), repeat=len(symbols)):
        point = {s: sign * sympy.Rational(7 + 2 * i, 5) for i, (s, sign) in enumerate(zip(symbols, signs, strict=True))}
        here, there = (x.subs(point) for x in (a, b))
        if (here.is_real or there.is_real) and not verify(here, there, timeout_seconds=None):
            return False
    return True


@contextmanager
def _exact() -> Iterator[None]:
    """math-verify's comparison of numbers, and then ours. All of its other comparisons come to this one."""
    from math_verify import grader

    theirs = grader.sympy_numeric_eq

    def both(a: Any, b: Any, *how: Any) -> bool:
        return _differ_in_decimals_alone(a, b) or (bool(theirs(a, b, *how)) and _is_the_same(a, b))

    grader.sympy_numeric_eq = both
    try:
        yield
    finally:
        grader.sympy_numeric_eq = theirs


def _is_the_same(a: Any, b: Any) -> bool:
    """Whether two expressions that agree in 15 places agree exactly, or in as many digits as sympy finds.

    Variables get numbers. Expressions without a finite value are left to math-verify.
    """
    import sympy

    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return True  # matrices: their elements were compared
    decimals = [_decimal(number) if number.is_Float else None for number in (a, b)]
    a, b = (_without_floats(expression) for expression in (a, b))
    away = (a - b).doit()
    if away.is_zero:
        return True
    points = {symbol: sympy.Rational(7 + 2 * i, 5) for i, symbol in enumerate(sorted(away.free_symbols, key=str))}
    values = [expression.doit().subs(points).evalf(_DIGITS) for expression in (a, b, away)]
    if not all(value.is_number and value.is_finite for value in values):
        return True
    if decimals != [None, None]:
        exact = [Fraction(str(value)) if value.is_real else None for value in values[:2]]
        return any(
            d is not None and v is not None and stands_for(d, v) for d, v in zip(decimals, exact[::-1], strict=True)
        )
    no_digit_found = values[2].is_Float and values[2]._prec == 1
    return not away.is_Rational and bool(no_digit_found or abs(values[2]) <= abs(values[0]) * sympy.Rational(1, 10**30))


def _differ_in_decimals_alone(a: Any, b: Any) -> bool:
    """Whether two expressions are equal once their decimals are fractions: 2^{0.5} and a root."""
    import sympy

    if not all(isinstance(x, sympy.Expr) for x in (a, b)) or not (a.has(sympy.Float) or b.has(sympy.Float)):
        return False
    return bool((_without_floats(a) - _without_floats(b)).doit().is_zero)


def _decimal(number: Any) -> Numeral:
    return read_number(str(abs(number)).rstrip("0")) * Fraction(-1 if number < 0 else 1)  # type: ignore[operator]


def _without_floats(expression: Any) -> Any:
    import sympy

    return expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})
