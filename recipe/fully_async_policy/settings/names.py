"""Every name that a user writes is one that somebody reads, wherever it is written: refused are the others.

`overrides` are Hydra's, and `folder` is --config-dir; `base` composes the package's own configuration for the presets
that the overrides choose.
"""

import dataclasses
import difflib
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from yaml import YAMLError

from recipe.fully_async_policy.settings import other_names
from recipe.fully_async_policy.settings.errors import (
    SettingError,
    all_that_is_wrong,
    choices,
    closest,
    first_line,
    shown,
)
from recipe.fully_async_policy.settings.own_files import CONFIG_DIR, Written, chooses_a_file
from recipe.fully_async_policy.settings.values import TYPES

_OLD = ("custom_reward_function", "reward_model", "sandbox_fusion")
"""verl's former sections, which nothing reads any more: they are below `reward` now."""
_OPEN = (
    *("model.override_config", "rollout.custom", "checkpoint_engine.engine_kwargs", "rollout.prometheus"),
    *("custom_reward_function.reward_kwargs", "reward.reward_kwargs", "teacher_models"),
    *("nsys.controller_nsight_options", "nsys.worker_nsight_options", "sampler.sampler_kwargs"),
)
"""Sections, by the end of their names, whose names are free: somebody else's, or the user's own."""
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


def refused(
    error: Exception, overrides: list[str], folder: Path | None, base: Callable[[], DictConfig]
) -> SettingError:
    """What Hydra or OmegaConf says of the overrides, in one line that names the setting and the fix."""
    if isinstance(error, YAMLError):
        return SettingError(_no_yaml(error))
    if isinstance(error, MissingConfigException):
        missing, of_file = str(error.missing_cfg_file), re.match("In '(.*?)'", str(error))
        if folder and of_file and (folder / f"{of_file[1]}.yaml").is_file():
            return SettingError(f"{folder}/{of_file[1]}.yaml: {_no_default(missing, folder)}")
        return SettingError(_no_choice(missing, sorted(map(str, error.options or ())), folder))
    if isinstance(error, OverrideParseException):
        return SettingError(_unreadable(str(error.override)))
    if found := re.match(r"Ambiguous value for argument '((.*?)=(.*?))'\n", str(error)):
        given, name, value = found.groups()
        return SettingError(f"{given}: {_with_comma(name, value, base())}")
    if found := re.match(r"Could not (override|append).*? '(.*?)'(.*)", str(error)):
        given = _override(found[2], overrides)
        if found[1] == "append":
            fix = "the setting is there already; leave the + out"
        else:
            fix = f"write +{given}" if "defaults list" in found[3] else unknown(found[2], base(), given)
        return SettingError(f"{given}: {fix}")
    if found := re.match(r"Multiple values for (\w+)\.|(\w+) appears more than once in the final def", str(error)):
        name = found[1] or found[2]
        given = _override(name, list(reversed(overrides)))
        if given == name:
            return SettingError(f"{name}: two presets choose one, `/{name}: ...` of their defaults; leave one out")
        return SettingError(f"{given}: {name} is chosen already; leave it out, or give {given.lstrip('+')}")
    reason = " ".join(str(error.__cause__ or error).split("\n    full_key")[0].split())
    if "'@" in reason:
        return SettingError(f"{reason}: Hydra reads a comment with @ as an order; leave the @ out")
    found = re.search(r"override \+*([\w.]+)=", str(error))
    given = f"{_override(found[1], overrides)}: " if found else ""
    return SettingError(f"{given}{reason} (see --print-config for all settings)")


def check_known(
    config: DictConfig,
    overrides: list[str],
    folder: Path | None,
    files: list[Written],
    base: Callable[[], DictConfig],
) -> None:
    """Refuse settings that the configuration takes and nothing reads, and values of a type that their reader refuses.

    Args:
        config: composed from the overrides and the user's own files.
        files: what the user's own files set.
    """
    given = {one.name: one.name for one in files}  # full name -> as the user wrote it
    added = list(given)  # those that a configuration may not have without the user
    for override in OverridesParser.create().parse_overrides(overrides):
        name, line = override.key_or_group, str(override.input_line)
        if chooses_a_file(line, folder) or override.is_delete():
            continue
        names = list(all_names(OmegaConf.create({name: override.value()})))
        given |= dict.fromkeys(names, line)
        if override.is_add() or override.is_force_add() or _is_below(name, _OLD):
            added += names
    errors: dict[str, SettingError] = {}
    whole = base() if added else config
    for name in added:
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
    if _is_below(name, _OLD):
        return f"nothing reads it; give reward.{given.lstrip('+')}"
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
    if not isinstance(value, DictConfig) and any(typed.startswith(f"{name}.") for typed in TYPES):
        return f"={shown(value)}: is a section of settings, and no value; give its settings, {name}.NAME"
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
    if elsewhere := other_names.of_another(name, value):
        return f"there is no such setting; {elsewhere}"
    names = list(all_names(base))
    above, _, last = name.rpartition(".")
    wanted = f"{above}.{other_names.WORDS.get(last, last)}".lstrip(".")
    below = [known for known in names if known == wanted or known.endswith(f".{wanted}")]  # the section is missing
    lasts: dict[str, list[str]] = {}
    for known in names:
        lasts.setdefault(known.rpartition(".")[2], []).append(known)
    beside = closest(last, [known.rpartition(".")[2] for known in names if known.rpartition(".")[0] == above], 0.75)
    below += [f"{above}.{beside}".lstrip(".")] if beside else []
    if not below and above.endswith("rollout") and last in _options_of_vllm():
        return f"there is no such setting; an option of vLLM is +{above}.engine_kwargs.vllm.{last}={value}"
    last = closest(wanted.rpartition(".")[2], lasts, 0.8) or ""  # the section is wrong, or the last part misspelt
    near = next(iter(below), None) or closest(wanted, lasts.get(last, []), 0.0) or closest(wanted, names)
    fix = f"did you mean {near}?" if near else "--print-config prints all settings"
    return f"there is no such setting; {fix}"


