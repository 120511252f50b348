"""The data: columns, the form of prompts, their lengths, and enough rows for a batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from omegaconf import DictConfig, ListConfig

from recipe.fully_async_policy.settings.data_file import DataFile
from recipe.fully_async_policy.settings.errors import SettingError, choices
from recipe.fully_async_policy.settings.model import read_tokenizer
from recipe.tasks.prompt_lengths import prompt_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERLS_DEFAULT = "~/data/rlhf/"
NO_DATA = "data.train_files: not given; begin with +task=NAME, or give a file"
MESSAGES = "a list of messages, [{'role': 'user', 'content': TEXT}]"
_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of chat messages. A chat template may know others, which its text has in quotes."""
_OF_THE_REWARD = ["data_source", "reward_model", "extra_info"]
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


def check_data(config: DictConfig, tokenizer: "PreTrainedTokenizerBase | None") -> list[Sample]:
    """Refuse data on which no run could train. Returns a row of every data source.

    Args:
        tokenizer: the model's; None: prompts are not counted.

    Raises:
        SettingError: the first file, column or row that is wrong.
    """
    files, of_training = check_rows(config, "train_files")
    if files:
        _check_enough(config, sum(file.rows for file in files))
        if tokenizer is not None:
            _check_lengths(config, files, tokenizer)
    _, of_validation = check_rows(config, "val_files")
    return [*of_training.values(), *(row for source, row in of_validation.items() if source not in of_training)]


def check_rows(config: DictConfig, setting: str) -> tuple[list[DataFile], dict[Any, Sample]]:
    """Refuse files that verl cannot read, and rows that it cannot use.

    Args:
        setting: of `data`: train_files or val_files.

    Returns:
        The files, and the first row of every data source; nothing where a dataset class of the user's own reads them.

    Raises:
        SettingError: the first file, column or row that is wrong.
    """
    files = list(_files(config, setting))
    if own := config.data.custom_cls.path:
        if not own.startswith("pkg://") and not Path(own).is_file():
            raise SettingError(f"data.custom_cls.path={own}: no such file; give the file of the dataset's class")
        return [], {}
    samples: dict[Any, Sample] = {}
    for file in files:
        check_file(file, config)
        for source, sample in sources(file).items():
            samples.setdefault(source, sample)
    return files, samples


def check_file(file: DataFile, config: DictConfig) -> None:
    """Refuse columns that verl cannot read, and rows of which no reward or no model can make sense.

    Raises:
        SettingError: the first column or row that is wrong.
    """
    _check_columns(file, config.data.prompt_key)
    _check_prompts(file, config.data.prompt_key, config.actor_rollout_ref.model)
    _check_truths(file)


def check_given(data: DictConfig) -> None:
    """Refuse a configuration without a task: its sizes and files are examples of verl's.

    Args:
        data: the settings `data`.

    Raises:
        SettingError: files were not given.
    """
    missing = [f"data.{part}" for part in ("train_files", "val_files") if str(data[part]).startswith(VERLS_DEFAULT)]
    if len(missing) == 1:
        raise SettingError(f"{missing[0]}: not given; give a file, in the preset or as {missing[0]}=FILE")
    if missing:
        raise SettingError(NO_DATA)


def check_shares(data: DictConfig) -> None:
    """Refuse shares that do not belong to the training files.

    Args:
        data: the settings `data`.

    Raises:
        SettingError: there is not one share for each of several files, or their order could not be drawn again.
    """
    if data.shares is None:
        return
    setting, files = f"data.shares=[{','.join(map(str, data.shares))}]", data.train_files
    names = list(files) if isinstance(files, ListConfig) else [files]
    if len(names) == 1:
        raise SettingError(f"{setting}: data.train_files is one file; leave it out, or give a list of files")
    if len(names) != len(data.shares):
        raise SettingError(f"{setting}: give a share for each of the {len(names)} data.train_files, {', '.join(names)}")
    if data.shuffle and data.seed is None:
        raise SettingError(f"{setting}: needs data.seed, from which a resumed run draws the same order; give a number")
    if data.custom_cls.path:
        raise SettingError(f"{setting}: data.custom_cls={data.custom_cls.path} reads the files itself; leave one out")


