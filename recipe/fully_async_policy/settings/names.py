"""Every name that a user writes is one that somebody reads, wherever it is written: refused are the others.

`overrides` are Hydra's, and `folder` is --config-dir; `base` composes the package's own configuration for the presets
that the overrides choose.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from recipe.fully_async_policy.settings import other_names
from recipe.fully_async_policy.settings.effects import without_effect
from recipe.fully_async_policy.settings.errors import (
    SettingError,
    all_that_is_wrong,
    closest,
    first_line,
    shown,
)
from recipe.fully_async_policy.settings.own_files import CONFIG_DIR, Written, chooses_a_file
from recipe.fully_async_policy.settings.values import TYPES

_OLD = {
    "custom_reward_function": "give reward.{given}",
    "sandbox_fusion": "give reward.{given}",
    "reward_model.num_workers": "give reward.num_workers={value}",
    "reward_model.reward_kwargs": "give reward.{below}",
    "reward_model.reward_manager": "give reward.reward_manager.name={value}",
    "reward_model.reward_loop_source": "give reward.reward_manager.source={value}",
    "reward_model.reward_loop_module_path": "give reward.reward_manager.module.path={value}",
    "reward_model.reward_loop_class_name": "give reward.reward_manager.module.name={value}",
    "reward_model": "leave it out; the lag-k trainer has no devices for a reward model",
}
"""verl's former sections and settings, which nothing reads any more, and what to do instead: `given` is the setting as
the user wrote it, `below` the same without `reward_model.`, `value` its value."""
_OPEN = (
    *("model.override_config", "rollout.custom", "checkpoint_engine.engine_kwargs", "rollout.prometheus"),
    *("custom_reward_function.reward_kwargs", "reward.reward_kwargs", "teacher_models"),
    *("nsys.controller_nsight_options", "nsys.worker_nsight_options", "sampler.sampler_kwargs"),
)
"""Sections, by the end of their names, whose names are free: somebody else's, or the user's own."""
_OF_REASONING_GYM = ("reasoning_gym.tasks", "reasoning_gym.difficulty")
"""Sections whose names reasoning-gym has, where a preset has them."""
_READ_ELSEWHERE = (
    *("data.gen_batch_size", "data.limit_images", "data.video_key", "reward.reward_kwargs", "reward.timeout"),
    *("reward.custom_reward_function.reward_kwargs", "trainer.checkpoint_callback_class"),
    *("trainer.remove_previous_ckpt_in_save", "ray_kwargs.timeline_json_file"),
)
"""Settings that verl reads and its configuration does not list."""
_OF_VLLM = "vllm.engine.arg_utils:AsyncEngineArgs"
_READERS = {
    "override_transformer_config": "megatron.core.transformer:TransformerConfig",
    "override_ddp_config": "megatron.core.distributed:DistributedDataParallelConfig",
    "override_optimizer_config": "megatron.core.optimizer:OptimizerConfig",
    "engine_kwargs.vllm": _OF_VLLM,
    "ray_kwargs.ray_init": "ray:init",
}
"""Sections, by the end of their names, whose settings are the arguments of a class or function."""
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


def check_known(
    config: DictConfig,
    overrides: list[str],
    folder: Path | None,
    files: list[Written],
    base: Callable[[], DictConfig],
    forced: bool = False,
) -> None:
    """Refuse settings that nothing reads, all at once, and values of a type that their reader refuses.

    Settings without an effect are left to `check_overrides`, also those that Hydra does not know.

    Args:
        config: composed from the overrides and the user's own files.
        files: what the user's own files set.
        forced: the overrides have settings that Hydra does not know.
    """
    given = {one.name: one.name for one in files}  # full name -> as the user wrote it
    added = list(given)  # those that a configuration may not have without the user
    for override in OverridesParser.create().parse_overrides(overrides):
        name, line = override.key_or_group, str(override.input_line)
        if chooses_a_file(line, folder) or override.is_delete():
            continue
        names = list(all_names(OmegaConf.create({name: override.value()})))
        given |= dict.fromkeys(names, line)
        if forced or override.is_add() or override.is_force_add() or _is_below(name, _OLD):
            added += (name for name in names if not without_effect(config, name))
    errors: dict[str, SettingError] = {}
    whole = base() if added else config
    added = [name for name in added if not _is_below(name, _OF_REASONING_GYM) or without_effect(config, name)]
    for name in added:
        if name in _OLD and any(other != name and _is_below(other, [name]) for other in added):
            continue  # the settings below a former section have hints of their own
        if not _is_below(name, errors) and (why := _why_nothing_reads(whole, name, given[name])):
            errors[name] = SettingError(f"{given[name]}: {why}")
    for name in given:
        if not _is_below(name, errors) and (why := _wrong_value(config, name)):
            errors[name] = SettingError(f"{name}{why}")
    if errors:
        raise all_that_is_wrong(errors.values())


def _is_below(name: str, sections: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{section}.") for section in sections)


def _why_nothing_reads(base: DictConfig, name: str, given: str) -> str | None:
    """Why nothing reads a setting that is written as `given`; None where something does. `base`: the package's own."""
    if old := next((section for section in _OLD if _is_below(name, [section])), None):
        plain = given.lstrip("+")
        value = plain.removeprefix(f"{name}=") if plain.startswith(f"{name}=") else "VALUE"
        fix = _OLD[old].format(given=plain, below=plain.removeprefix("reward_model."), value=value)
        return f"nothing reads it; {fix}"
    parts = name.split(".")
    above = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    if name in _of_presets() or _is_below(name, _READ_ELSEWHERE) or any(section.endswith(_OPEN) for section in above):
        return None
    section: Any = base
    for where, part in zip(["", *above], parts, strict=True):
        if section is None:
            return None
        if not isinstance(section, DictConfig):
            return f"{where} is one value, {shown(section)}, and no section of settings"
        if part not in section:
            return _why_not_in(section, where, part, name, base, given)
        full = f"{where}.{part}".lstrip(".")
        if name.startswith(f"{full}.") and OmegaConf.is_interpolation(section, part):
            raw = OmegaConf.to_container(section, resolve=False)[part]
            same = re.sub(r"\$\{(oc\.select:)?([\w.]+).*", r"\2", str(raw))
            return f"{full} is {same}; give {same}{name.removeprefix(full)}"
        try:
            section = section[part]
        except OmegaConfBaseException:  # a value that is to be given, or refers to one
            return None
    return None


