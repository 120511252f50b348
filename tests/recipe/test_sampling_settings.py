"""What would change the distribution that is sampled is refused wherever it is written; validation may sample so."""

import inspect
import re

import pytest
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from recipe.fully_async_policy.settings import sampling
from recipe.fully_async_policy.settings.validate import validate
from tests.recipe.refused import ROLLOUT, composed, run

pytestmark = pytest.mark.usefixtures("nothing_starts")
ENGINE, VAL = f"{ROLLOUT}.engine_kwargs.vllm", f"{ROLLOUT}.val_kwargs"
ALL_TOKENS = "the policy's log-probs are over all tokens"

WRONG = {
    f"{ROLLOUT}.temperature=0": "rollout.temperature=0: vLLM samples at 0.01 or above, and the most likely token alone",
    f"{ROLLOUT}.temperature=0.005": "set it to 0.01 or more",
    f"{ROLLOUT}.pipeline_model_parallel_size=2": "size=2: verl's samplers have no pipeline",
    f"{ROLLOUT}.expert_parallel_size=2": "=2: a sampler spreads its experts over all of its 1 ranks",
    f"+{ENGINE}.kv_cache_memory_bytes=9": f"the plan would not have it; give {ROLLOUT}.gpu_memory_utilization",
    f"+{ENGINE}.port=80": "a run starts its samplers itself",
    f"+{ENGINE}.runner=pooling": "a run's samplers generate tokens from texts",
    f"{ROLLOUT}.top_p=0.9": f"rollout.top_p=0.9: {ALL_TOKENS}",
    f"{ROLLOUT}.top_k=20": f"rollout.top_k=20: {ALL_TOKENS}",
    f"+{ROLLOUT}.min_p=0.1": "min_p=0.1: there is no such setting; samplers draw from all tokens of the policy",
    f"+{ROLLOUT}.repetition_penalty=1.1": "rollout.repetition_penalty=1.1: a penalty is no part of the policy",
    f"{ROLLOUT}.do_sample=false": "rollout.do_sample=false: the most likely token alone",
    f"{ROLLOUT}.full_determinism=true": "full_determinism=true: all samples of a prompt would be drawn from one seed",
    f"{ROLLOUT}.logprobs_mode=raw_logits": "logprobs_mode=raw_logits: not of the distribution",
    f"{ROLLOUT}.logprobs_mode=raw_logprobs {ROLLOUT}.temperature=0.7": "not of the distribution sampled at temperature",
    f"+{ENGINE}.logprobs_mode=raw_logprobs {ROLLOUT}.temperature=0.6": (
        f"{ENGINE}.logprobs_mode=raw_logprobs: would replace what is checked; give {ROLLOUT}.logprobs_mode instead"
    ),
    f"+{ENGINE}.seed=1": f"vllm.seed=1: would replace what is checked; give {ROLLOUT}.seed instead",
    f"+{ENGINE}.max_num_seqs=9": f"would replace what is checked; give {ROLLOUT}.max_num_seqs instead",
    f"+{ENGINE}.override_generation_config={{top_k: 5}}": "a run's requests bring their own sampling parameters",
    f"+{ENGINE}.generation_config=/tmp": "a run's requests bring their own sampling parameters",
    f"+{ENGINE}.logits_processors=[a.b]": "the policy's log-probs do not have it; leave it out",
    f"+{ENGINE}.hf_overrides={{rope_theta: 1}}": "the trainer's model would not have it; change config.json",
    f"+{ENGINE}.config=a.yaml": "would replace settings that are checked; give its options one by one",
    f"+{ENGINE}.speculative_config={{method: ngram, rejection_sample_method: synthetic}}": "accepts drafts that the",
    # no effect
    f"{VAL}.do_sample=true": "val_kwargs.do_sample=true: has no effect",
    f"{ROLLOUT}.multi_turn.enable=true": "multi_turn.enable=true: has no effect",
    f"{ROLLOUT}.over_sample_rate=0.5": "the samplers are vLLM's, and do not read it",
}
LEGAL = (
    {f"{VAL}.temperature": "0.6", f"{VAL}.top_p": "0.9", f"{VAL}.top_k": "20", f"{VAL}.do_sample": "true"},
    {f"{ROLLOUT}.temperature": "0.7", f"+{ROLLOUT}.repetition_penalty": "1.0"},
    {f"+{ENGINE}.speculative_config": "{method: ngram, num_speculative_tokens: 2}"},
    {f"+{ENGINE}.kv_cache_dtype": "fp8", f"+{ENGINE}.max_logprobs": "5"},
)


@pytest.mark.parametrize("given", WRONG)
def test_another_distribution(good: dict[str, str], capsys: pytest.CaptureFixture[str], given: str) -> None:
    overrides = re.split(r" (?=[+a-z_]+\.)", given)
    assert WRONG[given] in run({**good, "run_dir": good["run_dir"]}, capsys, *overrides)


@pytest.mark.parametrize("legal", LEGAL, ids=str)
def test_the_same_distribution(good: dict[str, str], legal: dict[str, str]) -> None:
    validate(composed({**good, **legal}))


def test_every_option_that_verl_makes_of_a_setting_is_known() -> None:
    """Catches a new version of verl in which engine_kwargs would replace one more setting."""
    source = inspect.getsource(vLLMHttpServer.launch_server)
    of_settings = set(re.findall(r'^ {12}"(\w+)": (?:self\.|json\.|quant|hf_o)', source, re.MULTILINE))
    assert {"logprobs_mode", "seed", "override_generation_config", "hf_overrides"} <= of_settings
    others = {"worker_extension_cls", "compilation_config"}
    assert of_settings - others <= {*sampling.DECIDED, *sampling.REFUSED}