def all_names(section: DictConfig, above: str = "") -> Iterator[str]:
    """The full names of all settings and sections."""
    for name, value in section.items_ex(resolve=False):
        yield f"{above}{name}"
        if isinstance(value, DictConfig) and not OmegaConf.is_interpolation(section, name):
            yield from all_names(value, f"{above}{name}.")


def _no_yaml(error: YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"no YAML: {' '.join(str(error).split())}"
    problem = str(getattr(error, "problem", None))
    why = "a tab; YAML indents with spaces" if "'\\t'" in problem else f"no YAML: {problem}; mend the line"
    return f"{mark.name}:{mark.line + 1}: {why}"


def _no_default(missing: str, folder: Path) -> str:
    """That a file of the user's own has a preset among its defaults which is not there."""
    group, _, name = missing.rpartition("/")
    there = [file.stem for known in (folder, CONFIG_DIR) for file in (known / group).glob("*.yaml")]
    near = closest(name, there)
    fix = f"did you mean {near}?" if near else f"it would be {folder}/{missing}.yaml"
    return f"there is no {missing}.yaml among the presets; {fix}"


def _no_choice(missing: str, options: list[str], folder: Path | None) -> str:
    group, _, given = missing.rpartition("/")
    group = "hardware" if group == "scale" else group
    own = f"; one of your own is {folder}/{missing}.yaml" if folder else ""
    if group == "method":
        return f"method={given}: {_no_method(given, options, own)}"
    sign = "+" if group in ("task", "agent", "gpus") else ""
    if group == "gpus" and (size := re.fullmatch(r"(\d+)(gi?)?b?", given.lower())):
        return f"{sign}{group}={given}: {other_names.card(int(size[1]))}; presets are {', '.join(options)}{own}"
    return f"{sign}{group}={given}: there is no such {group}; {choices(given, options)}{own}"


def _no_method(given: str, methods: list[str], own: str) -> str:
    name = re.sub(r"[-. ]", "_", given.lower())
    if name in methods:
        return f"names are in small letters; give method={name}"
    if name in other_names.METHODS:
        return f"there is no method of this name; {other_names.METHODS[name]}"
    near = difflib.get_close_matches(name, methods, n=3)
    fix = f"did you mean {' or '.join(near)}? " if near else ""
    return f"there is no such method; {fix}docs/reference/methods.md has all {len(methods)}{own}"


def _with_comma(name: str, value: str, base: DictConfig) -> str:
    """What is wrong with several values of a setting, or with a decimal comma."""
    known = OmegaConf.select(base, name, default=_ABSENT)
    if re.fullmatch(r"[-+]?\d+,\d+(e[-+]?\d+)?", value) and (known is _ABSENT or type(known) in (int, float)):
        decimal = f"a decimal has a point, {name}={value.replace(',', '.')}"
        return decimal if known is not _ABSENT else f"{decimal}; and {unknown(name, base, f'{name}={value}')}"
    return f"a comma separates values; give a list, {name}=[{value}], or {_quoted(name, value)}"


_ABSENT = object()


def _unreadable(override: str) -> str:
    name, sign, value = override.partition("=")
    if plain := other_names.typed(override):
        if plain.startswith("-"):
            return f"{override}: begins with a long dash; give --{plain.lstrip('-')}"
        keep = f", or {_quoted(name, value)}" if sign and not re.search(r"=[-\d.]+$", plain) else ""
        return f"{override}: has characters of a word processor; give {plain}{keep}"
    if (name, value) != (name.strip(), value.strip()):
        return f"{override}: give it without spaces, {name.strip()}={value.strip()}"
    if not sign:
        given = override.replace(":", "=", 1) if ":" in override else f"{override}=VALUE"
        return f"{override}: a setting needs a value; give {given}"
    if value.startswith("="):
        return f"{override}: give {name}={value.lstrip('=')}"
    if value.startswith("~"):
        return f"{override}: ~ is not replaced here; give {name}={os.path.expanduser(value)}"
    return f"{override}: has characters that Hydra keeps for itself; {_quoted(name, value)}"


def _quoted(name: str, value: str) -> str:
    return f"quote the value: '{name}=\"{value}\"'"


def _override(name: str, overrides: list[str]) -> str:
    """As the user gave it."""
    return next((given for given in overrides if given.lstrip("+").partition("=")[0] == name), name)
