"""Each family of models: transformers, the trainer and vLLM compute the same, and a step of VCPO changes all weights.

In a process of tests/kit/te_stack.py the layers are Transformer Engine's, which some families need.
"""

from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from safetensors.torch import load_file

from tests.actor.conftest import ONE_PROCESS, sgd
from tests.actor.test_export import log_probs_of
from tests.actor.test_vcpo_engine import train
from tests.kit import by_vllm, families
from tests.kit.actor import build_engine
from tests.kit.families import FAMILIES, by_transformers
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.model.models import MODELS, Install, trained_with
from verl_vcpo.actor.update.losses import padded_responses
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.cpu.megatron_shims import megatron_on_cpu

INSTALL = Install.TRANSFORMER_ENGINE if HAVE_TE else Install.CPU
TRAINED = [name for name, (kind, _) in FAMILIES.items() if kind in trained_with(INSTALL)]
TOLERANCE = 2e-5
EVERY_TIME = ("SmolLM2", "Qwen3-MoE")  # what vLLM repacks in ways of their own: a tied output layer, experts


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """What samplers get."""
    with megatron_on_cpu(), torch.no_grad():
        return {name: w.clone() for name, w in engine.bridge.export_hf_weights(engine.module, show_progress=False)}


@pytest.mark.parametrize("name", TRAINED)
def test_the_trainer_computes_what_transformers_computes(name: str, process_group: None, tmp_path: Path) -> None:
    """Catches a position, a norm, a window or a choice of experts that the bridge does not build."""
    checkpoint, batch = families.make(name, tmp_path), make_batch(ONE_PROCESS)
    engine, oracle = (build_engine(ONE_PROCESS, checkpoint, sgd()) for _ in range(2))
    with engine.eval_mode():
        outputs = engine.infer_batch(batch.clone())
    wanted = log_probs_of(by_transformers(checkpoint))
    error = (padded_responses(outputs["model_output"]["log_probs"], batch) - wanted).abs().max().item()
    assert error < TOLERANCE
    before, loaded = weights(engine), load_file(checkpoint / "model.safetensors")
    assert set(before) - {"lm_head.weight"} == set(loaded) - {"lm_head.weight"}
    assert all(before[key].equal(weight) for key, weight in loaded.items())
    train(engine, batch.clone(), VCPOSettings())
    train(oracle, batch.clone(), VCPOSettings(norms={"how": "per_trajectory"}))
    norms, expected = (each.last_update[0].squared_norm for each in (engine, oracle))
    assert expected.isfinite().all()
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
    unchanged = {key for key, weight in weights(engine).items() if weight.equal(before[key])}
    assert all(key.endswith("e_score_correction_bias") for key in unchanged), unchanged
    print(f"\n{name}: error {error:.0e}, norms {'one by one' if engine.packing.unpackable else 'packed'}")


def of_vllm(name: str) -> Any:
    """Return the case of a family, with its tier. With AMX vLLM packs latent attention, and packs no float32."""
    latent, amx = FAMILIES[name][1].get("kv_lora_rank"), "amx_tile" in Path("/proc/cpuinfo").read_text()
    fails = pytest.mark.xfail(bool(latent) and amx, raises=CalledProcessError, strict=True, reason="float32 and AMX")
    return pytest.param(name, marks=[fails] if name in EVERY_TIME else [fails, pytest.mark.nightly])


@pytest.mark.parametrize("name", map(of_vllm, FAMILIES))
def test_vllm_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """Catches a layer that keeps the weights that vLLM started with, or those of an earlier update."""
    checkpoint = families.make(name, tmp_path)
    wanted = log_probs_of(by_transformers(checkpoint))
    error = (by_vllm.log_probs(checkpoint, make_batch(ONE_PROCESS), tmp_path) - wanted).abs().max().item()
    assert error < TOLERANCE
    print(f"\n{name}: vLLM, error {error:.0e}")


def test_every_model_of_the_table_is_tested() -> None:
    assert {kind for kind, _ in FAMILIES.values()} == set(MODELS)
