"""GSM8K: grade-school word problems whose answer is a number, after ####. Official split.

Raw files: `hf download openai/gsm8k --repo-type dataset --local-dir raw/gsm8k`, or the JSON lines of its repository.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.tasks.answer import read_answer
from recipe.tasks.boxed import after_mark, last_boxed
from recipe.tasks.math_reward import score_answer
from recipe.tasks.rows import Prepared, Row, add_source, find_files, make_row, read_rows, text_of
from recipe.tasks.wording import NUMBER_WORDS, changes_number, takes_back

HELP = "grade-school word problems (openai/gsm8k)"
DATA_SOURCE = "gsm8k"
MAX_ANSWER_CHARS = 64
_MULTIPLE = re.compile(r"(?<=[0-9])([kKMB])(?![A-Za-z])")
_MULTIPLES = {"k": "thousand", "K": "thousand", "M": "million", "B": "billion"}
# No text can be split in two ways: words as `(?:\s*[a-zA-Z]+)*` take twice as long for every further letter.
_WORDS_FIRST = re.compile(r"[^0-9+\-*/^=<>()$]*[ :]")
_MINUS = re.compile(r"(?i:minus|negative) (?=[0-9$])")
_HYPHEN = re.compile(r"(?<=[0-9A-Za-z])-(?=[A-Za-z])")  # 18-year-old
_EMPHASIS = re.compile(r"(?<![\w)*])(\*{1,3}|__)(?=[^\s*])([^*\n]*[^\s*])\1(?![\w(*])")  # **18** apples, not 2**3
_CALCULATION = re.compile(r"<<[^<>]*>>|^(?:[-=]>|[→➡]\N{VARIATION SELECTOR-16}?)\s*")  # <<9+9=18>>18
_REMARK = re.compile(r"([^()]*)\s\((?![^()]*\bor\b)([^()]*)\)\.?")  # 60 minutes (1 hour)
_SUM = re.compile(r"[^A-Za-z%]*[0-9][^A-Za-z%]*")
_EXPLAINED = re.compile(r"([^0-9]*[0-9][^:]*?)(?:\s[-–—]|:)\s([A-Za-z]{2}[^0-9]*)")  # 18 - the number of apples
_EITHER = re.compile(r"(.*[0-9][^0-9]*) or ([0-9].*)")  # 90 minutes or 1.5 hours
_ADVICE = "get them with `hf download openai/gsm8k --repo-type dataset --local-dir DIR`"

add_arguments = add_source


def prompt(question: str) -> str:
    """The user's message."""
    return f"{question}\nReason step by step, and write the final number on the last line after ####."


def build(args: argparse.Namespace) -> Prepared:
    """Rows of the official split. Raises ValueError naming the file that is missing or wrong."""
    train, val = (_read(args.source, word, split) for word, split in (("train", "train"), ("test", "val")))
    return Prepared(train, val)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    r"""Score one response by what follows its last ####; by its last \boxed{...} if there is no ####.

    Returns and raises what `recipe.tasks.math_reward.compute_score` does.
    """
    answer = after_mark(solution_str, MAX_ANSWER_CHARS) if "####" in solution_str else None
    if "####" not in solution_str:
        answer = last_boxed(solution_str, MAX_ANSWER_CHARS)
    return score_answer(_without_sentence(answer) if answer else answer, ground_truth)


def _without_sentence(answer: str) -> str:
    """The number of `The profit is **$18**!`, 3 thousand of `3k`, -5 of `minus 5`; '' where a remark takes it back."""
    answer = _CALCULATION.sub("", _EMPHASIS.sub(r"\2", answer).replace("`", ""))
    answer = _without_remark(_HYPHEN.sub(" ", _MINUS.sub("-", answer)).rstrip("!"))
    words = _WORDS_FIRST.match(answer)
    if words and words[0][:1].isalpha():
        other = changes_number(words[0])
        answer = (words[0].replace(":", " ") if other else "") + answer[words.end() :]
    return _MULTIPLE.sub(lambda found: f" {_MULTIPLES[found[1]]}", answer)


def _without_remark(answer: str) -> str:
    """The answer before `(1 hour)` or `: the total`; 9 + 9 = 18 of `18 (9 + 9)`."""
    if (found := _REMARK.fullmatch(answer)) and read_answer(found[1]).number:
        if _SUM.fullmatch(found[2]):
            return f"{found[2]} = {found[1]}"
        return "" if takes_back(found[2]) else found[1]
    if (found := _EXPLAINED.fullmatch(answer)) and read_answer(found[1]).number:
        told = NUMBER_WORDS.isdisjoint(found[2].lower().split()) and not takes_back(found[2])
        return found[1] if told else answer
    if found := _EITHER.fullmatch(answer):
        one, two = (read_answer(side, letters_are_units=True) for side in found.groups())
        if one.number and two.number and one.unit.powers and two.unit.powers and not one.unit.fits(two.unit):
            return found[1]
    return answer


def _read(source: Path, word: str, split: str) -> list[Row]:
    # the hub's other configuration has the same questions with other solutions
    files = [f for f in find_files(source, f"the {split} split", word, _ADVICE) if "socratic" not in f.as_posix()]
    rows: list[Row] = []
    for file in files:
        for raw in read_rows(file):
            answer = after_mark(text_of(raw, file, "answer"), MAX_ANSWER_CHARS)
            if answer is None:
                raise ValueError(f"{file}: an answer without its '#### number': {raw['answer']!r:.80}")
            message = prompt(text_of(raw, file, "question"))
            rows.append(make_row(DATA_SOURCE, message, answer.replace(",", ""), split, len(rows)))
    return rows
