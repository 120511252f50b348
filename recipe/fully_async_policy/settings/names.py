"""What the command line chooses: presets and methods that do not exist, and what Hydra cannot read."""

import difflib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.settings.errors import SettingError, choices, closest

_GROUPS = ("task", "method", "hardware", "model_engine", "agent", "gpus")
_KNOWN_ELSEWHERE = {
    "grpo": "its gradient is method=none (no correction), tis_seq or tis_token (truncated weights), or ppo (its clip)",
    "rloo": "give method=none algorithm.adv_estimator=rloo",
    "reinforce": "it is method=none",
    "reinforce++": "give method=none algorithm.adv_estimator=reinforce_plus_plus",
    "reinforce_plus_plus": "give method=none algorithm.adv_estimator=reinforce_plus_plus",
    "dr_grpo": "give method=none algorithm.norm_adv_by_std_in_grpo=false",
    "dapo": "give method=ppo actor_rollout_ref.actor.clip_ratio_high=0.28 algorithm.filter_groups.enable=true",
    "tis": "it is method=tis_seq (weights of sequences) or tis_token (of tokens)",
    "is": "it is method=tis_seq (weights of sequences) or tis_token (of tokens)",
    "areal": "it is method=decoupled_ppo",
    "opob": "it is method=vcpo_opob",
    "ess": "it is method=vcpo_ess",
}
"""Names of methods in the field, and what gives them here."""
_OTHER_WORDS = {
    "learning_rate": "lr",
    "batch_size": "train_batch_size",
    "max_steps": "total_training_steps",
    "num_train_epochs": "total_epochs",
    "num_generations": "n",
    "max_new_tokens": "max_response_length",
    "max_completion_length": "max_response_length",
}
"""What other trainers call a setting."""
_LONG_DASHES = ("–", "—")  # which word processors make of --
_GRAMMAR = "has characters that Hydra keeps for itself"


def of_groups(overrides: list[str]) -> list[str]:
    """Those of the overrides that choose a file for a section: +task=NAME, method=NAME."""
    return [given for given in overrides if given.lstrip("+").partition("=")[0] in _GROUPS]


def refused(error: Exception, overrides: list[str], names: Callable[[], list[str]]) -> SettingError:
    """What Hydra says of the overrides, in one line that names the setting and the fix.

    Args:
        error: Hydra's or OmegaConf's.
        names: gives all settings and sections of the configuration.
    """
    if isinstance(error, MissingConfigException):
        return _no_choice(str(error.missing_cfg_file), list(error.options or ()))
    if isinstance(error, OverrideParseException):
        return SettingError(_unreadable(str(error.override)))
    text = str(error)
    if found := re.match(r"Ambiguous value for argument '(.*?)'\n", text):
        name, _, value = found[1].partition("=")
        return SettingError(
            f"{found[1]}: a comma separates values; give a list, {name}=[{value}], or {_quoted(name, value)}"
        )
    if found := re.match(r"Could not override '(.*?)'\. No match in the defaults list", text):
        return SettingError(f"{_override(found[1], overrides)}: write +{_override(found[1], overrides)}")
    if found := re.match(r"Could not override '(.*?)'\.", text):
        return SettingError(f"{_override(found[1], overrides)}: {unknown(found[1], names())}")
    if found := re.match(r"(?:Multiple values for (\w+)\.|(\w+) appears more than once in the final defaults)", text):
        name = found[1] or found[2]
        given = _override(name, list(reversed(overrides)))
        if given == name:
            return SettingError(f"{name}: two presets choose one, `/{name}: ...` of their defaults; leave one out")
        return SettingError(f"{given}: {name} is chosen already; leave it out, or give {given.lstrip('+')}")
    if found := re.match(r"Could not append to config. An item is already at '(.*?)'", text):
        return SettingError(f"{_override(found[1], overrides)}: the setting is there already; leave the + out")
    reason = " ".join(str(error.__cause__ or error).split("\n    full_key")[0].split())
    given = _override(found[1], overrides) + ": " if (found := re.search(r"override \+*([\w.]+)=", text)) else ""
    return SettingError(f"{given}{reason} (see --print-config for all settings)")


def unknown(name: str, names: list[str]) -> str:
    """That there is no such setting, and which one may be meant."""
    ends = [known for known in names if known.endswith(f".{name}")]
    above, _, last = name.rpartition(".")
    last = _OTHER_WORDS.get(last, last)
    if f"{above}.{last}" in names:
        return f"there is no such setting; did you mean {above}.{last}?"
    same_last = [known for known in names if known.rpartition(".")[2] == last]
    near = None if same_last else closest(name, names, 0.8)
    if not near:  # the section is missing or wrong, or the last part is misspelt
        lasts = {known.rpartition(".")[2]: known for known in reversed(names)}
        near_last = closest(last, lasts, 0.8)
        near = (
            next(iter(ends), None)
            or closest(name, same_last, 0.0)
            or (lasts[near_last] if near_last else closest(name, names))
        )
    fix = f"did you mean {near}?" if near else "--print-config prints all settings"
    return f"there is no such setting; {fix}"


def all_names(section: DictConfig, above: str = "") -> Iterator[str]:
    """The full names of all settings and sections."""
    for name, value in section.items_ex(resolve=False):
        yield f"{above}{name}"
        if isinstance(value, DictConfig) and not OmegaConf.is_interpolation(section, name):
            yield from all_names(value, f"{above}{name}.")


def _no_choice(missing: str, options: list[Any]) -> SettingError:
    group, _, given = missing.rpartition("/")
    group = "hardware" if group == "scale" else group
    if group == "method":
        return SettingError(f"method={given}: {_no_method(given, sorted(map(str, options)))}")
    sign = "+" if group in ("task", "agent", "gpus") else ""
    return SettingError(f"{sign}{group}={given}: there is no such {group}; {choices(given, sorted(map(str, options)))}")


def _no_method(given: str, methods: list[str]) -> str:
    name = re.sub(r"[-. ]", "_", given.lower())
    if name in methods:
        return f"names are in small letters; give method={name}"
    if name in _KNOWN_ELSEWHERE:
        return f"there is no method of this name; {_KNOWN_ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, methods, n=3)
    fix = f"did you mean {' or '.join(near)}? " if near else ""
    return f"there is no such method; {fix}docs/reference/methods.md has all {len(methods)}"


def _unreadable(override: str) -> str:
    if override.startswith(_LONG_DASHES):
        return f"{override}: begins with a long dash; give --{override.lstrip(''.join(_LONG_DASHES))}"
    name, sign, value = override.partition("=")
    if (name, value) != (name.strip(), value.strip()):
        return f"{override}: give it without spaces, {name.strip()}={value.strip()}"
    if not sign:
        return f"{override}: a setting needs a value; give {override}=VALUE"
    if value.startswith("~"):
        return f"{override}: ~ is not replaced here; give {name}={Path(value).expanduser()}"
    return f"{override}: {_GRAMMAR}; {_quoted(name, value)}"


def _quoted(name: str, value: str) -> str:
    return f"quote the value: '{name}=\"{value}\"'"


def _override(name: str, overrides: list[str]) -> str:
    """As the user gave it."""
    return next((given for given in overrides if given.lstrip("+").partition("=")[0] == name), name)
