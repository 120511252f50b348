"""Environment variables that packages of the stack read, where the values would be ignored or end the run late."""

import os
import re

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