def _why_not_in(section: DictConfig, where: str, part: str, name: str, base: DictConfig, given: str) -> str | None:
    """Why nothing reads `part` of the section `where`, which the package's configuration does not have."""
    reader = next((reader for end, reader in _READERS.items() if where.endswith(end)), None)
    if reader is None:
        known = part in _fields(section.get("_target_")) or (where and not len(section))
        return None if known else unknown(name, base, given)
    fields = inspect.signature(_imported(*reader.split(":"))).parameters
    if part in fields or part.startswith("_") or (reader == _OF_VLLM and part in _options_of_vllm()):
        return None
    near = closest(part, fields)
    return f"{reader.replace(':', '.')} has no such setting" + (f"; did you mean {near}?" if near else "")


@cache
def _of_presets() -> frozenset[str]:
    """All settings that the package's own presets set: not every configuration has those of every preset."""
    presets = (OmegaConf.load(file) for file in CONFIG_DIR.rglob("*.yaml"))
    return frozenset(name for preset in presets for name in all_names(preset))


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _fields(target: str | None) -> dict[str, Any]:
    """The settings of the class that a section is made into -> their types; none where it has no such class."""
    cls = _imported(*target.rsplit(".", 1)) if target else None
    return get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}


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
    if isinstance(value, DictConfig) or not isinstance(section, DictConfig) or above == "vcpo" or name in TYPES:
        return None
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    try:
        accepts = TypeAdapter(_fields(section.get("_target_")).get(last, Any)).validate_python
    except PydanticSchemaGenerationError:  # a type of verl's own, which verl makes of the value
        return None
    try:
        read = accepts(plain)
    except ValidationError as refused:
        first = refused.errors()[0]
        return f"={shown(plain)}: {_WORDS.get(first['type'].partition('_')[0], first['msg'])}"
    if isinstance(plain, str) and type(read) in (int, float, bool):  # "3": verl converts nothing
        return f"={plain}: {_WORDS[type(read).__name__]}, without quotes"
    return None


def unknown(name: str, base: DictConfig, given: str = "") -> str:
    """That there is no such setting, and which one of the configuration may be meant. `given`: as the user wrote it."""
    value = given.partition("=")[2] or "VALUE"
    above, _, last = name.rpartition(".")
    fix = other_names.of_another(name, value)
    if fix is None and (near := _meant(above, other_names.WORDS.get(last, last), list(all_names(base)))):
        fix = f"did you mean {near}?"
    if fix is None and above.endswith("rollout") and last in _options_of_vllm():
        fix = f"an option of vLLM is +{above}.engine_kwargs.vllm.{last}={value}"
    return f"there is no such setting; {fix or '--print-config prints all settings'}"


def _meant(above: str, last: str, names: list[str]) -> str | None:
    """The one of all names that most likely is meant; None where a part alone is alike."""
    wanted = f"{above}.{last}".lstrip(".")
    if whole := next((name for name in names if f".{name}".endswith(f".{wanted}")), None):  # the section is cut short
        return whole
    sections: dict[str, str] = {}  # last part -> the first setting that has it in this section, or in any
    for name in names:
        if f".{name.rpartition('.')[0]}".endswith(f".{above}" if above else ""):
            sections.setdefault(name.rpartition(".")[2], name)
    if misspelt := closest(last, sections, 0.75 if above else 0.8):
        return sections[misspelt]
    below = [name for name in names if name.startswith(f"{above}.") and name.endswith(f".{last}")]
    if len(below) == 1:
        return below[0]
    elsewhere = {".".join(name.split(".")[-2:]): name for name in names if name.endswith(f".{last}")}
    if len(elsewhere) == 1 and "_" in last:  # of several words: a name for one thing
        return next(iter(elsewhere.values()))
    section_misspelt = closest(".".join(wanted.split(".")[-2:]), elsewhere, 0.8)
    return section_misspelt and elsewhere[section_misspelt]


def all_names(section: DictConfig, above: str = "") -> Iterator[str]:
    """The full names of all settings and sections."""
    for name, value in section.items_ex(resolve=False):
        yield f"{above}{name}"
        if isinstance(value, DictConfig) and not OmegaConf.is_interpolation(section, name):
            yield from all_names(value, f"{above}{name}.")
