"""A faster way to make an agent loop for each response (extends verl/experimental/agent_loop/agent_loop.py).

verl calls `hydra.utils.instantiate`, which merges and copies all arguments: more than half of the processor time that
the start of an agent loop takes, for each of the thousands of responses of a step.
"""

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import hydra
from verl.experimental.agent_loop import agent_loop as upstream

_CLASS = "_target_"
_PLAIN = (str, int, float, bool, type(None))


def make(config: Mapping[str, Any], **arguments: Any) -> Any:
    """Make the agent loop of a configuration like `hydra.utils.instantiate`, but without copies of the arguments.

    A configuration with nested values, or with other instructions to hydra than the class, is left to hydra.
    """
    settings = dict(config)
    plain = all(isinstance(value, _PLAIN) for value in settings.values())
    if not plain or any(name.startswith("_") and name != _CLASS for name in settings):
        return hydra.utils.instantiate(config=config, **arguments)
    return _class(settings.pop(_CLASS))(**{**settings, **arguments})


_class = functools.cache(hydra.utils.get_class)


def make_without_copies() -> None:
    """Have verl's agent-loop workers in this process call `make` from now on."""
    upstream.hydra = SimpleNamespace(utils=SimpleNamespace(instantiate=make))
