r"""What follows a value: units, percent, am or pm, multiples as `million`: `5\text{ cm}^2`, `18 dollars/day`.

A unit says nothing where one of two answers has none. Two units that differ make two answers differ. Other words, as
`5 apples`, say what was counted and are left out.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from recipe.tasks.wording import NUMBER_WORDS, TAKES_BACK, set_of

# Each line: the name of a unit, and how else people write it. An s at the end is a plural.
_UNITS = """
mm millimeter millimetre; cm centimeter centimetre; dm decimeter decimetre; m meter metre; km kilometer kilometre
in inch inche; ft foot feet; yd yard; mi mile; nm nanometer
mg milligram; g gram gramme gm; kg kilogram kilogramme kilo; lb pound sterling gbp GBP; oz ounce; ton tonne
ml milliliter millilitre mL; l liter litre L; gal gallon; qt quart; pt pint; cup; tbsp tablespoon; tsp teaspoon
ms millisecond; s sec second; min minute; h hr hour; day; week wk; month; year yr
dollar usd USD buck; cent; euro eur EUR; yen; rupee rs Rs; permille
deg degree; rad radian; celsius; fahrenheit; K kelvin
N newton; J joule; kj kJ; W watt; kw kW kilowatt; V volt; A amp ampere; ohm; Hz hertz; Pa pascal; cal calorie
acre; hectare ha; furlong; league; fathom; stone; fortnight; decade; century; knot
"""
_NAME_OF = {name: names.split()[0] for names in re.split(r"[;\n]", _UNITS) for name in names.split()}
_PREFIXES = ("nano", "micro", "milli", "centi", "deci", "kilo", "mega", "giga", "tera")
_COMPOUND = {
    **{"mph": "mi/h", "kmh": "km/h", "kmph": "km/h", "kph": "km/h", "fps": "ft/s", "sqft": "sq ft", "cc": "cu cm"},
    **{"degree C": "celsius", "degree F": "fahrenheit"},
}
_ONE_LETTER = frozenset("mgshlLNJWV")
"""Units of one letter that need no \\text."""
_POWERS = {"sq": 2, "square": 2, "cu": 3, "cubic": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}
_TIMES = {
    **{"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "mln": 10**6, "billion": 10**9, "bn": 10**9},
    **{"trillion": 10**12, "quadrillion": 10**15, "mil": 10**6, "k": 1000, "lakh": 10**5, "crore": 10**7},
}
_PERCENT = set_of("% percent percentage pct")
_MARKS = set_of("am pm north south east west increase decrease profit loss bc ad clockwise counterclockwise")
"""Words that make two answers differ that have others of them."""
_SAYS_MORE = set_of(
    "or if not no minus plus choose mod factorial below halves thirds fifths tenths hundredths thousandths ninths "
    "doubled tripled quadrupled halved twice thrice tens"
)
"""A text with one of these words is more than a value and its unit."""
_LINKS = set_of("and where when to but is are for with base")
_AFTER_LINK = NUMBER_WORDS | TAKES_BACK
"""A text with one of these words after a link is more than a value and its unit: `and a half`, `base 8`."""
_NAMES = set_of(
    "pi phi theta alpha beta gamma delta lambda mu sigma omega sqrt sin cos tan cot sec csc log ln exp inf infinity "
    "max lim gcd lcm det mod frac"
)

_TOKEN = re.compile(
    r"(?P<text>\\text\s*\{[^{}]*\})|(?P<degree>\\degree(?: ?[CF](?![A-Za-z]))?)|(?P<macro>\\[A-Za-z]+|\\.)"
    r"|(?P<power>\^\s*(?:\{\s*-?[0-9]\s*\}|-?[0-9]))|(?P<word>[A-Za-z]+(?:\.[A-Za-z]+)*\.?)|(?P<percent>%)"
    r"|(?P<space>\s+)|(?P<join>[/()'])|(?P<other>[0-9.,]+|.)",
    re.DOTALL,
)
_IN_FRONT = re.compile(
    r"\\text\s*\{\s*(dollar|euro|sterling|yen|rupee|USD|EUR|Rs)\.?\s*\}\s*(?=[-+0-9.])"
    r"|(?<![A-Za-z\\])(USD|EUR|GBP|Rs)\.? ?(?=[0-9])"
)
_PART = re.compile(r"degree [CF](?![A-Za-z])|[A-Za-z]+|-?[0-9]|[/%]")
_BETWEEN = str.maketrans("\\{}()^", " " * 6)
_INNER = re.compile(r"(?:\\degree|\\text\s*\{[^{}]*\}(?:\^[0-9])?)(?=\s*(?:,|\)|\]|\\\}|\\text))")
_NOT_BARE = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]\s*=")
_VALUE = re.compile(r"[0-9]|\\pi|\\infty")
_OPEN = re.compile(r"[-+*/=<>^_,|&]\Z|\\(?!pi\Z|infty\Z)[A-Za-z]+\Z")


@dataclass(frozen=True)
class Unit:
    """What follows a value."""

    powers: frozenset[tuple[str, int]] = frozenset()
    """Known units with their powers; empty: none is known."""
    marks: frozenset[str] = frozenset()
    times: Fraction = Fraction(1)
    percent: bool = False

    def fits(self, other: "Unit") -> bool:
        """Whether two values with these units may be equal."""
        if self.percent != other.percent and (self.powers or other.powers):
            return False
        pairs = ((self.powers, other.powers), (self.marks, other.marks))
        return all(not one or not two or one == two for one, two in pairs)


def split_unit(text: str, *, letters_are_units: bool) -> tuple[str, Unit]:
    """(value, unit) of an answer in `normal` form; a text that is not both is a value.

    letters_are_units: `5 m` are five metres; otherwise m is a variable.
    """
    value, in_front = text, ""
    if found := _IN_FRONT.search(text):
        value, in_front = text[: found.start()] + text[found.end() :], found[1] or found[2]
    tokens = list(_TOKEN.finditer(value))
    start = len(value)
    for index in range(len(tokens) - 1, -1, -1):
        kind = tokens[index].lastgroup
        word = kind == "word" and _may_be_a_unit(tokens, index, letters_are_units)
        if word or kind in ("text", "degree", "percent"):
            start = tokens[index].start()
        elif kind not in ("space", "join", "power") and tokens[index][0] != "\\cdot":
            break
    before = value[:start].rstrip(" ({").removesuffix("\\cdot").rstrip(" ^/'")
    if start == len(value) or not before or _OPEN.search(before) or not is_balanced(before):
        before = value
    unit, unknown = _unit_of(f"{in_front} {value[len(before) :]}")
    if unit is None or (unknown and not (_VALUE.search(before) and not bare_letters(before))):
        return text, Unit()
    return before.strip(), unit


def without_inner_units(value: str) -> str:
    """A list, point or set without the units of its items: (30, 60) of (30\\degree, 60\\degree)."""

    def read(found: re.Match[str]) -> str:
        unit, unknown = _unit_of(found[0])
        return found[0] if unit is None or unknown or unit.percent or unit.times != 1 or unit.marks else ""

    return _INNER.sub(read, value)


def bare_letters(value: str) -> bool:
    """Whether a value has variables."""
    return any(character.isalpha() for character in _NOT_BARE.sub("", value))


def _may_be_a_unit(tokens: list[re.Match[str]], index: int, letters_are_units: bool) -> bool:
    word, previous = tokens[index][0].replace(".", ""), tokens[index - 1] if index else None
    if previous is None or word in _NAMES:
        return False
    if len(word) == 1:
        between = word == "a" and previous.lastgroup == "space" and index + 1 < len(tokens)
        return letters_are_units and (word in _ONE_LETTER or between)
    known = _name_of(word) or word.lower() in _MARKS | _TIMES.keys() | _PERCENT | _POWERS.keys() | _COMPOUND.keys()
    # `2ab` is a product, `2 apples` are counted
    return bool(known) or previous.lastgroup in ("space", "join")


@lru_cache(maxsize=4096)
def _unit_of(text: str) -> tuple[Unit | None, bool]:
    """(unit, whether there are words that are none); None: the text says more than a unit."""
    text = " ".join(
        text.replace("\\text", " ").translate(_BETWEEN).replace(".", "").replace("per cent", "percent").split()
    )
    words = [part for word in _PART.findall(text) for part in _PART.findall(_COMPOUND.get(word, word))]
    powers: dict[str, int] = {}
    marks, times, percent, unknown, linked = set(), Fraction(1), False, False, False
    sign, power, last = 1, 1, ""
    for index, word in enumerate(words):
        low = word.lower()
        name = "" if low == "in" and words[index + 1 : index + 2] and words[index + 1].isalpha() else _name_of(word)
        linked = linked or low in _LINKS
        if low in _SAYS_MORE or (linked and (low in _AFTER_LINK or low.isdigit())) or (percent and low in _PERCENT):
            return None, True
        if low in ("/", "per"):
            sign = -1
        elif low in _PERCENT:
            percent = True
        elif low in _POWERS:
            power = _POWERS[low]
        elif low in _POWERS_AFTER or word.lstrip("-").isdigit():
            if last:
                powers[last] *= _POWERS_AFTER.get(low) or int(word)
            elif index == 0:
                return None, True  # `3 squared`
        elif (many := low.removesuffix("s") if len(word) > 1 else word) in _TIMES:
            times *= _TIMES[many]
        elif low in _MARKS:
            marks.add(low)
        elif name:
            powers[name] = powers.get(name, 0) + sign * power
            last, power = name, 1
        else:
            last, power, unknown = "", 1, True
    if powers.keys() & {"celsius", "fahrenheit"}:
        powers.pop("deg", None)
    return Unit(frozenset(powers.items()), frozenset(marks), times, percent), unknown


def _name_of(word: str) -> str:
    """The name of a unit that is written so, or ''."""
    for form in (word, word.lower(), word.lower().removesuffix("s"), word.lower().removesuffix("es")):
        if form in _NAME_OF and (len(form) > 1 or form == word):
            return _NAME_OF[form]
    prefix = next((prefix for prefix in _PREFIXES if word.lower().startswith(prefix)), "")
    rest = word[len(prefix) :]
    return prefix + _name_of(rest) if prefix and len(rest) > 3 and _name_of(rest) else ""


def is_balanced(text: str) -> bool:
    """Whether a text has as many closing brackets as opening ones."""
    return sum(map(text.count, "([")) == sum(map(text.count, ")]")) and text.count("{") == text.count("}")
