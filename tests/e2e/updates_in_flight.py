"""New weights arrive in the middle of a response: what the tokens' log-probs are then."""

import asyncio
import os
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_vcpo.workers.rollout.kv_cache import KVCache

PROMPT = "Using the numbers 3, 5 and 7, write an expression that equals 22."
OLD, NEW, TOKENS, TRIES = 2007, 2008, 64, 20  # versions that no training step reaches


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

    def spanning_response(self) -> Any:
        """A response whose tokens come from both versions: when the update hits it is a matter of milliseconds."""
        for i in range(TRIES):
            output = asyncio.run(self.response_across_an_update(wait_s=0.02 * (i + 1)))
            if (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (OLD, NEW):
                return output
        raise AssertionError(f"no response out of {TRIES} spanned the update")


def check_log_probs_around_an_update(sampler: Sampler, kv_cache: KVCache) -> None:
    output = sampler.spanning_response()
    assert len(output.token_ids) == len(output.log_probs) == TOKENS
    recorded = torch.tensor(output.log_probs)
    of = {version: log_probs(model, sampler.prompt, output.token_ids) for version, model in sampler.models.items()}
    old, new = ((recorded - of[version]).abs() < 1e-3 for version in (OLD, NEW))
    assert not old.all() and old[0] and not new[0], "it starts with the old policy and ends with another"
    switch = int(old.long().cumprod(0).sum())
    if kv_cache == KVCache.RECOMPUTE:
        assert new[switch:].all(), "after the update every log-prob is the new policy's"
    else:
        assert not new[switch:].all(), "after the update the old keys and values are still there"
