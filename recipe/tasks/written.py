r"""One way of writing for what people and models write in many: `**13.**`, `½`, `10\,000`, `√3`, `\dfrac12` as LaTeX.

Every step goes over the text a fixed number of times, and changes how an answer is written, never its value.
"""

import re
import unicodedata

_SUPER, _SUB = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙ"
_RAISED = {ord(a): b for marks in (_SUPER, _SUB) for a, b in zip(marks, "0123456789+-()n", strict=True)}
_SIGNS = {
    **{"−–—‒―﹣－‐‑": "-", "∗⁎＊": "*", "⁄∕": "/", "·⋅∙•": r"\cdot ", "×✕✖": r"\times ", "÷": r"\div ", "±": r"\pm "},
    **{"≤≦⩽": r"\le ", "≥≧⩾": r"\ge ", "≠": r"\ne ", "≈≅": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap "},
    **{"∞": r"\infty ", "∅⌀": r"\emptyset ", "°º˚": r"\degree ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}"},
    **{"℃": r"\degree C", "℉": r"\degree F", "€": r"\text{euro}", "£": r"\text{sterling}", "¥￥": r"\text{yen}"},
    **{"₹": r"\text{rupee}", "¢": r"\text{cent}", "％": "%", "‰": r"\text{permille}", "′’‘": "'", "″“”": '"'},
}
_OF_SIGN = {ord(sign): latex for signs, latex in _SIGNS.items() for sign in signs}
_RUNS = re.compile(f"([{_SUPER}]+)|([{_SUB}]+)")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9.]+|[A-Za-zπ]))")

