"""Advice of the plan leads where it says: given as it is written, the plan fits in the GiB that the advice names."""

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy import main
from recipe.fully_async_policy.plan.fitting import check_memory, micro_batch, warning
from recipe.fully_async_policy.plan.gpu_memory import read_layout, trainer_memory
from recipe.fully_async_policy.plan.model_shape import read_shape
from recipe.fully_async_policy.settings.consistency import check_consistency, layout_of_devices
from recipe.fully_async_policy.settings.errors import SettingError
from tests.recipe.test_gpu_memory import MODELS

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
FOUR = {"trainer.n_gpus_per_node": 4, f"{MEGATRON}.tensor_model_parallel_size": 4}
EIGHT = FOUR | {"trainer.n_gpus_per_node": 8}
LONG = {"data.max_response_length": 16384}
Plan = Callable[[str, dict[str, Any]], str]
RECOMPUTED, SPREAD = "recompute_granularity=full", "context_parallel_size=2"


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    with patch.dict(os.environ, VCPO_HARDWARE="gpu", VCPO_RUN_ID="test"):
        return main.compose(["+scale=gpu", "hardware=gpu"])


@pytest.fixture
def plan(tmp_path: Path, composed: DictConfig) -> Plan:
    """What the plan says of a model, of which config.json alone is here, with the sizes of scale/gpu.yaml."""

    def says(model: str, settings: dict[str, Any]) -> str:
        MODELS[model][0].save_pretrained(tmp_path / model)
        config = copy.deepcopy(composed)
        for name, value in ({"actor_rollout_ref.model.path": str(tmp_path / model)} | settings).items():
            OmegaConf.update(config, name, value)
        shape = read_shape(config.actor_rollout_ref.model.path)
        assert shape is not None
        try:
            check_consistency(config, layout_of_devices, micro_batch)
            check_memory(config, shape)
        except SettingError as refused:
            return str(refused)
        return warning(config, shape) or f"It fits: {trainer_memory(config, read_layout(config), shape).peak:.1f}"

    return says


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        # longer than a micro-batch: raised alone it would not fit, and parts of a sequence on two GPUs do
        ("Qwen3-8B", FOUR | LONG | {"vcpo.baseline": "opob"}, [RECOMPUTED, SPREAD]),
        ("Qwen3-8B", EIGHT | LONG, ["ppo_max_token_len_per_gpu=17408", SPREAD]),
        ("Qwen3-8B", EIGHT | {"data.max_response_length": 32768}, [RECOMPUTED, SPREAD]),
        # 28 heads cannot be shared by 8
        ("Qwen2.5-7B", FOUR | {"gpu_memory_gib": 39.4}, ["optimizer_offload=true"]),
        ("Qwen2.5-7B", {}, ["trainer.n_gpus_per_node=2"]),
        ("Qwen3-8B", FOUR | {f"{ACTOR}.ppo_max_token_len_per_gpu": 32768}, ["ppo_max_token_len_per_gpu=8192"]),
        ("Qwen3-8B", FOUR | {f"{ROLLOUT}.gpu_memory_utilization": 0.1}, ["gpu_memory_utilization=0.25"]),
        ("Qwen3-8B", FOUR | {f"{ROLLOUT}.gpu_memory_utilization": 0.99}, ["gpu_memory_utilization=0.9"]),
    ],
)
def test_what_is_advised_fits(plan: Plan, model: str, settings: dict[str, Any], named: list[str]) -> None:
    printed = plan(model, settings)
    advice = re.findall(r"(?:set|or) ((?:[\w.]+=\S+ )+)\(([\d.]+) GiB\)", printed)
    assert len(advice) == len(named) and all(name in given for name, (given, _) in zip(named, advice, strict=True))
    for given, gib in advice:
        fits = plan(
            model, settings | {name: yaml.safe_load(value) for name, value in re.findall(r"(\S+)=(\S+)", given)}
        )
        assert fits.startswith("It fits: ") and (fits == f"It fits: {gib}" or "utilization" in given)


def test_what_does_not_fit_on_four_times_the_gpus(plan: Plan) -> None:
    assert "no layout of up to four times the GPUs fits" in plan("Llama-3.1-8B", {"gpu_memory_gib": 8})
