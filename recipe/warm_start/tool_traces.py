"""Traces of the agent loop `simpletir` for the task `calculate`, some of them right: programs, results, answers."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import PreTrainedTokenizerBase

from recipe.tasks.calculate import PHRASES, Question, random_question
from recipe.tasks.tool_use.turns import OBSERVATION, read_turn
from recipe.warm_start.tokenizer import phrase_tokenizer

NO_OUTPUT = "no output"
"""What the agent loop shows of a program that prints nothing."""
RESPONSE_TOKENS = 64
"""The most tokens of a first turn that is drawn to test the model."""
_FIXED_SHARE = 0.25
"""The share of right traces whose first program forgets to print."""
MISTAKES = {"program": 10, "unread": 2, "unanswered": 1, "unprinted": 2, "guess": 3, "no_block": 1, "unclosed": 1}
"""The mistakes of wrong traces, by frequency. A wrong program is more frequent than the right one, so that a policy has
to learn the right one, and not only to prefer what it writes most often already."""


@dataclass(frozen=True)
class Part:
    """A part of a trace: what the policy writes, which is taught, or what it reads of a program."""

    text: str
    taught: bool = True


@dataclass(frozen=True)
class ToolTraces:
    """The lesson of prepared `calculate` data: the held-out prompts, and traces of other questions."""

    prompts: list[str]
    programs: list[str]
    """Of each prompt, the program that prints the answer."""
    most_tokens: int = RESPONSE_TOKENS

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The facts about the data that change the model."""
        return {"task": "calculate", "held_out": hashlib.sha256("\n".join(self.prompts).encode()).hexdigest()[:16]}

    def tokenizer(self, seed: int) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the task's phrases; the same for every seed."""
        return phrase_tokenizer(PHRASES)

    def examples(self, correct_fraction: float, rng: random.Random) -> Iterator[tuple[str, list[Part]]]:
        """Yield pairs of a prompt and a trace, which is right with this probability, without end."""
        held_out = set(self.prompts)
        while True:
            question = random_question(rng)
            if question.prompt not in held_out:
                right = rng.random() < correct_fraction
                yield question.prompt, right_trace(question, rng) if right else wrong_trace(question, rng)

    def solved(self, row: int, response: str) -> float:
        """Return 1 if the first program of a response to a held-out question is the right one, else 0."""
        code = read_turn(response, r"\\boxed\{").code
        return float(code is not None and code.strip() == self.programs[row])


def load_tool_traces(data: Path) -> ToolTraces:
    """Read the data of `python -m scripts.prepare_data calculate`."""
    rows = pd.read_parquet(data / "val.parquet")
    return ToolTraces([row[0]["content"] for row in rows["prompt"]], [row["program"] for row in rows["extra_info"]])


def right_trace(question: Question, rng: random.Random) -> list[Part]:
    """The program, the result, and the result as the answer; some first programs print nothing."""
    first = [*run(_unprinted(question.program))] if rng.random() < _FIXED_SHARE else []
    return [*first, *run(question.program), _boxed(question.answer)]


def wrong_trace(question: Question, rng: random.Random) -> list[Part]:
    """A trace with one of MISTAKES; for a few questions the wrong program's result is right all the same."""
    guess = _boxed(str(rng.randrange(10 ** rng.randrange(1, 5))))
    match rng.choices(list(MISTAKES), list(MISTAKES.values()))[0]:
        case "program":
            return [*run(question.mistake), _boxed(output_of(question.mistake))]
        case "unread":
            return [*run(question.program), guess]
        case "unanswered":
            return [*run(question.program), Part("")]
        case "unprinted":
            return [*run(_unprinted(question.program)), guess]
        case "guess":
            return [guess]
        case "no_block":
            return [Part(str(rng.randrange(10000)))]
        case _:
            return [Part(f"```python\n{question.program}")]


def run(program: str) -> tuple[Part, Part]:
    """A turn with this program, and what the agent loop appends."""
    return Part(f"```python\n{program}\n```\n"), Part(OBSERVATION.format(output_of(program)), taught=False)


def output_of(program: str) -> str:
    """What one of this module's own programs prints; they run here, without the sandbox."""
    with redirect_stdout(StringIO()) as printed:
        exec(program, {})
    return printed.getvalue().strip() or NO_OUTPUT


def _boxed(answer: str) -> Part:
    return Part(f"\\boxed{{{answer}}}")


def _unprinted(program: str) -> str:
    before, _, printed = program.partition("print(")
    return before + printed.removesuffix(")")
