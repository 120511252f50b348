"""Problems as the policy sees them, and what its responses are worth: the rows and the reward of the real stack."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedPrompts:
    """N tokenised problems, padded on the left."""

    tokens: Tensor
    """[N, P]"""
    mask: Tensor
    """[N, P] false on padding."""
    truths: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.truths)

    def take(self, rows: list[int]) -> "TokenizedPrompts":
        """The problems of these rows."""
        return TokenizedPrompts(self.tokens[rows], self.mask[rows], [self.truths[row] for row in rows])


def load_prompts(
    file: str | Path, tokenizer: PreTrainedTokenizerBase, longest: int, first: int = -1
) -> TokenizedPrompts:
    """The first `first` rows (-1: all) of a parquet file that scripts.prepare_data wrote for countdown.

    Raises:
        ValueError: a prompt has more than `longest` tokens.
    """
    table = pd.read_parquet(file)
    table = table if first < 0 else table.head(first)
    texts = [
        tokenizer.apply_chat_template(list(row), add_generation_prompt=True, tokenize=False) for row in table["prompt"]
    ]
    ids = tokenizer(texts)["input_ids"]
    width = max(map(len, ids))
    if width > longest:
        raise ValueError(f"data.max_prompt_length={longest}: {file} has a prompt of {width} tokens; raise it")
    tokens = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in ids])
    return TokenizedPrompts(tokens, mask, [model["ground_truth"] for model in table["reward_model"]])


class Task:
    """Training and held-out problems, and the reward.

    Args:
        data: the `data` settings of the run.
        reward: the `reward` settings; their custom reward function is used.
        model_path: the folder with the tokenizer.
    """

    def __init__(self, data: Any, reward: Any, model_path: str) -> None:
        from verl.utils.import_utils import load_extern_object

        custom = reward.custom_reward_function
        self._compute_score = load_extern_object(custom.path, custom.name)
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.train = load_prompts(data.train_files, self._tokenizer, data.max_prompt_length, data.train_max_samples)
        self.held_out = load_prompts(data.val_files, self._tokenizer, data.max_prompt_length, data.val_max_samples)

    def rewards(self, response: Tensor, truths: list[dict[str, Any]]) -> Tensor:
        """[B, T] responses -> [B] float64; `truths` has one entry per prompt, whose samples are adjacent."""
        texts = self._tokenizer.batch_decode(response, skip_special_tokens=True)
        samples = len(texts) // len(truths)
        scores = [
            self._compute_score(
                data_source="countdown", solution_str=text, ground_truth=truths[i // samples], extra_info=None
            )["score"]
            for i, text in enumerate(texts)
        ]
        return torch.tensor(scores, dtype=torch.float64)
