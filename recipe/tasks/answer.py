r"""An answer as it is compared: its value in one way of writing, the number that it is, and its unit."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from recipe.tasks.numerals import Numeral, equal, read_number
from recipe.tasks.units import Unit, bare_letters, split_unit, without_inner_units
from recipe.tasks.wording import without_words
from recipe.tasks.written import normal

_BASED = re.compile(
    r"([0-9A-Fa-f][0-9A-Fa-f., ]*?) ?(?:_ ?(?:base ?)?|(?:in )?base ?)(\w+)"
    r"|([0-9A-Fa-f]+) (?:in )?(binary|octal|hexadecimal)"
)
_TIME = re.compile(r"([0-9]{1,2}):([0-9]{2})")
_RATIO = re.compile(r"[0-9] ?[:/] ?[0-9]|\\frac")
_ASSIGNED = re.compile(r"(?:[A-Za-z]\w{0,11}|\\[a-z]+|\\text\s*\{[^{}=]*\})(?:_\{?\w+\}?)?(?:\([a-z]\))?\s*[=:]\s*")
_NAMED = re.compile(r"[A-Za-z]\s*=\s*")
_EXPONENT = re.compile(r"(?<=[0-9.])[eE]([-+]?[0-9]{1,5})(?![0-9A-Za-z])")
_CHOICE = re.compile(r"(?:(?:option|choice|answer) ?)?[(\[]? ?([A-Z]) ?[)\]]?", re.IGNORECASE)
_BASES = {
    **{"binary": 2, "bin": 2, "octal": 8, "oct": 8, "decimal": 10, "dec": 10, "hexadecimal": 16, "hex": 16},
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
}
_BASES |= {"seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16}
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")


@dataclass(frozen=True)
class Answer:
    """One side of a comparison."""

    value: str
    """LaTeX in `normal` form, without the unit."""
    unit: Unit
    number: Numeral | None
    """Of a plain number, with its multiples: that of `2 dozen` is 24."""
    name: str = ""
    """x, of `x = 5`."""
    kind: tuple[str, ...] = ()
    """Digits and base, or hours and minutes: written so, an answer is equal to the same alone."""
    words: str = ""
    """Of an answer in words, in small letters; of a choice, as `(C)`, its letter."""

    def of_percent(self) -> "Answer":
        """The value of a percentage: a hundredth."""
        number = self.number * Fraction(1, 100) if self.number else None
        return replace(
            self, unit=replace(self.unit, percent=False), number=number, value=f"\\frac{{{self.value}}}{{100}}"
        )


@lru_cache(maxsize=2**12)
def read_answer(text: str, *, letters_are_units: bool = False) -> Answer:
    """What a text says. letters_are_units: `5 m` are five metres."""
    value, unit = split_unit(normal(text), letters_are_units=letters_are_units)
    value = without_inner_units(_without_rounded(value))
    kind = _kind(value)
    if kind[-1:] == ("10",) and kind[0] == "base":
        value, kind = kind[1], ()
    if unit.marks & {"am", "pm"} and re.fullmatch("[0-9]{1,2}", value):
        kind = ("time", str(int(value)), "00")
    name = found[0].rstrip(" =:") if (found := _ASSIGNED.match(value)) else ""
    alone = value[found.end() :] if found else value
    number = read_number(value) or read_number(alone)
    value = _EXPONENT.sub(lambda power: f" \\cdot 10^{{{int(power[1])}}}", value)
    if number:
        number *= unit.times
    elif unit.times != 1:
        value = f"({value}) \\cdot {unit.times}"
    return Answer(value, unit, number, "".join(name.split()), kind, _words(value))


def read_pair(truth: str, answer: str) -> tuple[Answer, Answer]:
    """The truth and an answer. A letter is a unit in an answer alone, and where the truth has no variables."""
    gold = read_answer(truth)
    given = read_answer(answer, letters_are_units=not bare_letters(gold.value))
    if gold.number and not given.number:
        told = read_answer(without_words(normal(answer)), letters_are_units=True)
        return gold, told if told.number else given
    return gold, given


def quick_verdict(gold: Answer, given: Answer) -> bool | None:
    """Whether two answers are equal, where reading them is enough; None: it takes mathematics."""
    if not gold.unit.fits(given.unit):
        return False
    if gold.kind != given.kind and not (gold.number and given.number):
        return None if _is_ratio(gold, given) else False  # 8 pm is 8, or 8:00; 9:16 is 9/16, too
    if gold.kind and given.kind:
        return gold.kind == given.kind
    if (gold.unit.powers ^ given.unit.powers) & {("deg", 1)} and "\\pi" in gold.value + given.value:
        return False  # without a unit an angle is in radians
    if gold.number and given.number and (not gold.name or not given.name or gold.name == given.name):
        return any(a.number and b.number and equal(a.number, b.number) for a, b in percentages(gold, given))
    if gold.words and given.words and (gold.words == given.words or len(gold.words) == len(given.words) == 1):
        return gold.words == given.words
    ours, theirs = (_SPACE.sub("", _TEXT.sub(r"\1", answer.value)) for answer in (gold, given))
    if ours == theirs and gold.unit.percent == given.unit.percent:
        return True
    return None


def _is_ratio(a: Answer, b: Answer) -> bool:
    """Whether one of two answers, written as a time is, is a ratio beside the other."""
    (kind, *_), plain = (a.kind, b) if a.kind else (b.kind, a)
    of_day = (a.unit.marks | b.unit.marks) & {"am", "pm"}
    return kind == "time" and not plain.kind and not of_day and bool(_RATIO.search(plain.value))


def percentages(gold: Answer, given: Answer) -> list[tuple[Answer, Answer]]:
    """What to compare. The truth `20%` is equal to 20 and to 0.2; an answer `50%` to 50 and to 0.5, not 0.5% to 0.5."""
    if gold.unit.percent == given.unit.percent:
        return [(gold, given)]
    if gold.unit.percent:
        return [(gold, given), (gold.of_percent(), given)]
    size = abs(gold.number.value) if gold.number else 0
    as_said, as_share = (gold, given), (gold, given.of_percent())
    return [as_said, as_share] if size == 1 else [as_said] if size > 1 else [as_share]


def _kind(value: str) -> tuple[str, ...]:
    if found := _TIME.fullmatch(value):
        return ("time", str(int(found[1])), found[2])
    plain = " ".join(re.sub(r"\\text(?![A-Za-z])|[{}()]", " ", _NAMED.sub("", value, count=1)).split())
    if found := _BASED.fullmatch(plain):
        base = (found[2] or found[4]).lower()
        base = str(_BASES.get(base, base))
        digits = re.sub(r"[, ]", "", found[1] or found[3]).lower().lstrip("0") or "0"
        if base.isdecimal() and digits.replace(".", "", 1).isalnum():
            return ("base", digits, base)
    return ()


def _without_rounded(value: str) -> str:
    r"""The exact side of `\frac{1}{3} \approx 0.33`; both where they are other numbers."""
    left, _, right = (part.strip() for part in value.partition("\\approx"))
    one, two = read_number(left), read_number(right)
    if one and two:
        zeros = len(right) - len(right.rstrip("0")) if two.places == 0 else 0
        if abs(one.value - two.value) * 10**two.places >= 10**zeros:
            return f"{left}, {right}"
    return left or value


def _words(value: str) -> str:
    """See `Answer.words`; '' where there is more than words."""
    text = " ".join(re.sub(r"\\text\s*|[{}.]", " ", value).split())
    if (choice := _CHOICE.fullmatch(text)) and choice[1].isupper():
        return choice[1]
    return text.lower() if "\\text" in value and text.replace(" ", "").isalpha() and len(text) > 1 else ""
