"""An actor and a critic that go on from a checkpoint are what they were without a stop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.actor import adamw, build_engine
from tests.kit.layout_run import ParallelLayout
from tests.kit.resumption import ONE_PROCESS, stopped_and_not, train_actor, train_critic

CASES = [
    *[("language_model", train_actor, n, ONE_PROCESS) for n in (0, 2)],
    *[("language_model", train_actor, n, ParallelLayout("LoRA", model="lora")) for n in (0, 2)],
    *[("value_model", train_critic, n, ONE_PROCESS) for n in (0, 2)],
]


@pytest.mark.parametrize(("model_type", "train", "before", "layout"), CASES)
def test_going_on_is_not_having_stopped(
    process_group: None,
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
    model_type: str,
    train: Callable[[Any, int], Any],
    before: int,
    layout: ParallelLayout,
) -> None:
    """Before the first step too, where torch's Adam has no state: with `trainer.critic_warmup` the actor waits."""

    def build() -> Any:
        return build_engine(layout, checkpoints(layout.model), adamw(), model_type=model_type)

    difference, change = stopped_and_not(build, train, before, tmp_path)
    assert difference == 0.0
    assert change > 1e-4, "the steps changed nothing, so the comparison proves nothing"
