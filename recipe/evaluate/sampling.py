"""The responses of vLLM, in this process, to validation problems, and their rewards: all as in the trainer.

Importing the module imports vLLM and verl.
"""

import asyncio
import contextlib
import io
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, which ends with this one

import numpy as np
import torch
import verl  # noqa: F401  # its plugin prepares vLLM on a CPU
from omegaconf import DictConfig
from tensordict import TensorDict
from transformers import AutoConfig
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils import hf_tokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from vllm import LLM, SamplingParams

from recipe.evaluate.estimates import Answer
from recipe.fully_async_policy.settings.own_code import EXTRA_INFO_OF_A_RESPONSE
from verl_vcpo.common.data_columns import KEPT
from verl_vcpo.dataset.files import keep_files_apart
from verl_vcpo.user_code.errors import UserCodeError
from verl_vcpo.user_code.reward import bound_custom_reward
from verl_vcpo.user_code.reward_function import of_manager

_ATTEMPTS = 4  # of a reward at one response, as a run has for a prompt


def answers_of(config: DictConfig, samples: int, temperature: float, top_p: float, top_k: int) -> list[Answer]:
    """Return `samples` scored responses of `actor_rollout_ref.model.path` to each row of `data.val_files`.

    Raises:
        UserCodeError: a response that the reward cannot score.
        ValueError: a model that vLLM cannot load.
    """
    model = config.actor_rollout_ref.model
    tokenizer = hf_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    data = config.data
    keep_files_apart(data)
    with contextlib.redirect_stdout(io.StringIO()):  # verl prints how many rows there are
        rows = create_rl_dataset(
            data.val_files, data, tokenizer, None, is_train=False, max_samples=data.get("val_max_samples", -1)
        )
    problems = [rows[i] for i in range(len(rows))]
    prompts = [tokens[-data.max_prompt_length :] for tokens in _prompts(config, tokenizer, problems)]
    drawn = samples if temperature > 0 else 1  # greedy responses are the same, and vLLM gives one
    sampling = SamplingParams(
        n=drawn,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=data.max_response_length,
        detokenize=False,
    )
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs = _engine(config).generate(asked, sampling, use_tqdm=sys.stderr.isatty())
    responses = [[list(one.token_ids) for one in output.outputs] * (samples // drawn) for output in outputs]
    return asyncio.run(_scored(config, tokenizer, problems, prompts, responses))


def _prompts(config: DictConfig, tokenizer: Any, problems: list[dict[str, Any]]) -> list[list[int]]:
    model = config.actor_rollout_ref.model
    kind = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).model_type
    template = config.data.get("apply_chat_template_kwargs", {})
    builder = create_continuous_token_builder(tokenizer, hf_model_type=kind, chat_template_kwargs=template)
    return [list(builder.build_initial_tokens(list(problem["raw_prompt"]))) for problem in problems]


def _engine(config: DictConfig) -> LLM:
    rollout, data, model = config.actor_rollout_ref.rollout, config.data, config.actor_rollout_ref.model
    return LLM(
        model=model.path,
        tokenizer=model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        dtype=rollout.dtype,
        seed=rollout.seed,
        max_model_len=rollout.max_model_len or data.max_prompt_length + data.max_response_length,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enforce_eager=rollout.enforce_eager,
        use_tqdm_on_load=False,
    )


async def _scored(
    config: DictConfig,
    tokenizer: Any,
    problems: list[dict[str, Any]],
    prompts: list[list[int]],
    responses: list[list[list[int]]],
) -> list[Answer]:
    bound_custom_reward(config)
    manager = load_reward_manager(config, tokenizer)

    async def answer(problem: int, response: list[int]) -> Answer:
        row = problems[problem]
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                result = await manager.run_single(_item(row, prompts[problem], response))
                break
            except UserCodeError:  # such as a server's answer 503; a run samples the prompt again
                if attempt == _ATTEMPTS:
                    raise
        score, beside = of_manager(result["reward_score"], result["reward_extra_info"])
        text = tokenizer.decode(response, skip_special_tokens=True)
        return Answer(problem, str(row["data_source"]), text, score, beside["acc"])

    return await asyncio.gather(*(answer(i, one) for i, of_one in enumerate(responses) for one in of_one))


def _item(row: dict[str, Any], prompt: list[int], response: list[int]) -> DataProto:
    """Return one response in the form in which verl's agent loops give it to a reward manager."""
    prompts, responses = torch.tensor([prompt]), torch.tensor([response], dtype=torch.int64)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": torch.ones(1, len(prompt) + len(response), dtype=torch.int64),
    }
    columns = {name: row[name] for name in KEPT if name in row}
    columns |= {"extra_info": {**row["extra_info"], **EXTRA_INFO_OF_A_RESPONSE}, "__num_turns__": 2}
    others = {}
    for name, value in columns.items():
        others[name] = np.empty(1, dtype=object)
        others[name][0] = value
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=others)
