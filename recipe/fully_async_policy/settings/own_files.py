"""The files of a user's own, in --config-dir: those that a run uses, what they set and in which line.

`overrides` are Hydra's, and `folder` is --config-dir; None: there are no such files.
"""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from recipe.fully_async_policy.settings.data import NO_DATA
from recipe.fully_async_policy.settings.errors import SettingError, all_that_is_wrong

CONFIG_DIR, CONFIG_NAME = Path(__file__).resolve().parents[1] / "config", "vcpo_trainer"
HEADER = "# @package _global_"


class Written(NamedTuple):
    """A setting, or a section of settings, in a file of the user's own."""

    name: str
    """In full, as the command line spells it."""
    place: str
    """FILE:LINE."""
    is_section: bool


def check_folder(folder: Path | None) -> None:
    """Refuse a folder that is none, files that are no text, and presets with the name of one of the package or verl."""
    if folder is None:
        return
    if not folder.is_dir():
        raise SettingError(f"--config-dir {folder}: no such folder")
    for file in sorted(folder.rglob("*.yaml")):
        name = file.relative_to(folder)
        if any((theirs / name).is_file() for theirs in (CONFIG_DIR, verls_folder())):
            raise SettingError(f"--config-dir {folder}: {name} has the name of a preset of ours; rename it")
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise SettingError(f"{file}: is not text in UTF-8") from None


def search_path(folder: Path | None) -> list[str]:
    """The override with which Hydra looks for presets in `folder` too, after the package's own and verl's."""
    if folder is None:
        return []
    usual = OmegaConf.load(CONFIG_DIR / f"{CONFIG_NAME}.yaml").hydra.searchpath
    path = str(folder.resolve()).replace("'", "\\'")
    own = f"'file://{path}'"
    return [f"hydra.searchpath=[{','.join([*usual, own])}]"]


def written(overrides: list[str], folder: Path | None) -> list[Written]:
    """What the user's own files set of a configuration that Hydra can compose."""
    if folder is None:
        return []
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        chosen = loader.compute_defaults_list(CONFIG_NAME, [*overrides, *search_path(folder)], RunMode.RUN).defaults
    files = {folder / f"{each.config_path}.yaml": str(each.package) for each in chosen}
    return [found for file, package in files.items() if file.is_file() for found in _settings(file, package, folder)]


@contextmanager
def located(overrides: list[str], folder: Path | None) -> Iterator[None]:
    """Errors of the block say in which file and line of the user's own the setting is that they name.

    What the command line gives as well is not the file's.
    """
    try:
        yield
    except SettingError as error:
        places = {each.name: each.place for each in written(overrides, folder)}
        given = {name: value for name, _, value in (each.lstrip("+~").partition("=") for each in overrides)}

        def with_place(line: str) -> SettingError:
            if line == NO_DATA and "task" in given:
                return SettingError(f"data.train_files: +task={given['task']} does not set it; the preset has to")
            name = re.match(r"[\w.]+", line)
            place = places.get(name[0]) if name and name[0] not in given else None
            return SettingError(f"{place}: {line}" if place else line)

        raise all_that_is_wrong([with_place(line) for line in error.lines]) from None


def chooses_a_file(override: str, *folders: Path | None) -> bool:
    """Whether an override such as +task=mine is the choice of a preset of the package, of verl or in `folders`."""
    group, _, name = override.lstrip("+~").partition("=")
    file = f"{group.partition('@')[0]}/{name.removesuffix('.yaml')}.yaml"
    return any((folder / file).is_file() for folder in (CONFIG_DIR, verls_folder(), *folders) if folder)


@cache
def verls_folder() -> Path:
    """The folder of verl's own presets."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "trainer" / "config"


def _settings(file: Path, package: str, folder: Path) -> list[Written]:
    """The settings and sections of a file, which Hydra has put into `package`."""
    group = file.parent.relative_to(folder).as_posix()
    if package == group.replace("/", "."):
        words = f"the first line has to be `{HEADER}`: without it all settings would be below"
        raise SettingError(f"{file}:1: {words} `{package}`")
    tree = yaml.compose(file.read_text(), yaml.SafeLoader)
    if not isinstance(tree, yaml.MappingNode):
        raise SettingError(f"{file}: has no settings; write `name: value`, without a dash")
    found = list(_below(file, tree, f"{package}." if package else ""))
    named = next((each for each in found if each.name == "method"), None)
    if group == "method" and named is None:
        raise SettingError(f"{file}:1: the method's name is missing; add the line `method: {file.stem}`")
    if group != "method" and named is not None:
        words = "`method:` would change the name alone; give method=NAME on the command line, or"
        raise SettingError(f"{named.place}: {words} `- override /method: NAME` among the file's defaults")
    return [each for each in found if each.name.partition(".")[0] != "defaults"]


def _below(file: Path, section: yaml.MappingNode, above: str) -> Iterator[Written]:
    for key, value in section.value:
        name = f"{above}{key.value}"
        place = f"{file}:{key.start_mark.line + 1}"
        if value.value == "???":  # Hydra would keep the value below it
            raise SettingError(f"{place}: {name}: ??? is no value; give one, or leave the line out")
        yield Written(name, place, isinstance(value, yaml.MappingNode))
        if isinstance(value, yaml.MappingNode):
            yield from _below(file, value, f"{name}.")
