"""The data: columns, the form of prompts, their lengths, and enough rows for a batch."""

import heapq
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from recipe.fully_async_policy.settings.data_file import DataFile
from recipe.fully_async_policy.settings.errors import SettingError, choices, wrong
from recipe.fully_async_policy.settings.model import read_tokenizer
from recipe.tasks.rows import prompt_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERLS_DEFAULT = "~/data/rlhf/"
NO_DATA = "data.train_files: not given; begin with +task=NAME, or give a file"
_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of chat messages. A chat template may know others, which its text has in quotes."""
_OF_THE_REWARD = ("data_source", "reward_model", "extra_info")
_SAMPLE = 256
"""Prompts whose length is counted before the start: 30 ms. scripts.check_data counts all."""


@dataclass(frozen=True)
class Sample:
    """The first row of a data source, as the reward gets it."""

    place: str
    """The setting with its file, and the row."""
    data_source: Any
    ground_truth: Any
    extra_info: dict[str, Any]


def check_given(data: DictConfig) -> None:
    """Refuse a configuration without a task: the sizes and files of `data` are examples of verl's."""
    missing = [f"data.{part}" for part in ("train_files", "val_files") if str(data[part]).startswith(VERLS_DEFAULT)]
    if len(missing) == 1:
        raise SettingError(f"{missing[0]}: not given; give a file, in the preset or as {missing[0]}=FILE")
    if missing:
        raise SettingError(NO_DATA)


def check_data(config: DictConfig, tokenizer: "PreTrainedTokenizerBase | None") -> list[Sample]:
    """Refuse data on which no run could train. Returns a row of every data source.

    Args:
        tokenizer: the model's; None: prompts are not counted.
    """
    files, of_training = check_rows(config, "train_files")
    if files:
        _check_enough(config, sum(file.count for file in files))
        if tokenizer is not None:
            _check_lengths(config, files, tokenizer)
    _, of_validation = check_rows(config, "val_files")
    return list((of_validation | of_training).values())


def check_rows(config: DictConfig, setting: str) -> tuple[list[DataFile], dict[Any, Sample]]:
    """Refuse files that verl cannot read, and rows that it cannot use.

    Args:
        setting: of `data`: train_files or val_files.

    Returns:
        The files, and the first row of every data source; nothing where a dataset class of the user's own reads them.
    """
    given = config.data[setting]
    files = [DataFile(f"data.{setting}", path) for path in (given if isinstance(given, list | ListConfig) else [given])]
    if not files:
        raise SettingError(f"data.{setting}=[]: give at least one file")
    if own := config.data.custom_cls.path:
        if not own.startswith("pkg://") and not Path(own).is_file():
            raise wrong(config, "data.custom_cls.path", "no such file; give the file of the dataset's class")
        return [], {}
    samples: dict[Any, Sample] = {}
    for file in files:
        samples = {**check_file(file, config), **samples}
    return files, samples


def check_file(file: DataFile, config: DictConfig) -> dict[Any, Sample]:
    """Refuse a column that is missing, and a row of which no reward or no model can make sense.

    Returns:
        The first row of every data source.
    """
    needed = (config.data.prompt_key, "data_source", "reward_model")
    if missing := next((column for column in needed if column not in file.columns), None):
        raise SettingError(f"{file.name}: column {missing!r} is missing; verl needs {', '.join(needed)}")
    samples: dict[Any, Sample] = {}
    is_role = cache(lambda role: role in _ROLES or _in_chat_template(role, config.actor_rollout_ref.model))
    for number, row in enumerate(file.rows(needed[0], *_OF_THE_REWARD)):
        if why := _why_unusable(row, needed[0], is_role):
            raise SettingError(f"{file.name}: row {number}: {why}")
        if row["data_source"] not in samples:
            samples[row["data_source"]] = _sample(file, number, row)
    return samples


