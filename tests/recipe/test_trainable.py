"""A model that the trainer cannot build is refused by its config.json, before anything starts and in the dry run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.fully_async_policy import main
from recipe.fully_async_policy.plan.gpu_plan import norms_line
from recipe.fully_async_policy.settings.errors import SettingError
from recipe.fully_async_policy.settings.model import check_trainable
from tests.recipe.refused import MODEL, run
from verl_vcpo.actor.model import models
from verl_vcpo.actor.model.models import MODELS

LLAMA_3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


def write(good: dict[str, str], **settings: Any) -> None:
    Path(good[f"{MODEL}.path"], "config.json").write_text(json.dumps(settings))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["start", "dry run"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"model_type": "glm4_moe"},
            "model_type=glm4_moe needs Transformer Engine, which is not installed here; take a model of type llama, "
            "qwen2, qwen3, qwen3_moe",
        ),
        ({"model_type": "gpt2"}, "model_type=gpt2 is not supported: no test has trained one, so the trainer might"),
        ({"model_type": "gemma2"}, "takes no packed sequences; take a model of type llama, qwen2, qwen3, qwen3_moe"),
        (
            {"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "the trainer has no rotary positions of type yarn for model_type=qwen2",
        ),
        (
            {"model_type": "llama", "rope_parameters": LLAMA_3 | {"original_max_position_embeddings": 4096}},
            "Megatron does not scale rotary positions by",
        ),
        ({"model_type": "llama", "attention_bias": True}, "leave out the biases that attention_bias=true"),
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}, "its weights are quantized (quant"),
        ({"model_type": "llama", "mlp_bias": True}, "leave out the biases that mlp_bias=true"),
    ],
    ids=str,
)
def test_refused(
    good: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    expected: str,
    options: list[str],
) -> None:
    write(good, **settings)
    line = run(good, capsys, *options)
    assert f"error: {MODEL}.path={good[f'{MODEL}.path']}: " in line and expected in line


def check(tmp_path: Path, device: str = "cuda", lora: dict[str, Any] | None = None, **settings: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    of_model = {"path": str(tmp_path), "lora": lora or {"rank": 0}}
    actor = {"model": of_model, "rollout": {"enable_rollout_routing_replay": False}}
    config = {"actor_rollout_ref": actor, "critic": {"enable": False}, "trainer": {"device": device}}
    check_trainable(OmegaConf.create(config))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this environment one for GPUs, as far as the check sees."""

    def of(transformer_engine: bool) -> None:
        find = models.importlib.util.find_spec
        answer = models.importlib.util.find_spec("torch") if transformer_engine else None
        monkeypatch.setattr(models, "is_for_cpus", lambda: False)
        monkeypatch.setattr(
            models.importlib.util,
            "find_spec",
            lambda name, *more: answer if name == "transformer_engine" else find(name, *more),
        )

    return of


def test_gpus_without_transformer_engine(tmp_path: Path, installed: Any) -> None:
    installed(transformer_engine=False)
    for kind in ("llama", "qwen2", "qwen3"):
        check(tmp_path, model_type=kind)
    check(tmp_path, model_type="llama", rope_parameters=LLAMA_3 | {"original_max_position_embeddings": 8192})
    for kind in ("qwen3_moe", "glm4_moe"):
        with pytest.raises(SettingError, match=r"install it \(scripts/install_gpu.sh --te\), or take"):
            check(tmp_path, model_type=kind)


def test_gpus_with_transformer_engine(tmp_path: Path, installed: Any) -> None:
    installed(transformer_engine=True)
    for kind, model in MODELS.items():
        check(tmp_path, model_type=kind, rope_scaling={"type": model.positions[0]}, attention_bias=model.has_biases)
    with pytest.raises(SettingError, match="model_type=gpt2 is not supported"):
        check(tmp_path, model_type="gpt2")


def test_experts_have_no_adapters(tmp_path: Path, installed: Any) -> None:
    installed(transformer_engine=True)
    attention, experts = ["linear_qkv", "*.layers.0.*.linear_proj"], ["linear_qkv", "linear_fc1"]
    mixture = {"model_type": "qwen3_moe", "num_experts": 8}
    lora = {"rank": 4, "merge": True, "target_modules": attention}
    check(tmp_path, lora=lora, **mixture)
    check(tmp_path, lora=lora | {"target_modules": experts, "merge": False}, model_type="qwen3")
    for refused in (experts, ["*"], ["decoder*|x.linear_qkv"], [], None):
        with pytest.raises(SettingError, match=r"adapters of attention alone; set it to \[linear_qkv,linear_proj\]"):
            check(tmp_path, lora=lora | {"target_modules": refused}, **mixture)
    with pytest.raises(SettingError, match=r"lora.merge=\S+: vLLM would hold an adapter for every expert"):
        check(tmp_path, lora=lora | {"merge": False}, **mixture)
    with pytest.raises(SettingError, match=r"lora.rank=4: adapters of latent attention are not supported"):
        check(tmp_path, lora=lora, model_type="deepseek_v3", n_routed_experts=8, kv_lora_rank=512)


def test_groups_of_experts(tmp_path: Path, installed: Any) -> None:
    installed(transformer_engine=True)
    with pytest.raises(SettingError, match="limits groups of experts by another rule"):
        check(tmp_path, model_type="deepseek_v2", topk_method="group_limited_greedy", rope_scaling={"type": "yarn"})


def test_positions_of_two_kinds_of_layers(tmp_path: Path, installed: Any) -> None:
    installed(transformer_engine=True)
    near = {"rope_type": "default", "rope_theta": 1e4}
    check(tmp_path, model_type="gemma3_text", rope_parameters={"sliding": near, "full": {"rope_type": "linear"}})
    with pytest.raises(SettingError, match="no rotary positions of type yarn"):
        check(tmp_path, model_type="gemma3_text", rope_parameters={"sliding": near, "full": {"rope_type": "yarn"}})


def test_a_plan_for_gpus_on_a_laptop_tells_what_the_model_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment for CPUs cannot say what the cluster has installed, whichever build of torch it has."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("VCPO_HARDWARE", "gpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    given = ["+task=math", "hardware=gpu", "trainer.n_gpus_per_node=4", f"{MODEL}.path={tmp_path}", "--dry-run"]
    assert main.main(given) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "DeepSeek-V3 needs Transformer Engine: scripts/install_gpu.sh --te, on every node." in printed


@pytest.mark.parametrize(
    ("transformer_engine", "expected"),
    [
        (False, "packed, on Megatron's own layers (Transformer Engine is not installed); a second"),
        (True, "packed, on the layers of Transformer Engine; a second"),
    ],
)
def test_the_plan_names_the_layers_that_are_installed(
    tmp_path: Path, installed: Any, transformer_engine: bool, expected: str
) -> None:
    installed(transformer_engine)
    actor = {"megatron": {"override_transformer_config": {}}}
    config = OmegaConf.create({"vcpo": {}, "actor_rollout_ref": {"model": {"path": str(tmp_path)}, "actor": actor}})
    line = norms_line(config) or ""
    assert expected in line
    assert ("checks the installed version" in line) is transformer_engine


def test_the_table_names_models_that_have_a_bridge() -> None:
    """In a process of its own: importing Megatron-Bridge takes seconds."""
    program = """
from verl_vcpo.actor.model.megatron_bridge import AutoBridge
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes
from verl_vcpo.actor.model.models import MODELS
bridged = AutoBridge.list_supported_models()
print(*(kind for kind in MODELS if classes[kind] not in bridged), "checked")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "checked"
