"""The data: columns, the form of prompts, their lengths, enough rows for a batch; and what may not be as meant."""

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from recipe.fully_async_policy.settings.data_file import DataFile
from recipe.fully_async_policy.settings.data_row import OF_A_SAMPLE, RowRules
from recipe.fully_async_policy.settings.errors import SettingError, wrong
from recipe.tasks.rows import prompt_lengths
from verl_vcpo.common.data_columns import OF_A_RESPONSE, OF_THE_LOOP, OF_THE_REWARD, OF_THE_ROW
from verl_vcpo.common.data_rows import DataRow, data_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERLS_DEFAULT = "~/data/rlhf/"
NO_DATA = "data.train_files: not given; begin with +task=NAME, or give a file"
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
        if config.data.levels is not None:
            _check_numbered(files)
    held_out, of_validation = check_rows(config, "val_files")
    if tokenizer is not None:
        check_lengths(config, [*files, *held_out], tokenizer)
    if said := _of_both(files, held_out, config.data.prompt_key):
        print(said, flush=True)
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
    """Refuse a column that is missing, and a row of which no reward or no model can make sense. Say what is not used.

    Returns:
        The first row of every data source.
    """
    needed = (config.data.prompt_key, "data_source", "reward_model")
    if missing := next((column for column in needed if column not in file.columns), None):
        raise SettingError(f"{file.name}: column {missing!r} is missing; verl needs {', '.join(needed)}")
    samples: dict[Any, Sample] = {}
    rules = RowRules(config)
    keys: dict[str, None] = {}
    for number, row in enumerate(file.rows(*rules.columns)):
        if why := rules.why_unusable(row):
            raise SettingError(f"{file.name}: row {number}: {why}")
        keys |= dict.fromkeys(row.get("extra_info") or ())
        if row["data_source"] not in samples:
            samples[row["data_source"]] = _sample(file, number, row)
    for line in _of_columns(file, config.data.prompt_key, keys):
        print(line, flush=True)
    return samples


def all_samples(file: DataFile) -> Iterator[Sample]:
    """Every row of the file."""
    return (_sample(file, number, row) for number, row in enumerate(file.rows(*OF_A_SAMPLE)))


def _sample(file: DataFile, number: int, row: dict[str, Any]) -> Sample:
    place, truth = f"{file.name}: row {number}", row["reward_model"]["ground_truth"]
    return Sample(place, row["data_source"], truth, row.get("extra_info") or {})


def _check_numbered(files: list[DataFile]) -> None:
    """Refuse rows that `data.levels` could not tell apart."""
    seen: set[DataRow] = set()
    for file in files:
        for number, row in enumerate(file.rows("extra_info")):
            index = (row.get("extra_info") or {}).get("index")
            if index is None or data_row(index) in seen:
                is_it = "missing" if index is None else f"{index!r} again"
                words = "data.levels tells rows by it; number the rows of all files"
                raise SettingError(f"{file.name}: row {number}: extra_info.index is {is_it}; {words}")
            seen.add(data_row(index))


def _check_enough(config: DictConfig, rows: int) -> None:
    most, batch = config.data.train_max_samples, config.data.train_batch_size
    used = min(rows, most) if most > 0 else rows
    if used < batch:
        where = "data.train_files has" if used == rows else "data.train_max_samples leaves"
        words = f"{where} {used} prompts, less than one batch; lower it, or give more data"
        raise wrong(config, "data.train_batch_size", words)


