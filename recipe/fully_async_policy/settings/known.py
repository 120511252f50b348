"""Every setting that a user writes is one that somebody reads, wherever it is written: refused are the others."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from recipe.fully_async_policy.settings.errors import SettingError, all_that_is_wrong, closest, first_line, shown
from recipe.fully_async_policy.settings.names import all_names, unknown
from recipe.fully_async_policy.settings.own_files import CONFIG_DIR, Written, chooses_a_file
from recipe.fully_async_policy.settings.values import is_typed

_OLD = ("custom_reward_function", "reward_model", "sandbox_fusion")
"""verl's former sections, which nothing reads any more: they are below `reward` now."""
_OPEN = (
    *("model.override_config", "rollout.custom", "checkpoint_engine.engine_kwargs", "rollout.prometheus"),
    *("custom_reward_function.reward_kwargs", "reward.reward_kwargs", "ray_kwargs.ray_init", "teacher_models"),
    *("nsys.controller_nsight_options", "nsys.worker_nsight_options", "sampler.sampler_kwargs"),
)
"""Sections, by the end of their names, whose names are free: somebody else's, or the user's own."""
_READ_ELSEWHERE = (
    *("data.gen_batch_size", "data.limit_images", "data.video_key", "reward.reward_kwargs", "reward.timeout"),
    *("reward.custom_reward_function.reward_kwargs", "trainer.checkpoint_callback_class"),
    *("trainer.remove_previous_ckpt_in_save", "ray_kwargs.timeline_json_file"),
)
"""Settings that verl reads and its configuration does not list."""
_OF_VLLM = "engine_kwargs.vllm"
_READERS = {
    "override_transformer_config": "megatron.core.transformer:TransformerConfig",
    "override_ddp_config": "megatron.core.distributed:DistributedDataParallelConfig",
    "override_optimizer_config": "megatron.core.optimizer:OptimizerConfig",
    _OF_VLLM: "vllm.engine.arg_utils:AsyncEngineArgs",
}
"""Sections, by the end of their names, whose settings are the fields of a class."""


def check_known(
    config: DictConfig,
    overrides: list[str],
    folder: Path | None,
    files: list[Written],
    without_files: Callable[[], DictConfig],
) -> None:
    """Refuse settings that the configuration takes and nothing reads, and values of a type that their reader refuses.

    Args:
        config: composed from the overrides and the user's own files.
        overrides: Hydra's.
        folder: --config-dir.
        files: what the user's own files set.
        without_files: composes the package's own configuration for the presets that the overrides choose.

    Raises:
        SettingError: FILE:LINE or the override; a line for each of them.
    """
    given = {one.name: f"{one.place}: {one.name}" for one in files}  # full name -> as the user wrote it
    places = {one.name: f"{one.place}: " for one in files}
    added = [one.name for one in files]  # those that the configuration may not have without the user
    for override in OverridesParser.create().parse_overrides(overrides):
        name, line = override.key_or_group, str(override.input_line)
        if chooses_a_file(line, folder) or override.is_delete():
            continue
        names = [name, *(f"{name}.{below}" for below in _names_below(override.value()))]
        given |= dict.fromkeys(names, line)
        places |= dict.fromkeys(names, "")
        if override.is_add() or override.is_force_add() or _is_old(name):
            added += names
    wrong = _unknown(config, given, added, without_files) if added else {}
    for name, place in places.items():
        if not any(f"{name}.".startswith(f"{above}.") for above in wrong) and (why := _wrong_value(config, name)):
            wrong[name] = SettingError(f"{place}{name}{why}")
    if wrong:
        raise all_that_is_wrong(wrong.values())


def _is_old(name: str) -> bool:
    return name.partition(".")[0] in _OLD