def _files(config: DictConfig, setting: str) -> Iterator[DataFile]:
    given = config.data[setting]
    paths = list(given) if isinstance(given, list | ListConfig) else [given]
    if not paths:
        raise SettingError(f"data.{setting}=[]: give at least one file")
    for path in paths:
        yield DataFile(f"data.{setting}", path)


def _check_columns(file: DataFile, prompt_key: str) -> None:
    """Refuse a file that lacks a column, or has one of another type."""
    needed = (prompt_key, "data_source", "reward_model")
    for column in needed:
        if column not in file.schema.names:
            raise SettingError(f"{file.name}: column {column!r} is missing; verl needs {', '.join(needed)}")
    prompt, reward = file.schema.field(prompt_key).type, file.schema.field("reward_model").type
    is_list = pa.types.is_list(prompt) or pa.types.is_large_list(prompt) or pa.types.is_null(prompt)
    message = getattr(prompt, "value_type", None)
    if not is_list or (message is not None and not _has(message, "role", "content")):
        raise SettingError(f"{file.name}: column {prompt_key!r} is of {_kind(prompt)}; make it {MESSAGES}")
    if not _has(reward, "ground_truth"):
        raise SettingError(
            f"{file.name}: column 'reward_model' is of {_kind(reward)}; make it a record with a ground_truth, "
            "{'style': 'rule', 'ground_truth': ...}"
        )
    if "extra_info" in file.schema.names and not _has(extra := file.schema.field("extra_info").type):
        raise SettingError(f"{file.name}: column 'extra_info' is of {_kind(extra)}; make it a record, {{'index': 0}}")


def _kind(found: pa.DataType) -> str:
    return str(found).replace("large_", "")


def _has(kind: pa.DataType, *names: str) -> bool:
    return pa.types.is_null(kind) or (pa.types.is_struct(kind) and all(kind.get_field_index(n) >= 0 for n in names))


def _check_prompts(file: DataFile, prompt_key: str, model: DictConfig) -> None:
    """Refuse a row whose prompt has no message, or a message without content or of a role that the model lacks."""
    for first, batch in file.batches([prompt_key]):
        prompts = batch.column(prompt_key)
        lengths = pc.fill_null(pc.list_value_length(prompts), 0) if not pa.types.is_null(prompts.type) else None
        if lengths is None or pc.any(pc.equal(lengths, 0)).as_py():
            row = first + (0 if lengths is None else pc.index(lengths, 0).as_py())
            raise SettingError(f"{file.name}: row {row}: {prompt_key!r} has no messages; make it {MESSAGES}")
        messages, rows = pc.list_flatten(prompts), pc.list_parent_indices(prompts)
        if pa.types.is_null(messages.type):  # [None] in every row
            raise SettingError(f"{file.name}: row {first}: {prompt_key!r} has no messages; make it {MESSAGES}")
        contents, roles = pc.struct_field(messages, "content"), pc.struct_field(messages, "role")
        if pa.types.is_primitive(contents.type):  # numbers
            raise SettingError(f"{file.name}: the contents of {prompt_key!r} are of {contents.type}; make them text")
        if contents.null_count:
            row = first + rows[_first_of(contents, None)].as_py()
            raise SettingError(f"{file.name}: row {row}: a message of {prompt_key!r} has no content; give it text")
        for role in pc.unique(roles).to_pylist():
            if role not in _ROLES and not _in_chat_template(role, model):
                row = first + rows[_first_of(roles, role)].as_py()
                wrong = "no role" if role is None else f"the role {role!r}"
                raise SettingError(
                    f"{file.name}: row {row}: a message of {prompt_key!r} has {wrong}; {choices(role, _ROLES)}"
                )


def _first_of(column: pa.Array, value: Any) -> int:
    """The first place of a value, which may be None."""
    return pc.index(pc.is_null(column) if value is None else column, value is None or value).as_py()


def _in_chat_template(role: str | None, model: DictConfig) -> bool:
    """Whether the chat template of a model that is on this machine has the role in quotes."""
    if role is None or not Path(model.path).is_dir():
        return False
    template = str(read_tokenizer(model).chat_template)
    return f"'{role}'" in template or f'"{role}"' in template


def _check_truths(file: DataFile) -> None:
    """Refuse a row without a ground truth."""
    for first, batch in file.batches(["reward_model"]):
        truths = batch.column("reward_model")
        if not pa.types.is_null(truths.type):
            truths = pc.struct_field(truths, "ground_truth")
        if truths.null_count:
            row = first + _first_of(truths, None)
            raise SettingError(
                f"{file.name}: row {row}: 'reward_model' has no ground_truth; give what the reward compares with, or "
                "'' where it compares with nothing"
            )


