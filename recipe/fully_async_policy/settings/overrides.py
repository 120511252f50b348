"""The configuration that a command line makes, or what of it cannot be read.

`overrides` are Hydra's, and `folder` is --config-dir; `base` composes the package's own configuration for the presets
that the overrides choose.
"""

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe.fully_async_policy.settings import other_names
from recipe.fully_async_policy.settings.errors import SettingError, all_that_is_wrong, choices, closest
from recipe.fully_async_policy.settings.names import unknown
from recipe.fully_async_policy.settings.own_files import CONFIG_DIR, verls_folder

_NOT_CHOSEN = ("task", "agent", "gpus")
"""Groups of presets of which the configuration has none without the user."""


def composed(
    overrides: list[str],
    folder: Path | None,
    compose: Callable[[list[str], Path | None], DictConfig],
    base: Callable[[], DictConfig],
) -> tuple[DictConfig, bool]:
    """The configuration with all of the overrides, and whether it has settings that Hydra does not know.

    Hydra stops at the first name that it does not know. With ++ it takes them all, for `check_known`.

    Raises:
        SettingError: overrides that cannot be read, a line for each; or else what Hydra says, in one line that names
            the setting and the fix.
    """
    if of_hydra_itself := [given for given in overrides if re.match(r"[+~]*hydra([./@=]|$)", given)]:
        fix = "leave it out; run_dir is the run's folder, --config-dir a folder of presets"
        raise all_that_is_wrong(SettingError(f"{given}: Hydra only composes here; {fix}") for given in of_hydra_itself)
    of_hydra = (HydraException, OmegaConfBaseException, YAMLError, ValueError)
    try:
        return compose(overrides, folder), False
    except of_hydra:
        forced = _forced(overrides, folder, base)
    try:
        return compose(forced, folder), True
    except of_hydra as error:
        raise _refused(error, overrides, folder) from None


def _forced(overrides: list[str], folder: Path | None, base: Callable[[], DictConfig]) -> list[str]:
    """The overrides with ++ before every setting, but for choices of presets."""
    groups = {given.lstrip("+").partition("=")[0] for given in overrides if given.startswith("+")}
    forced, errors = [], []
    for given in overrides:
        try:
            override = OverridesParser.create().parse_override(given)
        except HydraException:
            errors.append(SettingError(_unreadable(given)))
            continue
        name = override.key_or_group
        if override.is_sweep_override():
            value = given.partition("=")[2]
            errors.append(SettingError(f"{given}: {_with_comma(name, value, _known(base))}"))
        elif name in _NOT_CHOSEN and name not in groups and isinstance(override.value(), str):
            errors.append(SettingError(f"{given}: write +{given}"))
        elif override.is_delete() or _chooses(override, folder):
            forced.append(given)
        else:
            forced.append(f"++{given.lstrip('+')}")
    if errors:
        raise all_that_is_wrong(errors)
    return forced


def _known(base: Callable[[], DictConfig]) -> DictConfig:
    """The package's own configuration; an empty one where the presets that are chosen make none."""
    try:
        return base()
    except (HydraException, OmegaConfBaseException):
        return OmegaConf.create()


def _chooses(override: Override, folder: Path | None) -> bool:
    """Whether an override is the choice of a preset, which may not be there."""
    folders = (root / override.key_or_group for root in (CONFIG_DIR, verls_folder(), folder) if root)
    return not isinstance(override.value(), dict) and any(group.is_dir() for group in folders)


def _refused(error: Exception, overrides: list[str], folder: Path | None) -> SettingError:
    """What Hydra or OmegaConf says of overrides of which all are settings."""
    if isinstance(error, YAMLError):
        return SettingError(_no_yaml(error))
    if isinstance(error, MissingConfigException):
        missing, of_file = str(error.missing_cfg_file), re.match("In '(.*?)'", str(error))
        if folder and of_file and (folder / f"{of_file[1]}.yaml").is_file():
            return SettingError(f"{folder}/{of_file[1]}.yaml: {_no_default(missing, folder)}")
        return SettingError(_no_choice(missing, sorted(map(str, error.options or ())), folder))
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
    sign = "+" if group in _NOT_CHOSEN else ""
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