def _why_unusable(row: dict[str, Any], key: str, is_role: Callable[[str], bool]) -> str | None:
    """What is wrong with a row, whose prompt is in the column `key`."""
    prompt, reward, extra = row[key], row["reward_model"], row.get("extra_info")
    if not isinstance(prompt, list) or not prompt or not all(_has(message, "role", "content") for message in prompt):
        return f"{key!r} is {reprlib.repr(prompt)}; make it a list of messages, [{{'role': 'user', 'content': TEXT}}]"
    for message in prompt:
        role, content = message["role"], message["content"]
        if not isinstance(content, str | list):
            return f"a message of {key!r} has the content {content}; make it text"
        if not isinstance(role, str) or not is_role(role):
            return f"a message of {key!r} has the role {role!r}; {choices(role, _ROLES)}"
    if not _has(reward, "ground_truth") or reward["ground_truth"] is None:
        words = (
            "'reward_model' has no ground_truth; make it {'style': 'rule', 'ground_truth': ...} with what the reward"
        )
        return f"{words} compares with, or '' where it compares with nothing"
    if extra is not None and not isinstance(extra, dict):
        return f"'extra_info' is {extra!r}; make it a record, {{'index': 0}}"
    return None


def _has(value: Any, *names: str) -> bool:
    return isinstance(value, dict) and all(name in value for name in names)


def _in_chat_template(role: str, model: DictConfig) -> bool:
    """Whether the chat template of a model that is on this machine has the role in quotes."""
    if not Path(model.path).is_dir():
        return False
    template = str(read_tokenizer(model).chat_template)
    return f"'{role}'" in template or f'"{role}"' in template


def all_samples(file: DataFile) -> Iterator[Sample]:
    """Every row of the file."""
    return (_sample(file, number, row) for number, row in enumerate(file.rows(*_OF_THE_REWARD)))


def _sample(file: DataFile, number: int, row: dict[str, Any]) -> Sample:
    place, truth = f"{file.name}: row {number}", row["reward_model"]["ground_truth"]
    return Sample(place, row["data_source"], truth, row.get("extra_info") or {})


def _check_enough(config: DictConfig, rows: int) -> None:
    most, batch = config.data.train_max_samples, config.data.train_batch_size
    used = min(rows, most) if most > 0 else rows
    if used < batch:
        where = "data.train_files has" if used == rows else "data.train_max_samples leaves"
        words = f"{where} {used} prompts, less than one batch; lower it, or give more data"
        raise wrong(config, "data.train_batch_size", words)


def _check_lengths(config: DictConfig, files: list[DataFile], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a limit that cuts the longest prompt, or that no prompt keeps; with a prompt of text alone."""
    limit, filtered, key = config.data.max_prompt_length, config.data.filter_overlong_prompts, config.data.prompt_key
    if not filtered and config.data.truncation != "error":
        return
    most = heapq.nsmallest if filtered else heapq.nlargest
    for file in files:
        prompts = (row[key] for row in file.rows(key))
        of_text = (prompt for prompt in prompts if all(isinstance(m["content"], str) for m in prompt))
        sample = most(_SAMPLE, of_text, key=lambda prompt: sum(len(message["content"]) for message in prompt))
        lengths = counted(tokenizer, sample, config)
        if filtered and lengths and min(lengths) > limit:
            words = f"the prompts of {file.name} have {min(lengths)} tokens and more; raise it"
            raise wrong(config, "data.max_prompt_length", words)
        if not filtered and lengths and max(lengths) > limit:
            words = f"a prompt of {file.name} has {max(lengths)} tokens and would be cut; raise it, or set"
            raise wrong(config, "data.max_prompt_length", f"{words} data.filter_overlong_prompts=true")


def counted(tokenizer: "PreTrainedTokenizerBase", prompts: list[Any], config: DictConfig) -> list[int]:
    """Tokens of each prompt, with the run's arguments of the chat template, which may refuse a prompt."""
    settings = {name: value for name, value in config.data.apply_chat_template_kwargs.items() if name != "tokenize"}
    try:
        return prompt_lengths(tokenizer, prompts, **settings)
    except Exception as error:  # templates raise errors of their own
        words = f"the chat template refuses a prompt ({error}); mend the prompt's roles"
        setting = "actor_rollout_ref.model.path"
        raise wrong(config, setting, f"{words}, or give actor_rollout_ref.model.custom_chat_template") from None
