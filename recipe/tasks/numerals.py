r"""Plain numbers as fractions: `1,000`, `.5`, `1e-05`, `3 \times 10^5`, `\frac{1}{2}`, `2 1/2`, `0.\overline{3}`."""

import re
from dataclasses import dataclass
from fractions import Fraction

# A decimal with so many digits and places stands for a value that it rounds.
ROUNDED_DIGITS = 6
# A decimal with so many digits is what a program printed of a float.
_FLOAT_DIGITS, _MOST_FLOAT_DIGITS = 15, 17
_MOST_CHARS = 1000  # more digits are slow to read

_INTEGER = r"(?:[1-9][0-9]{0,2}(?:[, ][0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*[{(]?\s*(?P<power>[-+]?[0-9]{1,4})\s*[)}]?)"
_NUMBER = re.compile(
    rf"(?P<number>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]{{1,4}})|{_POWER})?|10\s*\^\s*\{{?(?P<ten>[-+]?[0-9]{{1,4}})\}}?"
)
_FRACTION = re.compile(
    rf"(?:(?P<whole>{_INTEGER})\s*)?\\frac\s*\{{\s*(?P<a>{_DECIMAL})\s*\}}\s*\{{\s*(?P<b>{_DECIMAL})\s*\}}"
    rf"|(?:(?P<whole_>[0-9]+)\s+(?:and\s+|\+\s*)?)?(?P<a_>{_DECIMAL})\s*/\s*(?P<b_>{_DECIMAL})"
)
_REPEATING = re.compile(r"(?P<whole>[0-9]*)\.(?P<first>[0-9]*)\\overline\s*\{(?P<again>[0-9]+)\}")


@dataclass(frozen=True)
class Numeral:
    """A number as it is written."""

    value: Fraction
    places: int = 0
    """After the decimal point; 0: the value is meant exactly."""
    digits: int = 0
    """All but leading zeros."""

    def __mul__(self, factor: Fraction) -> "Numeral":
        return Numeral(self.value * factor, self.places, self.digits)


def read_number(text: str) -> Numeral | None:
    """The number that a text in `normal` form is, with its sign; None: it is none."""
    if len(text) > _MOST_CHARS:
        return None
    text = text.strip()
    while len(text) > 1 and text[0] == "(" and text[-1] == ")" and "(" not in text[1:]:
        text = text[1:-1].strip()
    sign = -1 if text.startswith("-") else 1
    text = text[1:].lstrip() if text[:1] in ("-", "+") else text
    try:
        if found := _NUMBER.fullmatch(text):
            return _decimal(found) * Fraction(sign)
        if found := _FRACTION.fullmatch(text):
            value = _fraction(found)
            return None if value is None else Numeral(sign * value)
    except ZeroDivisionError:
        return None
    if found := _REPEATING.fullmatch(text):
        first, again = found["first"], found["again"]
        period = Fraction(int(again), 10 ** len(first) * (10 ** len(again) - 1))
        return Numeral(sign * (Fraction(f"{found['whole'] or 0}.{first or 0}") + period))
    return None


def equal(a: Numeral, b: Numeral) -> bool:
    """Whether two numbers are the same, or one is a decimal that stands for the other."""
    return a.value == b.value or stands_for(a, b.value) or stands_for(b, a.value)


def stands_for(decimal: Numeral, value: Fraction) -> bool:
    """Whether a decimal is a value cut or rounded at its last place, or that of a float with its last digits wrong."""
    away = abs(decimal.value - value)
    printed = decimal.places and _FLOAT_DIGITS <= decimal.digits <= _MOST_FLOAT_DIGITS and value.denominator > 1
    if printed and away * 10 ** (_FLOAT_DIGITS - 1) <= abs(value):
        return True
    last_places = away * 10**decimal.places
    cut = abs(decimal.value) <= abs(value) and last_places < 1
    return min(decimal.places, decimal.digits) >= ROUNDED_DIGITS and (cut or 2 * last_places <= 1)


def _decimal(found: re.Match[str]) -> Numeral:
    if found["ten"]:
        return Numeral(Fraction(10) ** int(found["ten"]))
    text = found["number"].replace(",", "").replace(" ", "")
    whole, _, after = text.partition(".")
    exponent = int(found["exponent"] or found["power"] or 0)
    value = Fraction(int(whole + after or 0), 10 ** len(after)) * Fraction(10) ** exponent
    return Numeral(value, max(0, len(after) - exponent) if after else 0, len((whole + after).lstrip("0")))


def _fraction(found: re.Match[str]) -> Fraction | None:
    whole = found["whole"] or found["whole_"]
    above, below = (Fraction(_plain(found[n] or found[f"{n}_"])) for n in ("a", "b"))
    if whole is None:
        return above / below
    # 2 1/2 is a mixed number; 2 5/2 may be a product
    return Fraction(_plain(whole)) + above / below if 0 < above < below else None


def _plain(number: str) -> str:
    return number.replace(",", "").replace(" ", "").rstrip(".")
