"""Problems as the policy sees them, and what its responses are worth: the rows and the reward of the real stack."""

import asyncio
import inspect
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lab.simulator.tree import TokenTree
from recipe.tasks.rows import SINGLE_TURN, read_rows
from verl_vcpo.dataset.shares import check_sizes
from verl_vcpo.user_code.errors import UserCodeError, of_response, raised, with_prompt
from verl_vcpo.user_code.reward_function import RewardFunction, checked

_READ_TOGETHER = 128
"""Prompts whose hidden states fit the processor's caches."""

_FILE = "file of the row"


@dataclass(frozen=True)
class Problem:
    """What the reward is told of a row."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    prompt: list[dict[str, Any]] = field(default_factory=list)
    """Its messages."""


@dataclass(frozen=True)
class TokenizedPrompts:
    """N tokenised problems, padded on the left."""

    tokens: Tensor
    """[N, P]"""
    mask: Tensor
    """[N, P] false on padding."""
    problems: list[Problem]
    of_files: list[int] = field(default_factory=list)
    """How many of them are of each file, one file after the other; empty for a batch."""

    def __len__(self) -> int:
        return len(self.problems)

    @cached_property
    def trees(self) -> list[TokenTree]:
        """The prompts, at most `_READ_TOGETHER` in each tree."""
        parts = zip(self.tokens.split(_READ_TOGETHER), self.mask.split(_READ_TOGETHER), strict=True)
        return [TokenTree.of(tokens, mask, tokens[:, :1], torch.ones(len(tokens), 1).bool()) for tokens, mask in parts]

    def take(self, rows: list[int]) -> "TokenizedPrompts":
        """The problems of these rows."""
        return TokenizedPrompts(self.tokens[rows], self.mask[rows], [self.problems[row] for row in rows])


@dataclass(frozen=True)
class Scores:
    """What B responses are worth."""

    reward: Tensor
    """[B] float64: the reward function's `score`, which is trained on."""
    accuracy: Tensor
    """[B] float64: its `acc`, which a validation reports; the score where it gives none."""


def load_prompts(setting: str, data: Any, tokenizer: PreTrainedTokenizerBase) -> TokenizedPrompts:
    """The rows of `data.train_files` or `data.val_files`, at most as many as `data.*_max_samples` says.

    Args:
        setting: "train" or "val".
        data: the `data` settings of the run.
        tokenizer: the policy's.

    Raises:
        ValueError: a prompt has more than `data.max_prompt_length` tokens, and such rows are not to be left out.
    """
    files = data[f"{setting}_files"]
    files = [files] if isinstance(files, str | Path) else list(files)
    table = pd.concat([_table(Path(f)).assign(**{_FILE: i}) for i, f in enumerate(files)], ignore_index=True)
    loops = set(table["agent_name"]) - {SINGLE_TURN} if "agent_name" in table else set()
    if loops:
        raise ValueError(
            f"data.{setting}_files={', '.join(files)}: rows ask for the agent loop {loops.pop()!r} (agent_name); the "
            f"simulator knows {SINGLE_TURN} only"
        )
    first, longest = data[f"{setting}_max_samples"], data.max_prompt_length
    table = table if first < 0 else table.head(first)
    texts = [
        tokenizer.apply_chat_template(list(row), add_generation_prompt=True, tokenize=False)
        for row in table[data.prompt_key]
    ]
    ids = tokenizer(texts)["input_ids"]
    if data.filter_overlong_prompts:
        table = table[[len(row) <= longest for row in ids]]
        ids = [row for row in ids if len(row) <= longest]
    width = max(map(len, ids), default=0)
    if not 0 < width <= longest:
        raise ValueError(
            f"data.max_prompt_length={longest}: {', '.join(files)} has a prompt of {width} tokens; raise it"
            if width
            else f"data.max_prompt_length={longest}: {', '.join(files)} has no prompt as short as that; raise it"
        )
    tokens = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in ids])
    of_files = [int((table[_FILE] == i).sum()) for i in range(len(files))]
    problems = [_problem(row, data.prompt_key) for row in table.to_dict("records")]
    return TokenizedPrompts(tokens, mask, problems, of_files)


def _table(file: Path) -> pd.DataFrame:
    return pd.read_parquet(file) if file.suffix == ".parquet" else pd.DataFrame(read_rows(file))


def _problem(row: dict[str, Any], prompt_key: str) -> Problem:
    extra_info = row.get("extra_info")
    extra_info = extra_info if isinstance(extra_info, dict) else {}
    return Problem(row["data_source"], row["reward_model"]["ground_truth"], extra_info, list(row[prompt_key]))


class Task:
    """Training and held-out problems, and the reward.

    Args:
        data: the `data` settings of the run.
        reward: the function that scores responses. It runs in this process, without a limit of time.
        model_path: the folder with the tokenizer.

    Raises:
        LoadError: the reward function cannot be loaded.
        ValueError: a file does not fit `data`.
    """

    def __init__(self, data: Any, reward: RewardFunction, model_path: str) -> None:
        self._reward, self._compute_score = reward, reward.load()
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.train = load_prompts("train", data, self._tokenizer)
        if data.shares:
            check_sizes(self.train.of_files, data)
        self.held_out = load_prompts("val", data, self._tokenizer)
        if len(self.train) < data.train_batch_size:
            raise ValueError(
                f"data.train_batch_size={data.train_batch_size}: there are {len(self.train)} training prompts; lower it"
            )

    def score(self, response: Tensor, problems: list[Problem]) -> Scores:
        """What [B, T] responses are worth; `problems` has one entry per prompt, whose samples are adjacent."""
        texts = self._tokenizer.batch_decode(response, skip_special_tokens=True)
        samples = len(texts) // len(problems)
        results = [self._score(problems[i // samples], text) for i, text in enumerate(texts)]
        reward, accuracy = zip(*results, strict=True)
        return Scores(torch.tensor(reward, dtype=torch.float64), torch.tensor(accuracy, dtype=torch.float64))

    def accuracies(self, accuracy: Tensor, problems: list[Problem]) -> dict[str, float]:
        """The mean of [B] accuracies on each data source; `problems` as of `score`."""
        samples = len(accuracy) // len(problems)
        sources = [problem.data_source for problem in problems for _ in range(samples)]
        return {one: accuracy[[of == one for of in sources]].mean().item() for one in dict.fromkeys(sources)}

    def _score(self, problem: Problem, text: str) -> tuple[float, float]:
        """(score, accuracy) of one response. Raises UserCodeError: there is no score."""
        try:
            result = self._compute_score(
                data_source=problem.data_source,
                solution_str=text,
                ground_truth=problem.ground_truth,
                extra_info=dict(problem.extra_info),  # a reward may write into it
                **self._reward.fixed,
            )
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except (Exception, SystemExit) as error:
            raise self._of_response(raised(error), problem, text) from error
        try:
            plain = checked(result)
        except UserCodeError as error:
            raise self._of_response(error, problem, text) from None
        return plain["score"], plain["acc"]

    def _of_response(self, error: UserCodeError, problem: Problem, text: str) -> UserCodeError:
        """The same error, with what was to be scored."""
        reward, row = f"{self._reward.path}:{self._reward.name}", problem.extra_info.get("index")
        error = of_response(error, reward, row, problem.data_source, text)
        return UserCodeError(error.what, with_prompt(error.fix, problem.prompt))
