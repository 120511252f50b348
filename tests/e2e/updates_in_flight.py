"""New weights arrive in the middle of a response: what the tokens' log-probs are then."""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_vcpo.samplers.kv_cache import KVCache

PROMPT = "Using the numbers 3, 5 and 7, write an expression that equals 22."
OLD, NEW = 2007, 2008  # versions that no training step reaches
TOKENS, EACH = 64, 8  # of a response, and at least from each of the versions
TRIES, FIRST_WAIT_S = 60, 0.1
SAME = 1e-3


def prompt_ids(model: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    message = {"role": "user", "content": PROMPT}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)


def log_probs(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


class Sampler:
    """The sampler of a run that has trained, which gets weights that do not come from its trainer.

    Args:
        trainer, run_id: of the run, whose Ray is up.
        model: the folder of the model whose shape the sampler's has.
    """

    def __init__(self, trainer: Any, run_id: str, model: Path) -> None:
        (self._replica,) = trainer.standalone_server_manager.rollout_replicas
        self._client, self._run_id = trainer.get_llm_client(), run_id
        self.prompt = prompt_ids(model)
        self.models = {version: AutoModelForCausalLM.from_pretrained(model) for version in (OLD, NEW)}
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in self.models[NEW].parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)

    def switch_to(self, kv_cache: KVCache) -> None:
        """From the next update on, `async.kv_cache` is `kv_cache`, though the run began with another value."""

        def switch(actor: Any) -> None:
            actor.server.config.custom["kv_cache"] = str(kv_cache)

        self._replica.config.custom["kv_cache"] = str(kv_cache)
        ray.get([server.__ray_call__.remote(switch) for server in self._replica.servers])

    async def update_weights(self, version: int) -> None:
        """What verl's CheckpointEngineManager does, with a file in the place of a trainer."""
        await self._replica.abort_all_requests()
        await self._replica.release_kv_cache()
        path = Path(f"/dev/shm/vcpo-{self._run_id}-weights-v{version}")
        torch.save({name: p.detach().clone() for name, p in self.models[version].named_parameters()}, f"{path}.partial")
        os.replace(f"{path}.partial", path)
        await asyncio.gather(*[worker.update_weights.remote(global_steps=version) for worker in self._replica.workers])
        await self._replica.resume_kv_cache()
        await self._replica.resume_generation()

    async def response_across_an_update(self, wait_s: float) -> Any:
        await self.update_weights(OLD)
        sampling = {"temperature": 1.0, "max_tokens": TOKENS, "logprobs": True, "ignore_eos": True}
        response = asyncio.create_task(
            self._client.generate(f"request {wait_s}", prompt_ids=self.prompt, sampling_params=sampling)
        )
        await asyncio.sleep(wait_s)
        await self.update_weights(NEW)
        return await response

    def tokens_before_update(self, output: Any) -> int:
        """How many of a response's first tokens have the log-probs of the old version."""
        old = log_probs(self.models[OLD], self.prompt, output.token_ids)
        return int(((torch.tensor(output.log_probs) - old).abs() < SAME).long().cumprod(0).sum())

    def spanning_response(self) -> Any:
        """A response with `EACH` tokens or more from each version. How long a token takes here is found by trying."""
        wait_s, seen = FIRST_WAIT_S, []
        for _ in range(TRIES):
            output = asyncio.run(self.response_across_an_update(wait_s))
            seen.append((round(wait_s, 4), before := self.tokens_before_update(output)))
            if EACH <= before <= TOKENS - EACH:
                return output
            wait_s *= random.uniform(1, 2) if before < EACH else random.uniform(0.5, 1)
        raise AssertionError(f"(wait in s, tokens before the update): {seen}")


def check_log_probs_around_an_update(sampler: Sampler, kv_cache: KVCache) -> None:
    output = sampler.spanning_response()
    assert len(output.token_ids) == len(output.log_probs) == TOKENS
    recorded = torch.tensor(output.log_probs)
    new = (recorded - log_probs(sampler.models[NEW], sampler.prompt, output.token_ids)).abs() < SAME
    switch = sampler.tokens_before_update(output)
    versions = output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]
    assert versions == (OLD, NEW) and not new[:switch].all(), "it starts with the old policy and ends with another"
    if kv_cache == KVCache.RECOMPUTE:
        assert new[switch:].all(), "after the update every log-prob is the new policy's"
    else:
        assert not new[switch:].all(), "after the update the old keys and values are still there"
