"""The rows of any task, each with an answer: a warm start teaches most of them, and tests the model on the others."""

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from recipe.tasks.rows import SUFFIXES, Row, read_rows
from recipe.warm_start.tokenizer import byte_tokenizer

Chat = list[dict[str, str]]
MOST_HELD_OUT = 256
_SHORTEST_PHRASE = 4


@dataclass(frozen=True)
class AnsweredRows:
    """The rows of a file. The last tenth, at most MOST_HELD_OUT rows, is held out for tests, and not taught."""

    taught: list[tuple[Chat, str]]
    held_out: list[tuple[Chat, str]]

    @property
    def prompts(self) -> list[Chat]:
        """The prompts of the held-out rows."""
        return [chat for chat, _ in self.held_out]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The facts about the rows that change the model."""
        text = json.dumps([self.taught, self.held_out], sort_keys=True)
        return {"rows": hashlib.sha256(text.encode()).hexdigest()[:16]}

    @property
    def most_tokens(self) -> int:
        """The most tokens of an answer with its end: a token is a byte at least."""
        return 1 + max(len(answer.encode()) for _, answer in [*self.taught, *self.held_out])

    def tokenizer(self, seed: int) -> PreTrainedTokenizerBase:
        """Return a tokenizer with a token per byte; the same for every seed."""
        return byte_tokenizer(self.phrases())

    def solved(self, row: int, response: str) -> float:
        """Return 1 if the response to a held-out row is the answer, apart from spaces around it, else 0."""
        return float(response.strip() == self.held_out[row][1].strip())

    def examples(self, correct_fraction: float, rng: random.Random) -> Iterator[tuple[Chat, str]]:
        """Yield (chat, response) pairs without end: the row's answer with this probability, else a random row's."""
        while True:
            chat, answer = rng.choice(self.taught)
            yield chat, answer if rng.random() < correct_fraction else rng.choice(self.taught)[1]

    def phrases(self) -> list[str]:
        """Return the common begin and end of the first questions of all prompts, cut at the edge of a word."""
        chats = [chat for chat, _ in [*self.taught, *self.held_out]]
        texts = [next((m["content"] for m in chat if m["role"] == "user"), chat[0]["content"]) for chat in chats]
        start = re.sub(r"\w+$", "", os.path.commonprefix(texts))
        rests = [text[len(start) :][::-1] for text in texts]
        end = re.sub(r"^\w+", "", os.path.commonprefix(rests)[::-1])
        return [phrase for phrase in dict.fromkeys((start, end)) if len(phrase) >= _SHORTEST_PHRASE]


def load_answered_rows(file: Path, column: str) -> AnsweredRows:
    """Read a file of verl's schema.

    Args:
        file: parquet or JSON lines.
        column: the column with the answer, as the model is to write it; a.b for the field b of a nested column a.

    Raises:
        ValueError: no such file, fewer than two rows with different prompts, or a row without prompt or answer.
    """
    if not file.is_file() or file.suffix not in SUFFIXES:
        raise ValueError(f"data={file}: no such file of rows; give a {', '.join(SUFFIXES)} file")
    pairs = [(_chat(row, file), _answer(row, column, file)) for row in read_rows(file)]
    count = min(MOST_HELD_OUT, max(1, len(pairs) // 10))
    held_out = pairs[-count:]
    seen = {json.dumps(chat) for chat, _ in held_out}
    taught = [(chat, answer) for chat, answer in pairs[:-count] if json.dumps(chat) not in seen]
    if not taught:
        raise ValueError(f"data={file}: {len(pairs)} rows; give more, with different prompts")
    return AnsweredRows(taught, held_out)


def _chat(row: Row, file: Path) -> Chat:
    chat = row.get("prompt")
    if not isinstance(chat, list) or not chat or not all(map(_is_message, chat)):
        raise ValueError(f"data={file}: column 'prompt' must hold chat messages of text: {chat!r:.80}")
    return [{"role": message["role"], "content": message["content"]} for message in chat]


def _is_message(value: Any) -> bool:
    text = [value.get("role"), value.get("content")] if isinstance(value, dict) else [None]
    return all(isinstance(one, str) and one for one in text)


def _answer(row: Row, column: str, file: Path) -> str:
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"answers={column}: {file} has no such column; it has {', '.join(_columns(row))}")
        value = value[name]
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError(f"answers={column}: {file} holds {value!r:.80} where the text of an answer is expected")
    return str(value)


def _columns(row: Row) -> Iterator[str]:
    """The names that `answers` may have: of a nested column, those of its fields that hold an answer."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from (f"{name}.{field}" for field, one in value.items() if isinstance(one, str | int | float))
        else:
            yield name
