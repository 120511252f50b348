"""Environment variables that packages of the stack read, and that decide where or whether a run works."""

import os
import re
from collections.abc import Mapping
from typing import Any

from recipe.fully_async_policy.settings.errors import SettingError, all_that_is_wrong

_THREADS = re.compile(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*"), "a whole number, 1 or more"
_PORT = re.compile(r"[1-9]\d{0,4}"), "the number of a port"
_VARIABLES = {"OMP_NUM_THREADS": _THREADS, "MKL_NUM_THREADS": _THREADS, "VLLM_PORT": _PORT}


def check_variables() -> None:
    """Refuse values that OpenMP would ignore, or that would end every sampler's start."""
    wrong = [
        SettingError(f"{name}={os.environ[name]}: give {words}, or unset it")
        for name, (right, words) in _VARIABLES.items()
        if name in os.environ and not right.fullmatch(os.environ[name])
    ]
    if wrong:
        raise all_that_is_wrong(wrong)


def cluster_address(ray_init: Mapping[str, Any]) -> str | None:
    """The running cluster that was named. None: the run starts a Ray of its own, also where one is running."""
    address = ray_init.get("address")
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    return None if address in (None, "local") else str(address)
