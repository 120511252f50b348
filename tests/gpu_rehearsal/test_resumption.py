"""Actor and critic on a GPU that go on from a checkpoint are what they were without a stop, to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.resumption import stopped_and_not, train_actor, train_critic

ROLES = {"language_model": train_actor, "value_model": train_critic}
OFFLOADED = {"optimizer_offload": True, "param_offload": True}


@pytest.mark.parametrize("engine", [{}, OFFLOADED], ids=["on the GPU", "offloaded"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ROLES)
def test_going_on_is_not_having_stopped(
    build: Callable[..., Any], tmp_path: Path, model_type: str, dtype: str, before: int, engine: dict[str, bool]
) -> None:
    difference, change = stopped_and_not(
        lambda: build(dtype, model_type, **engine), ROLES[model_type], before, tmp_path
    )
    assert difference == 0.0
    assert change > 1e-4, "the steps changed nothing, so the comparison proves nothing"
