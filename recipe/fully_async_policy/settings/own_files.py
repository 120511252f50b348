"""The files of a user's own, in --config-dir: those that a run uses, what they set and in which line."""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.fully_async_policy.settings.data import NO_DATA
from recipe.fully_async_policy.settings.errors import SettingError, all_that_is_wrong, closest

CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"
HEADER = "# @package _global_"
_PACKAGE = re.compile(r"#\s*@\s*package\s+(\S+)\s*")
_NAME = re.compile(r"[\w.-][\w/.-]*")
_OF_ITSELF = "_self_"


class Written(NamedTuple):
    """A setting, or a section of settings, in a file of the user's own."""

    name: str
    """In full, as the command line spells it."""
    place: str
    """FILE:LINE."""
    is_section: bool


class _File(NamedTuple):
    path: Path
    group: str
    """The folder below --config-dir: task."""

    def wrong(self, place: yaml.Node | int, words: str) -> SettingError:
        line = place if isinstance(place, int) else place.start_mark.line + 1
        return SettingError(f"{self.path}:{line}: {words}")


def written(overrides: list[str], folder: Path | None) -> list[Written]:
    """What the files in `folder` that these overrides choose set, with those that they name among their defaults.

    Args:
        overrides: Hydra's.
        folder: --config-dir; None: there are no such files.
    """
    if folder is None:
        return []
    found: list[Written] = []
    files = [file for override in overrides if (file := _chosen(override, folder))]
    seen = set(files)
    while files:
        file = files.pop(0)
        tree, package = _tree(file)
        found += _settings(file, tree, package)
        more = [wanted for wanted in _of_defaults(file, tree, folder) if wanted not in seen]
        seen.update(more)
        files += more
    return found


@contextmanager
def located(overrides: list[str], folder: Path | None) -> Iterator[None]:
    """Errors of the block say in which file and line of the user's own the setting is that they name.

    Args:
        overrides: Hydra's; what the command line gives as well is not the file's.
        folder: --config-dir.
    """
    try:
        yield
    except SettingError as error:
        places = {one.name: one.place for one in written(overrides, folder)}
        given = {name: value for name, _, value in (each.lstrip("+~").partition("=") for each in overrides)}

        def with_place(line: str) -> SettingError:
            if line == NO_DATA and "task" in given:
                return SettingError(f"data.train_files: +task={given['task']} does not set it; the preset has to")
            name = re.match(r"[\w.]+", line)
            place = places.get(name[0]) if name and name[0] not in given else None
            return SettingError(f"{place}: {line}" if place else line)

        raise all_that_is_wrong([with_place(line) for line in error.lines]) from None


def chooses_a_file(override: str, folder: Path | None = None) -> bool:
    """Whether an override such as +task=mine is the choice of a preset of the package, verl or `folder`."""
    return _chosen(override, CONFIG_DIR, _verls(), *([folder] if folder else [])) is not None


def _chosen(override: str, *folders: Path) -> _File | None:
    """The file in one of the folders that an override such as +task=mine chooses; None where it is a setting."""
    group, _, name = override.lstrip("+~").partition("=")
    for folder in folders:
        file = folder / group.partition("@")[0] / f"{name.removesuffix('.yaml')}.yaml"
        if _NAME.fullmatch(name) and (folder / group.partition("@")[0]).is_dir() and file.is_file():
            return _File(file, str(file.parent.relative_to(folder)))
    return None


