"""`method=NAME`: the one switch between VCPO and what it is compared with. config/method has one file for each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.settings.effects import without_effect
from recipe.fully_async_policy.settings.errors import all_that_is_wrong, shown, wrong
from recipe.fully_async_policy.settings.own_files import Written

FOLDER = Path(__file__).resolve().parents[1] / "config" / "method"


def names() -> tuple[str, ...]:
    """All methods."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.yaml")))


def description(name: str) -> str:
    """The first sentence of the comment in the method's file."""
    file = FOLDER / f"{name}.yaml"
    if not file.is_file():
        return "a method of your own"
    comment = [line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("# ")]
    return " ".join(comment[1:]).split(". ")[0].rstrip(".")


def decided_by(name: str) -> dict[str, Any]:
    """The settings that make the method what it is: those of its file but for numbers, thresholds and references.

    Numbers and thresholds are the method's parameters, and may be given other values. Empty for a method whose file
    is in another folder.
    """
    file = FOLDER / f"{name}.yaml"
    content = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    return {
        setting: value
        for setting, value in leaves(content)
        if isinstance(value, str | bool | None) and not setting.endswith("threshold") and "${" not in str(value)
    }


def check_overrides(config: DictConfig, overrides: list[str], files: list[Written]) -> None:
    """Refuse what contradicts the method; of the command line also what has no effect with it.

    A preset is for many methods: not each reads all of it. `files`: what the user's own files set.
    """
    decided, given = decided_by(config.method), given_settings(overrides)
    errors = []
    for setting in dict.fromkeys([*given, *(one.name for one in files if not one.is_section)]):
        if setting in decided and OmegaConf.select(config, setting) != decided[setting]:
            words = f"contradicts method={config.method}, which sets it to {shown(decided[setting])}"
            errors.append(wrong(config, setting, f"{words}; choose another method by method=NAME, or leave it out"))
        elif setting not in decided and setting in given and (why := without_effect(config, setting)):
            fix = ", or leave it out" if "; give " in why else "; leave it out"
            errors.append(wrong(config, setting, f"has no effect with method={config.method}: {why}{fix}"))
    if errors:
        raise all_that_is_wrong(errors)


def given_settings(overrides: list[str]) -> list[str]:
    """The full names of the settings that Hydra's overrides give: several where a value is a section."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    return [name for override in parsed for name, _ in leaves({override.key_or_group: override.value()})]


def leaves(section: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """(full name, value) of every setting below."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
