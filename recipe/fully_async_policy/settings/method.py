"""`method=NAME`: the one switch between VCPO and what it is compared with. config/method has one file for each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.settings.effects import without_effect
from recipe.fully_async_policy.settings.errors import SettingError, all_that_is_wrong, shown
from recipe.fully_async_policy.settings.own_files import Written

FOLDER = Path(__file__).resolve().parents[1] / "config" / "method"


def names() -> tuple[str, ...]:
    """All methods."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.yaml")))


def description(name: str) -> str:
    """The first sentence of the comment in the method's file."""
    if not _file(name).is_file():
        return "a method of your own"
    comment = [line.removeprefix("# ") for line in _file(name).read_text().splitlines() if line.startswith("# ")]
    return " ".join(comment[1:]).split(". ")[0].rstrip(".")


def decided_by(name: str) -> dict[str, Any]:
    """The settings that make the method what it is: those of its file but for numbers, thresholds and references.

    Numbers and thresholds are the method's parameters, and may be given other values. Empty for a method whose file
    is in another folder.
    """
    if not _file(name).is_file():
        return {}
    content = OmegaConf.load(_file(name))
    assert isinstance(content, DictConfig)
    return {
        setting: value
        for setting, value in _leaves(content)
        if isinstance(value, str | bool | None) and not setting.endswith("threshold") and "${" not in str(value)
    }


def check_overrides(config: DictConfig, overrides: list[str], files: list[Written]) -> None:
    """Refuse what contradicts the method; of the command line also what has no effect with it.

    A preset is for many methods: not each reads all of it.

    Args:
        config: composed from `overrides`.
        overrides: Hydra's.
        files: what the user's own files set.

    Raises:
        SettingError: a line for each of them.
    """
    decided, given = decided_by(config.method), given_settings(overrides)
    errors = []
    for setting in dict.fromkeys([*given, *(one.name for one in files if not one.is_section)]):
        value = OmegaConf.select(config, setting)
        if setting in decided:
            if value != decided[setting]:
                errors.append(
                    SettingError(
                        f"{setting}={shown(value)}: contradicts method={config.method}, which sets it to "
                        f"{shown(decided[setting])}; choose another method by method=NAME, or leave it out"
                    )
                )
        elif setting in given and (why := without_effect(config, setting)):
            errors.append(
                SettingError(
                    f"{setting}={shown(value)}: has no effect with method={config.method}: {why}; leave it out"
                )
            )
    if errors:
        raise all_that_is_wrong(errors)


def given_settings(overrides: list[str]) -> list[str]:
    """The full names of the settings that Hydra's overrides give."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    return [setting for override in parsed for setting in _given(override.key_or_group, override.value())]


def _file(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def _given(key: str, value: Any) -> Iterator[str]:
    """The settings that the override `key=value` gives: several where the value is a section."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _given(f"{key}.{name}", below)
    else:
        yield key


def _leaves(section: DictConfig, above: str = "") -> Iterator[tuple[str, Any]]:
    """(full name, value) of every setting below; references as they are written."""
    for name, value in section.items_ex(resolve=False):
        if isinstance(value, DictConfig):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