def _tree(file: _File) -> tuple[yaml.MappingNode, str]:
    """The file's content, and the package of Hydra's that its first line names."""
    try:
        text = file.path.read_text()
        tree = yaml.compose(text, yaml.SafeLoader)
    except UnicodeDecodeError:
        raise SettingError(f"{file.path}: is not text in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        tab = mark and mark.buffer and "\t" in mark.buffer.splitlines()[mark.line][: mark.column + 1]
        why = "a tab; YAML indents with spaces" if tab else f"no YAML: {error.problem or error.context}"
        raise file.wrong(mark.line + 1 if mark else 1, why) from None
    except yaml.YAMLError as error:
        raise SettingError(f"{file.path}: no YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        raise SettingError(f"{file.path}: is empty; give settings, such as `data: {{train_files: FILE}}`")
    if not isinstance(tree, yaml.MappingNode):
        raise file.wrong(tree, "is no section of settings; write `name: value`, without a dash")
    return tree, _package(file, [line.strip() for line in text.splitlines()])


def _package(file: _File, lines: list[str]) -> str:
    first = next(number for number, line in enumerate(lines, 1) if line)  # Hydra looks no further
    header = _PACKAGE.fullmatch(lines[first - 1])
    if header is None:
        words = f"the first line has to be `{HEADER}`: without it all settings would be below"
        raise file.wrong(first, f"{words} `{file.group.replace('/', '.')}`")
    for number, line in enumerate(lines[first:], first + 1):
        if line and not line.startswith("#"):
            break
        if re.match(r"#\s*@", line) and len(line.lstrip("# ").split()) != 2:
            raise file.wrong(number, "Hydra reads a comment with @ as an order; leave the @ out")
    return header[1]


def _settings(file: _File, tree: yaml.MappingNode, package: str) -> list[Written]:
    """The file's settings and sections."""
    above = package.removeprefix("_global_").lstrip(".")
    below = _below(file, tree, f"{above}." if above else "")
    found = [one for one in below if one.name.partition(".")[0] != "defaults"]
    named = next((one for one in found if one.name == "method"), None)
    if file.group == "method" and named is None:
        raise file.wrong(1, f"the method's name is missing; add the line `method: {file.path.stem}`")
    if file.group != "method" and named is not None:
        words = "`method:` would change the name alone; give method=NAME on the command line, or"
        raise SettingError(f"{named.place}: {words} `- override /method: NAME` among the file's defaults")
    return found


def _below(file: _File, section: yaml.MappingNode, above: str) -> Iterator[Written]:
    lines: dict[str, int] = {}
    for key, value in section.value:
        name, line = f"{above}{key.value}", key.start_mark.line + 1
        if name in lines:
            raise file.wrong(line, f"{name} is given already in line {lines[name]}; leave one out")
        if value.value == "???":
            raise file.wrong(line, f"{name}: ??? is no value; give one, or leave the line out")
        lines[name] = line
        is_section = isinstance(value, yaml.MappingNode)
        yield Written(name, f"{file.path}:{line}", is_section)
        if is_section:
            yield from _below(file, value, f"{name}.")


def _of_defaults(file: _File, tree: yaml.MappingNode, folder: Path) -> Iterator[_File]:
    """The files of the user's own among the file's defaults."""
    defaults = next((value for key, value in tree.value if key.value == "defaults"), None)
    if defaults is None:
        return
    if not isinstance(defaults, yaml.SequenceNode):
        raise file.wrong(defaults, "`defaults` is a list; write `- /group: name` in each line")
    entries = [(item, *_entry(item)) for item in defaults.value]
    others = [item for item, group, name in entries if not group.startswith("override ") and name != _OF_ITSELF]
    if others and not any(name == _OF_ITSELF for _, _, name in entries):
        words = "the settings of this file would give way to those of its defaults"
        raise file.wrong(others[-1], f"{words}; add `- {_OF_ITSELF}` as the last of them")
    for item, group, name in entries:
        if name != _OF_ITSELF and name is not None:
            yield from _default(file, item, group, name, folder)


def _entry(item: yaml.Node) -> tuple[str, str | None]:
    """(group, name) of an item of `defaults`; the group is empty where the item has a name alone."""
    if isinstance(item, yaml.MappingNode) and item.value:
        key, value = item.value[0]
        is_name = isinstance(value, yaml.ScalarNode) and not value.tag.endswith(":null")
        return str(key.value), str(value.value) if is_name else None
    return "", str(item.value)


def _default(file: _File, item: yaml.Node, group: str, name: str, folder: Path) -> Iterator[_File]:
    words = group.partition("@")[0].removeprefix("optional ").removeprefix("override ").strip()
    where = Path(words.lstrip("/") if words.startswith("/") else Path(file.group, words))
    try:
        name = str(OmegaConf.create({"name": name}).name).removesuffix(".yaml")
    except OmegaConfBaseException:
        return  # names a setting: Hydra says what is wrong with it
    path = where / f"{name}.yaml"
    found = _chosen(f"{where}={name}", folder, CONFIG_DIR, _verls())
    if found and found.path == folder / path:
        yield found
    elif not found and "optional " not in group:
        near = closest(name, [other.stem for known in (folder, CONFIG_DIR) for other in (known / where).glob("*.yaml")])
        fix = f"did you mean {near}?" if near else f"it would be {folder / path}"
        raise file.wrong(item, f"there is no {path} among the presets; {fix}")


@cache
def _verls() -> Path:
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "trainer" / "config"
