"""Words around a number: those that say which number it is, and those that make another number of it."""

import re


def set_of(words: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(words.split())


NUMBER_WORDS = set_of(
    "one two three four five six seven eight nine ten eleven twelve sixteen twenty thirty forty fifty sixty seventy "
    "eighty ninety hundred thousand half quarter"
)
TAKES_BACK = set_of("wrong incorrect false")
_CHANGES = set_of("not double twice least most less more than over under between half")
_CHANGES_NEXT = (NUMBER_WORDS - {"one"}) | set_of(
    "triple treble thrice quadruple below above beyond almost nearly fewer except but never no sqrt"
)
_END = re.compile(
    r"\b(?:thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|roots?|square|cube|factorial"
    r"|percent) of\Z|(?<!\badd )(?<!\badds )(?<!\badding )\bup to\Z|n't\Z"
)
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
_ARITHMETIC = re.compile(r"[-+*/=×÷]")
# 73 of `(wait, 73)` and of `(73 with tax)`, not of `(73 each)`
_RIVAL = re.compile(r"(?:([A-Za-z]+) )?\$?[0-9][0-9,.]*(?=[^\w\s%]*\Z| (?:with|if|when)\b)")
_RELATES = set_of("from of out to by than at not times x plus minus twice half over")
_IN_TEXT = re.compile(r"\\text\s*\{([^{}0-9]*)(\}\s*=?\s*(?=\S)|(?=[0-9]))")


def changes_number(words: str) -> bool:
    """Whether words in front of a number make another number of it: `a third of`, `at least`, `not`."""
    found = _WORD.findall(words.lower().replace("’", "'"))
    if not found or TAKES_BACK.issuperset(found) or not _CHANGES.isdisjoint(found):
        return bool(found)
    apart = words.rstrip().endswith((",", ":"))  # as shown above: 72
    return not apart and (found[-1] in _CHANGES_NEXT or _END.search(" ".join(found)) is not None)


def takes_back(remark: str) -> bool:
    """Whether a remark after a number has another number in its place, or calls it wrong."""
    words = _WORD.findall(remark.lower())
    if words and TAKES_BACK.issuperset(words):
        return True
    if _ARITHMETIC.search(remark):
        return False
    return any((found[1] or "").lower() not in _RELATES for found in _RIVAL.finditer(remark))


def without_words(text: str) -> str:
    r"""7 of `\text{Total: } 7` and `\text{There are 7 ways}`: an answer in `normal` form without words in front."""
    found = _IN_TEXT.match(text)
    if not found or changes_number(found[1]):
        return text
    rest = text[found.end() :]
    return rest if found[2] else rest.replace("}", "", 1)
