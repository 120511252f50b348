"""Where the optimizer's state is, and what its step needs besides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verl.utils.device import get_device_name
from verl.workers.engine.megatron import transformer_impl as upstream

from tests.kit.actor import adamw
from tests.kit.layout_run import ParallelLayout
from verl_vcpo.actor import megatron_actor as transformer_impl

DISTRIBUTED = ParallelLayout("one process")


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way the optimizer's state goes, in order."""
    seen: list[str] = []
    for module in (upstream, transformer_impl):
        for name, where in (("load_megatron_optimizer", "to the GPU"), ("offload_megatron_optimizer", "to the host")):
            monkeypatch.setattr(module, name, lambda _, where=where: seen.append(where))
    return seen


def test_with_offload_the_state_is_on_the_gpu_for_the_step_only(
    make_engine: Callable[..., Any], moves: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an update whose activations lie beside the optimizer's state."""
    engine = make_engine(optimizer=adamw(), layout=DISTRIBUTED)
    engine._is_offload_optimizer = True
    step = engine.optimizer.step
    monkeypatch.setattr(engine.optimizer, "step", lambda: (moves.append("step"), step())[1])
    engine.to(get_device_name(), model=False, grad=False)
    assert moves == []
    engine.optimizer_step()
    assert moves == ["to the GPU", "step", "to the host"]


def test_without_offload_the_state_stays(make_engine: Callable[..., Any], moves: list[str]) -> None:
    engine = make_engine()
    engine.optimizer_step()
    assert moves == []


def test_adamw_steps_one_parameter_at_a_time(make_engine: Callable[..., Any], tmp_path: Path) -> None:
    """Catches torch's default on a GPU, which needs the memory of all parameters once more; after a resumption too."""
    engine = make_engine(optimizer=adamw(), layout=DISTRIBUTED)
    groups = engine.optimizer.param_groups
    assert [group["foreach"] for group in groups] == [False] * len(groups)
    for group in groups:
        group["foreach"] = None  # as in a checkpoint of verl's
    engine.optimizer_step()
    engine.save_checkpoint(str(tmp_path))
    resumed = make_engine(optimizer=adamw(), layout=DISTRIBUTED)
    resumed.load_checkpoint(str(tmp_path), del_local_after_load=False)
    assert {group["foreach"] for group in resumed.optimizer.param_groups} == {False}
