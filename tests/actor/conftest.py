"""A patched Megatron actor in this process, on a model small enough to check by hand."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verl.workers.config import McoreOptimizerConfig

from tests.kit.layout_run import ParallelLayout, make_checkpoint

# Tests for a process whose Megatron has Transformer Engine: test_transformer_engine.py starts it.
collect_ignore = [] if "tests.kit.te_stack" in sys.modules else ["te"]

LEARNING_RATE = 10.0
ONE_PROCESS = ParallelLayout("one process", distributed_optimizer=False)  # Megatron's distributed optimizer has no SGD


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint: untied, tied or moe."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Path] = {}

    def checkpoint(model: str = "untied") -> Path:
        if model not in made:
            made[model] = make_checkpoint(model, folder)
        return made[model]

    return checkpoint


def sgd() -> McoreOptimizerConfig:
    """An update is the gradient times the learning rate."""
    return McoreOptimizerConfig(
        optimizer="sgd",
        lr=LEARNING_RATE,
        weight_decay=0.0,
        clip_grad=1e9,
        lr_warmup_steps=0,
        total_training_steps=100,
        override_optimizer_config={"sgd_momentum": 0.0},
    )


@pytest.fixture
def make_engine(process_group: None, checkpoints: Callable[[str], Path]) -> Callable[..., Any]:
    """Builds a freshly loaded engine, with SGD unless told otherwise."""
    from tests.kit.actor import build_engine

    def make(
        model: str = "untied", optimizer: McoreOptimizerConfig | None = None, layout: ParallelLayout = ONE_PROCESS
    ) -> Any:
        return build_engine(layout, checkpoints(model), optimizer or sgd())

    return make