def sources(file: DataFile) -> dict[Any, Sample]:
    """The first row of every data source in the file."""
    found: dict[Any, Sample] = {}
    for first, batch in file.batches(_OF_THE_REWARD):
        names = batch.column("data_source")
        for name in pc.unique(names).to_pylist():
            if name not in found:
                row = _first_of(names, name)
                found[name] = _sample(file, first + row, batch.slice(row, 1).to_pylist()[0])
    return found


def all_samples(file: DataFile) -> Iterator[Sample]:
    """Every row of the file."""
    for first, batch in file.batches(_OF_THE_REWARD):
        for row, record in enumerate(batch.to_pylist()):
            yield _sample(file, first + row, record)


def _sample(file: DataFile, row: int, record: dict[str, Any]) -> Sample:
    return Sample(
        place=f"{file.name}: row {row}",
        data_source=record["data_source"],
        ground_truth=(record["reward_model"] or {}).get("ground_truth"),
        extra_info=record.get("extra_info") or {},
    )


def _check_enough(config: DictConfig, rows: int) -> None:
    most, batch = config.data.train_max_samples, config.data.train_batch_size
    used = min(rows, most) if most > 0 else rows
    if used < batch:
        where = "data.train_files has" if used == rows else "data.train_max_samples leaves"
        raise SettingError(
            f"data.train_batch_size={batch}: {where} {used} prompts, less than one batch; lower it, or give more data"
        )


def _check_lengths(config: DictConfig, files: list[DataFile], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a limit that cuts the longest prompt, or that no prompt keeps; with a prompt of text alone."""
    limit, filtered, key = config.data.max_prompt_length, config.data.filter_overlong_prompts, config.data.prompt_key
    if not filtered and config.data.truncation != "error":
        return
    setting = f"data.max_prompt_length={limit}"
    for file in files:
        lengths = counted(tokenizer, longest_prompts(file, key, shortest=filtered), config)
        if filtered and lengths and min(lengths) > limit:
            raise SettingError(f"{setting}: the prompts of {file.name} have {min(lengths)} tokens and more; raise it")
        if not filtered and lengths and max(lengths) > limit:
            raise SettingError(
                f"{setting}: a prompt of {file.name} has {max(lengths)} tokens and would be cut; raise it, or set "
                "data.filter_overlong_prompts=true"
            )


def longest_prompts(file: DataFile, prompt_key: str, shortest: bool = False) -> list[list[dict[str, Any]]]:
    """Some prompts of text, those with the most characters; `shortest`: those with the fewest."""
    kept: list[tuple[int, list[dict[str, Any]]]] = []
    for _, batch in file.batches([prompt_key]):
        prompts = batch.column(prompt_key)
        contents = pc.struct_field(pc.list_flatten(prompts), "content")
        if not (pa.types.is_string(contents.type) or pa.types.is_large_string(contents.type)):
            return []  # pictures: verl's processor decides about their tokens
        table = pa.table({"row": pc.list_parent_indices(prompts), "characters": pc.utf8_length(contents)})
        sums = table.group_by("row").aggregate([("characters", "sum")])
        order = [("characters_sum", "ascending" if shortest else "descending")]
        for row in sums.sort_by(order).slice(0, _SAMPLE).to_pylist():
            kept.append((row["characters_sum"], prompts[row["row"]].as_py()))
        kept = sorted(kept, key=lambda pair: pair[0], reverse=not shortest)[:_SAMPLE]
    return [prompt for _, prompt in kept]


def counted(tokenizer: "PreTrainedTokenizerBase", prompts: list[list[dict[str, Any]]], config: DictConfig) -> list[int]:
    """Tokens of each prompt, with the run's arguments of the chat template.

    Raises:
        SettingError: the chat template refuses a prompt.
    """
    settings = {name: value for name, value in config.data.apply_chat_template_kwargs.items() if name != "tokenize"}
    try:
        return prompt_lengths(tokenizer, prompts, **settings)
    except Exception as error:  # templates raise errors of their own
        raise SettingError(
            f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}: the chat template refuses a prompt "
            f"({error}); mend the prompt's roles, or give actor_rollout_ref.model.custom_chat_template"
        ) from None