def check_lengths(config: DictConfig, files: list[DataFile], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse prompts that the chat template cannot read, and a limit that cuts the longest or that none keeps."""
    limit, filtered, key = config.data.max_prompt_length, config.data.filter_overlong_prompts, config.data.prompt_key
    cut = not filtered and config.data.truncation != "error"
    most = heapq.nsmallest if filtered else heapq.nlargest
    for file in files:
        prompts = (row[key] for row in file.rows(key))
        sample = most(_SAMPLE, prompts, key=lambda prompt: sum(len(str(message["content"])) for message in prompt))
        lengths = counted(tokenizer, sample, config)
        if filtered and lengths and min(lengths) > limit:
            words = f"the prompts of {file.name} have {min(lengths)} tokens and more; raise it"
            raise wrong(config, "data.max_prompt_length", words)
        if not (filtered or cut) and lengths and max(lengths) > limit:
            words = f"a prompt of {file.name} has {max(lengths)} tokens and would be cut; raise it, or set"
            raise wrong(config, "data.max_prompt_length", f"{words} data.filter_overlong_prompts=true")


def counted(tokenizer: "PreTrainedTokenizerBase", prompts: list[Any], config: DictConfig) -> list[int]:
    """Tokens of each prompt, with the run's arguments of the chat template, which may refuse a prompt."""
    settings = {name: value for name, value in config.data.apply_chat_template_kwargs.items() if name != "tokenize"}
    try:
        if in_parts := _written_as_a_list(tokenizer, prompts, settings):
            words = f"the chat template of the model writes the content {in_parts:.60} of a prompt as it stands here"
            raise wrong(config, "data.prompt_key", f"{words}; make it text")
        return prompt_lengths(tokenizer, prompts, **settings)
    except SettingError:
        raise
    except Exception as error:  # templates raise errors of their own
        words = f"the chat template refuses a prompt ({error}); mend the prompt's roles"
        setting = "actor_rollout_ref.model.path"
        raise wrong(config, setting, f"{words}, or give actor_rollout_ref.model.custom_chat_template") from None


def _written_as_a_list(tokenizer: "PreTrainedTokenizerBase", prompts: list[Any], template: dict[Any, Any]) -> Any:
    """A content in parts that the chat template would give to the model as Python shows it, as text; None: none."""
    for prompt in prompts:
        parts = [str(message["content"]) for message in prompt if isinstance(message["content"], list)]
        if parts:
            text = str(tokenizer.apply_chat_template(prompt, tokenize=False, **template))
            return next((one for one in parts if one in text), None)
    return None


def _of_columns(file: DataFile, prompt_key: str, of_extra_info: Iterable[str]) -> Iterator[str]:
    """A line on the columns whose names the run uses for something else, and one on such keys of `extra_info`."""
    others = {*OF_THE_LOOP, *OF_A_RESPONSE} - {prompt_key}
    if taken := [name for name in file.columns if name in others]:
        yield f"{file.name}: not used, as the run makes its own: {_column(taken)}"
    for name in file.columns:
        if name in OF_THE_ROW and name != prompt_key:
            yield f"{file.name}: not used: {_column([name])}; it is read from {OF_THE_ROW[name]}"
    if replaced := [name for name in of_extra_info if name in OF_THE_REWARD]:
        keys = ", ".join(replaced)
        yield f"{file.name}: the reward gets the response's own {keys} in extra_info; rename the row's to keep it"


def _column(names: list[str]) -> str:
    return f"column{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _of_both(training: list[DataFile], held_out: list[DataFile], prompt_key: str) -> str | None:
    """A line on held-out rows that are trained on, too: the same prompt and ground truth; None where there are none."""
    if not training or not held_out:
        return None
    trained = {key for file in training for key in _keys(file, prompt_key)}
    keys = [key for file in held_out for key in _keys(file, prompt_key)]
    both = sum(key in trained for key in keys)
    words = "they are trained on, so their accuracy does not tell what is learned of other rows"
    return f"data.val_files: {both} of {len(keys)} rows are in data.train_files, too: {words}" if both else None


def _keys(file: DataFile, prompt_key: str) -> Iterator[int]:
    for row in file.rows(prompt_key, "reward_model"):
        yield hash(json.dumps([row[prompt_key], row["reward_model"]["ground_truth"]], sort_keys=True, default=str))
