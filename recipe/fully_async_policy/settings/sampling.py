"""What would have samplers draw from another distribution than the one whose log-probs are recorded and trained on.

A sampler is a vLLM server. Whatever stands below `rollout.engine_kwargs.vllm` replaces, without a word, what verl makes
of the settings that are checked and planned with; what a request says replaces that again
(`verl_vcpo/samplers/sampling_params.py`). Validation may sample otherwise: nothing is trained on its responses.
"""

import re

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.settings.errors import Found

_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_ENGINE = f"{_ROLLOUT}.engine_kwargs.vllm"

DECIDED = {
    **{
        name: f"{_ROLLOUT}.{name}"
        for name in (
            *("cudagraph_capture_sizes", "data_parallel_size", "disable_log_stats", "dtype", "enable_chunked_prefill"),
            *("enable_prefix_caching", "enable_sleep_mode", "enforce_eager", "gpu_memory_utilization", "load_format"),
            *("logprobs_mode", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "quantization"),
            *("scheduling_policy", "seed"),
        )
    },
    "enable_expert_parallel": f"{_ROLLOUT}.expert_parallel_size",
    "enable_return_routed_experts": f"{_ROLLOUT}.enable_rollout_routing_replay",
    "tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "trust_remote_code": f"{_MODEL}.trust_remote_code",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), f"{_MODEL}.lora.rank"),
    **dict.fromkeys(("model", "model_tag", "model_weights", "revision", "code_revision"), f"{_MODEL}.path"),
    **dict.fromkeys(("tokenizer", "tokenizer_revision"), f"{_MODEL}.tokenizer_path"),
}
"""Of an option of vLLM: the setting of verl that decides it, for the checks and the plan too."""

_NOT_THE_MODELS = "the policy's log-probs do not have it"
_OF_REQUESTS = f"a run's requests bring their own sampling parameters; give {_ROLLOUT}.temperature"
_FOLDERS_CONFIG = f"the trainer's model would not have it; change config.json in the folder {_MODEL}.path"
REFUSED = {
    "config": f"would replace settings that are checked; give its options one by one, {_ENGINE}.NAME=VALUE",
    **dict.fromkeys(("generation_config", "override_generation_config"), _OF_REQUESTS),
    **dict.fromkeys(("hf_overrides", "hf_config_path"), _FOLDERS_CONFIG),
    **dict.fromkeys(("logits_processors", "watermark", "watermark_config"), f"{_NOT_THE_MODELS}; leave it out"),
    "kv_cache_memory_bytes": f"the plan would not have it; give {_ROLLOUT}.gpu_memory_utilization",
    **dict.fromkeys(
        (
            *("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size", "nnodes"),
            *("node_rank", "data_parallel_size_local", "data_parallel_rank", "master_addr", "master_port"),
            *("host", "port", "headless", "api_server_count"),
        ),
        f"a run starts its samplers itself; give {_ROLLOUT}.tensor_model_parallel_size, or leave it out",
    ),
    **dict.fromkeys(
        ("runner", "convert", "skip_tokenizer_init", "worker_cls", "scheduler_cls"),
        "a run's samplers generate tokens from texts, with vLLM's own workers; leave it out",
    ),
    "worker_extension_cls": "a sampler gets its weights through the run's own; leave it out",
}
"""Of other options of vLLM: why a run's samplers cannot have it, and what to do."""


def sampling(config: DictConfig) -> Found:
    """Settings with which samplers would draw, or record, another distribution than the checked one."""
    rollout = config.actor_rollout_ref.rollout
    processed = rollout.logprobs_mode == "processed_logprobs"
    if not processed and (rollout.logprobs_mode != "raw_logprobs" or rollout.temperature != 1):
        words = f"not of the distribution sampled at temperature={rollout.temperature}; set it to processed_logprobs"
        yield f"{_ROLLOUT}.logprobs_mode", words
    engine = OmegaConf.to_container(rollout.engine_kwargs.get("vllm") or OmegaConf.create({}))
    for name, value in engine.items():
        option = str(name).replace("-", "_")
        if value is not None and option in DECIDED:
            yield f"{_ENGINE}.{name}", f"would replace what is checked; give {DECIDED[option]} instead"
        elif value is not None and option in REFUSED:
            yield f"{_ENGINE}.{name}", REFUSED[option]
    if re.search(r"rejection_sample_method\W+synthetic", str(engine.get("speculative_config"))):
        words = "rejection_sample_method=synthetic accepts drafts that the policy would not draw; leave it out"
        yield f"{_ENGINE}.speculative_config", words