def _names_below(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield str(key)
            yield from (f"{key}.{name}" for name in _names_below(below))


def _unknown(
    config: DictConfig, given: dict[str, str], added: list[str], without_files: Callable[[], DictConfig]
) -> dict[str, SettingError]:
    """Of those names that nothing reads, an error for each; of a section that nothing reads, one for all of it."""
    base = without_files()
    errors: dict[str, SettingError] = {}
    for name in added:
        if any(f"{name}.".startswith(f"{above}.") for above in errors):
            continue
        if _is_old(name):
            why: str | None = f"nothing reads it; give reward.{given[name].rpartition(' ')[2].lstrip('+')}"
        else:
            known = name in _of_presets()
            why = _no_section(base, config, name) or (None if known else _why_unknown(base, name))
        if why:
            errors[name] = SettingError(f"{given[name]}: {why}")
    return errors


def _no_section(base: DictConfig, config: DictConfig, name: str) -> str | None:
    """That a section's place has a value, which would take all of its settings away."""
    was = OmegaConf.select(base, name)
    try:
        now = OmegaConf.select(config, name)
    except OmegaConfBaseException:  # a reference to nothing: its value is wrong
        return None
    if isinstance(was, DictConfig) and len(was) and now is not None and not isinstance(now, DictConfig):
        return f"is a section of settings, and no value ({shown(now)}); give its settings, {name}.NAME"
    return None


def _why_unknown(base: DictConfig, name: str) -> str | None:
    """Why nothing reads a setting of this name; None where something does."""
    parts = name.split(".")
    above = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    if any(whole in _READ_ELSEWHERE for whole in (*above, name)) or any(whole.endswith(_OPEN) for whole in above):
        return None
    section = base
    for place, part in enumerate(parts):
        if part not in section:
            return _why_not_in(section, above[place - 1] if place else "", part, name, base)
        if place == len(parts) - 1:
            return None
        try:
            below = section[part]
        except OmegaConfBaseException:  # a value that is to be given, or refers to one
            return None
        if below is None:
            return None
        if not isinstance(below, DictConfig):
            return f"{above[place]} is one value, {shown(below)}, and no section of settings"
        section = below
    return None


def _why_not_in(section: DictConfig, where: str, part: str, name: str, base: DictConfig) -> str | None:
    """Why nothing reads `part` of the section `where`, which the package's configuration does not have."""
    reader = next((reader for end, reader in _READERS.items() if where.endswith(end)), None)
    if reader is None:
        known = part in _fields(section.get("_target_")) or (where and not len(section))
        return None if known else unknown(name, list(all_names(base)))
    if part in _names_of(reader) or (where.endswith(_OF_VLLM) and part in _options_of_vllm()):
        return None
    near = closest(part, _names_of(reader))
    return f"{reader.replace(':', '.')} has no such setting" + (f"; did you mean {near}?" if near else "")


@cache
def _of_presets() -> frozenset[str]:
    """All settings that the package's own presets set: not every configuration has those of every preset."""
    found: set[str] = set()
    for file in CONFIG_DIR.rglob("*.yaml"):
        found.update(_names_below(yaml.safe_load(file.read_text())))
    return frozenset(found)


def _fields(target: str | None) -> dict[str, Any]:
    """The settings of the class that a section is made into -> their types; none where it has no such class."""
    if target is None:
        return {}
    module, _, name = target.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}


@cache
def _names_of(reader: str) -> tuple[str, ...]:
    module, _, name = reader.partition(":")
    found = getattr(importlib.import_module(module), name)
    return tuple(inspect.signature(found).parameters)


@cache
def _options_of_vllm() -> frozenset[str]:
    """Those of `vllm serve`, to which verl passes them: more than the engine's, and seconds to import."""
    import vllm.entrypoints.cli.serve as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = serve.cmd_init()[0].subparser_init(FlexibleArgumentParser().add_subparsers())
    return frozenset(action.dest for action in parser._actions)


def _wrong_value(config: DictConfig, name: str) -> str | None:
    """What is wrong with the value of a setting that the user gives; None where another check knows the setting."""
    try:
        value = OmegaConf.select(config, name, throw_on_missing=True)
    except OmegaConfBaseException as error:
        return f": {first_line(error)}"
    above, _, last = name.rpartition(".")
    section = OmegaConf.select(config, above) if above else None
    if isinstance(value, DictConfig) or not isinstance(section, DictConfig) or above == "vcpo" or is_typed(name):
        return None
    hint = _fields(section.get("_target_")).get(last, Any)
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    try:
        accepts = TypeAdapter(hint).validate_python
    except PydanticSchemaGenerationError:  # a type of verl's own, which verl makes of the value
        return None
    try:
        read = accepts(plain)
    except ValidationError as wrong:
        kind = wrong.errors()[0]["type"].partition("_")[0]
        return f"={shown(plain)}: {_WORDS.get(kind, wrong.errors()[0]['msg'])}"
    if isinstance(plain, str) and type(read) in (int, float, bool):  # "3": verl converts nothing
        return f"={plain}: {_WORDS[type(read).__name__]}, without quotes"
    return None


_WORDS = {
    "int": "give a whole number",
    "float": "give a number",
    "bool": "give true or false",
    "string": "give text",
    "list": "give a list, [a,b]",
    "tuple": "give a list, [a,b]",
    "dict": "is a section of settings; give its settings one by one",
}
"""Of a type, in pydantic's words or Python's: what a user gives."""