_FONT = re.compile(
    r"\\(?:math(?:rm|bf|it|sf|tt)|text(?:rm|bf|it|sf|tt|up|normal)|[mh]box|operatorname\*?|bm|boldsymbol|emph|underline)"
    r"\s*(?=\{)"
)
_SPACE = re.compile(r"(?<!\\)\\!\s*|((?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|enspace)(?:space)?(?![A-Za-z]))")
_NOTHING = re.compile(
    r"\\(?:left|right|[bB]ig[lr]?|displaystyle|textstyle|limits|bf|rm|it|tt|boldmath|[lL]arge|LARGE|[hH]uge|small|tiny"
    r"|normalsize|checkmark|blacksquare)(?![A-Za-z])\s?"
    r"|\\(?:(?:text)?color|[hv]space|[hv]?phantom|label|tag)\*?\s*\{[^{}]*\}"
    r"|(?<!\\)(?:\$|\\[()\[\]])"
)
_NO_BRACES = str.maketrans("", "", "{}")
_FUNCTIONS = "(?:arc)?(?:sin|cos|tan)|ln"
_PRIMES = {"'": "ft", "''": "in", '"': "in"}
_TEXT = re.compile(r"\\text\s*(?=\{)")
_MATHEMATICS = re.compile(r"\\\$ ?[0-9]|\\(?!text|cdot|circ|deg)[A-Za-z]")
_MACRO = re.compile(r"\\(?:begin|end)\s*\{[a-z]*\}|\\[A-Za-z]+")
# Two ways of writing the same, and the one that is kept. Later patterns rely on earlier ones.
_SAME = (
    (re.compile(r"\\(?:d|t|c|x|nice)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\{[^{}]*\}|[0-9])\s*(\{[^{}]*\}|[0-9])"), lambda found: _frac(found[1], found[2])),
    (re.compile(r"\{([^{}\\]*)\\(choose|over)(?![A-Za-z])([^{}\\]*)\}"), lambda found: _over(*found.groups())),
    (re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\\\\s*\[[0-9.]+ ?[a-z]{2}\]"), r"\\\\ "),
    (re.compile(r"(?<=[0-9.])\\(?:bar|dot)\s*(?=\{[0-9])"), r"\\overline"),
    (re.compile(r"\\(le|ge)(?:q|qslant|slant)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\\(?:neq|not\s*=)"), r"\\ne "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\(?:ldots|dots|cdots|dotsc|dotsb)(?![A-Za-z])|\.\.\."), r"\\ldots "),
    (
        re.compile(
            r"\\(?:text)?degrees?(?![A-Za-z])|(?:\{\})?\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})"
            r"|(?<=[0-9])\s*(?:\\deg(?![A-Za-z])|\^\s*\{?\s*(?:\\text\s*\{\s*)?o(?![A-Za-z])\s*\}?\s*\}?)"
        ),
        r"\\degree ",
    ),
    (re.compile(r"\\([lr])brace(?![A-Za-z])\s*"), lambda found: "\\{" if found[1] == "l" else "\\}"),
    (re.compile(r"(?<![\\A-Za-z])\{\s*([-,.:])\s*\}"), r"\1"),
    (re.compile(r"\^\s*(-?[0-9]{2,}|-[0-9])"), r"^{\1}"),
    (
        re.compile(r"(?:(?<![A-Za-z])US)?(?:\\text\s*\{\s*\\?\$\s*\}|\\\$|\\(?:text|math)dollar)|(?<![A-Za-z])US\$"),
        r"\\text{dollar}",
    ),
    (re.compile(r"\\text\s*\{\s*(\\degree|\\text\{[a-z]+\})\s*\}"), r"\1 "),
    (re.compile(r"\\text\s*\{([-+0-9.,/: \\%]*|\s*[ie]\s*)\}"), r"\1"),
    (
        re.compile(r"\\text\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)+)\}"),
        lambda found: f"\\text{{{found[1].translate(_NO_BRACES)}}}",
    ),
    (re.compile(r"\\frac\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}"), r"\\text{\1/\2}"),
    (re.compile(r"\\text\s*\{\s*infinity\s*\}"), r"\\infty"),
    (re.compile(rf"\\text\s*\{{\s*({_FUNCTIONS}|log)\s*\}}(?=\s*[^\s.])"), r"\\\1 "),
    (
        re.compile(
            rf"(?<![A-Za-z\\])(pi(?![A-Za-z])|sqrt(?=\s*[({{0-9])"
            rf"|(?:{_FUNCTIONS})(?=\s*(?:[({{0-9\\]|[A-Za-z](?![A-Za-z])))(?![A-Za-z]))"
        ),
        r"\\\1 ",
    ),
    (re.compile(r"\\log\s*_\s*(?:\{\s*e\s*\}|e(?![A-Za-z]))"), r"\\ln "),
    (re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc) ?[({]? ?)([0-9.]+) ?\\degree"), r"\1\\frac{\2\\pi}{180}"),
    (re.compile(r"\A([\[\]])([^\[\]]*)([\[\]])\Z"), lambda found: _interval(*found.groups())),
    (re.compile(r"\A\\\{ ?([a-z]) ?(?:\\in ?\\mathbb ?\{R\} ?)?(?:\\mid(?![A-Za-z])|\||:) ?(.*)\\\}\Z"), r"\2"),
    (re.compile(r"\A([^'\"]*[0-9]) ?(''|'|\")[ .]*\Z"), lambda found: f"{found[1]}\\text{{{_PRIMES[found[2]]}}}"),
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=[0-9A-Za-z)}])\s?\*\*\s?(?=[0-9A-Za-z(-])"), "^"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"(?<=[0-9])\s*\^?\s*\{?\s*(?:\\text\s*\{)?\s*(?:st|nd|rd|th)\s*\}?\s*\}?(?![A-Za-z0-9])"), ""),
)
_TAG = re.compile(r"(?:<\|?/?[A-Za-z_]{1,20}\|?>\s*)+\Z")
_LEAD = re.compile(
    r"(?:(?:\\text\s*\{\s*)?(?:(?:so|thus|hence|the|final|correct)[ ,]+)*answer(?: is)?\s*[:=]?\s*(?:\}\s*)?"
    r"(?![A-Za-z])|=|:|\\approx(?![A-Za-z])|\\(?:implies|Rightarrow)(?![A-Za-z])|\\therefore(?![A-Za-z]))\s*",
    re.IGNORECASE,
)
_AROUND = re.compile(r"(?:[`*\"]|_(?!\{))+")
_WRAPPED = re.compile(r"(?:\\boxed|\\fbox|\\text)?\s*\{")


def normal(text: str) -> str:
    """The answer as LaTeX in one way of writing, without what surrounds it and with no `$`.

    Signs of currencies become \\text{dollar}, degrees \\degree, all dots \\ldots, all fonts \\text.
    """
    text = _one_space(_SPACE.sub(lambda found: " " if found[1] else "", _latex_of_unicode(text)))
    text = _without_fonts(_FONT.sub(r"\\text", _TAG.sub("", text)))
    for pattern, same in _SAME:
        text = _one_space(pattern.sub(same, text))
    text = _one_space(_NOTHING.sub("", text))
    for _ in range(4):  # what surrounds an answer may surround it in any order
        before, text = text, _bare(text)
        if text == before:
            break
    return text


def _one_space(text: str) -> str:
    """One space in the place of many: a pattern with several `\\s*` tries all ways to share out the spaces."""
    return " ".join(text.split())


def _without_fonts(text: str) -> str:
    r"""`{\frac{1}{2}}` of `\text{\frac{1}{2}}`: no \text around mathematics."""
    opened, closes = [], {}
    for index, character in enumerate(text):
        if character == "{":
            opened.append(index)
        elif character == "}" and opened:
            closes[opened.pop()] = index

    def read(found: re.Match[str]) -> str:
        inside = text[found.end() + 1 : closes.get(found.end(), found.end())]
        words = re.search("[A-Za-z]{2}", _MACRO.sub(" ", inside))
        return "" if _MATHEMATICS.search(inside) and any(map(str.isdigit, inside)) and not words else found[0]

    return _TEXT.sub(read, text)


def _latex_of_unicode(text: str) -> str:
    if text.isascii():
        return text
    text = _ROOT.sub(lambda m: f"\\sqrt{'[3]' * (m[1] == '∛')}{{{m[2] or m[3] or m[4] or ''}}}", text)
    text = _RUNS.sub(lambda m: _raised("^" if m[1] else "_", m[0].translate(_RAISED)), text)
    text = "".join(map(_of_character, text)).translate(_OF_SIGN)
    return "".join(map(_named, unicodedata.normalize("NFKC", text)))


def _of_character(character: str) -> str:
    """Vulgar fractions as \\frac; nothing for characters without a width."""
    if character.isascii():
        return character
    if unicodedata.decomposition(character).startswith("<fraction>"):
        above, _, below = unicodedata.normalize("NFKC", character).partition("\N{FRACTION SLASH}")
        return _frac(above, below) if below else character
    return "" if unicodedata.category(character) == "Cf" else character


def _named(character: str) -> str:
    """Greek letters as LaTeX; nothing for pictures."""
    if character.isascii():
        return character
    if unicodedata.category(character) == "So":
        return ""  # an emoji
    words = unicodedata.name(character, "").split()
    if words[:1] != ["GREEK"] or words[2:3] != ["LETTER"] or len(words) != 4:
        return character
    return f"\\{words[3].lower() if words[1] == 'SMALL' else words[3].capitalize()} "


def _raised(mark: str, what: str) -> str:
    return f"{mark}{what}" if len(what) == 1 else f"{mark}{{{what}}}"


def _frac(above: str, below: str) -> str:
    above, below = (part if part.startswith("{") else f"{{{part}}}" for part in (above, below))
    return f"\\frac{above}{below}"


def _over(above: str, how: str, below: str) -> str:
    return f"\\{'binom' if how == 'choose' else 'frac'}{{{above.strip()}}}{{{below.strip()}}}"


def _interval(left: str, inside: str, right: str) -> str:
    """(2,3) of ]2,3[."""
    return f"{'[' if left == '[' else '('}{inside}{']' if right == ']' else ')'}"


def _bare(text: str) -> str:
    """The text without one layer of what surrounds it: bold, quotes, braces, boxes, a dot at the end."""
    text = text.strip().rstrip("\\ ")
    while text.endswith((".", ",", ";", ":")):
        text = text[:-1].rstrip()
    if lead := _LEAD.match(text):
        text = text[lead.end() :]
    start = _AROUND.match(text)
    text = text[start.end() :] if start else text
    while text.endswith(("`", "**", "__", '"')):
        text = text[:-1]
    if start and start[0][0] in "*_":
        text = text.rstrip("*_")
    if (found := _WRAPPED.match(text)) and _closes_at_the_end(text, found.end()):
        inside = text[found.end() : -1].strip()
        words = found[0].startswith("\\text")
        if (
            inside
            and (not words or inside[0].isdigit() or inside[1:].lstrip().startswith("="))
            and not text.startswith("\\{")
        ):
            return inside
    return text.strip()


def _closes_at_the_end(text: str, start: int) -> bool:
    """Whether the brace that opens before `start` closes with the text's last character."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index == len(text) - 1
    return False
