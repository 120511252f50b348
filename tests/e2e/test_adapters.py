"""A run that trains adapters: samplers that get the adapters alone have the trainer's policy, and vLLM serves them."""

from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.updates_in_flight import log_probs, prompt_ids
from tests.kit.served_model import served_by_vllm
from tests.kit.small_run import TrainerRun
from verl_vcpo.report.run_log import MODEL_FOLDER, read_metrics

pytestmark = pytest.mark.e2e

MODEL = "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def run_dir(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of three steps at lag 0."""
    settings = [
        f"{MODEL}.lora.rank=4",
        f"{MODEL}.lora.merge=false",
        "actor_rollout_ref.rollout.load_format=auto",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "async.lag=0",
    ]
    folder = tmp_path_factory.mktemp("adapters") / "run"
    run = TrainerRun(assets, folder, *settings)
    assert run.wait() == 0, run.tail()
    return folder


def test_samplers_with_adapters_alone_have_the_trainers_policy(run_dir: Path, assets: Path) -> None:
    """At lag 0 all tokens are fresh: another policy than the trainer's, the first one too, has other log-probs."""
    lines = [line for line in read_metrics(run_dir) if line["step"]]
    assert len(lines) == 3 and lines[0]["grad_norm"] > 0, "later steps may find no right answer, at this learning rate"
    assert all(line["actor/vcpo/mismatch/rms"] < 1e-5 for line in lines), lines
    first, last = (load_file(folder / "model.safetensors") for folder in (assets / "model", run_dir / MODEL_FOLDER))
    moved = {name for name, weight in last.items() if (weight - first[name]).abs().max() > 1e-4}
    assert moved == {name for name in last if "_proj.weight" in name}, "adapters are merged into the model that stays"


def test_vllm_serves_the_adapter_on_the_model_that_stays(run_dir: Path, assets: Path) -> None:
    """The merged policy is transformers' own, so that neither vLLM nor the adapter's file is compared with itself."""
    merged, prompt = run_dir / MODEL_FOLDER, prompt_ids(assets / "model")
    options = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"policy={merged / 'adapter'}"]
    question: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 24,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    served = {}
    with served_by_vllm(assets / "model", run_dir / "serve.log", *options) as url:
        for name in ("policy", str(assets / "model")):
            answer = requests.post(f"{url}/v1/completions", json={"model": name, **question}, timeout=120).json()
            choice = answer["choices"][0]
            served[name] = choice["token_ids"], torch.tensor(choice["logprobs"]["token_logprobs"])
    policy = AutoModelForCausalLM.from_pretrained(merged)
    errors = [(log_probs(policy, prompt, ids) - found).abs().max().item() for ids, found in served.values()]
    assert errors[0] < 1e-4, "the adapter that is served is another policy than the merged one"
    assert errors[1] > 1e-3, "the adapter changes nothing, so the comparison proves nothing"
