"""New weights arrive in the middle of a response: what the tokens' log-probs are then."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.fully_async_policy import main
from testkit.small_run import small_task
from tests.e2e.conftest import prepared
from tests.e2e.test_whole_stack import PROMPT, log_probs

pytestmark = pytest.mark.e2e

OLD, NEW, TOKENS, TRIES = 7, 8, 64, 20


class Samplers:
    """The samplers of a run that trains nothing, and weights that do not come from a trainer."""

    def __init__(self, assets: Path, config: Any, run_id: str) -> None:
        from verl.workers.rollout.llm_server import LLMServerManager

        from verl_vcpo.workers.rollout.llm_client import ResumingLLMClient

        self._run_id = run_id
        self._manager = LLMServerManager.create(config=config)
        self._client = self._manager.get_client(client_cls=ResumingLLMClient)
        tokenizer = AutoTokenizer.from_pretrained(f"{assets}/model")
        self.prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
        )
        self.models = {OLD: AutoModelForCausalLM.from_pretrained(f"{assets}/model")}
        self.models[NEW] = AutoModelForCausalLM.from_pretrained(f"{assets}/model")
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in self.models[NEW].parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)

    async def update_weights(self, version: int) -> None:
        """What verl's CheckpointEngineManager does, with a file in the place of a trainer."""
        replica = self._manager.rollout_replicas[0]
        await replica.abort_all_requests()
        await replica.release_kv_cache()
        path = Path(f"/dev/shm/vcpo-{self._run_id}-weights-v{version}")
        torch.save({name: p.detach().clone() for name, p in self.models[version].named_parameters()}, f"{path}.partial")
        os.replace(f"{path}.partial", path)
        await asyncio.gather(*[worker.update_weights.remote(global_steps=version) for worker in replica.workers])
        await replica.resume_kv_cache()
        await replica.resume_generation()

    async def response_across_an_update(self, wait_s: float) -> Any:
        await self.update_weights(OLD)
        sampling = {"temperature": 1.0, "max_tokens": TOKENS, "logprobs": True, "ignore_eos": True}
        response = asyncio.create_task(
            self._client.generate(f"request {wait_s}", prompt_ids=self.prompt, sampling_params=sampling)
        )
        await asyncio.sleep(wait_s)
        await self.update_weights(NEW)
        return await response


@pytest.fixture(params=["recompute", "keep"])
def samplers(request: pytest.FixtureRequest, assets: Path, tmp_path: Path) -> Iterator[tuple[str, Samplers]]:
    run_id, config = prepared([*small_task(assets, tmp_path), f"async.kv_cache={request.param}"])
    with main.ray_session(config, run_id):
        yield request.param, Samplers(assets, config, run_id)


def spanning_response(samplers: Samplers) -> Any:
    """A response whose tokens come from both versions: when the update hits it is a matter of milliseconds."""
    for i in range(TRIES):
        output = asyncio.run(samplers.response_across_an_update(wait_s=0.02 * (i + 1)))
        if (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (OLD, NEW):
            return output
    raise AssertionError(f"no response out of {TRIES} spanned the update")


def test_log_probs_around_an_update(samplers: tuple[str, Samplers]) -> None:
    kv_cache, running = samplers
    output = spanning_response(running)
    assert len(output.token_ids) == len(output.log_probs) == TOKENS
    recorded = torch.tensor(output.log_probs)
    of = {version: log_probs(model, running.prompt, output.token_ids) for version, model in running.models.items()}
    old, new = ((recorded - of[version]).abs() < 1e-3 for version in (OLD, NEW))
    assert not old.all() and old[0] and not new[0], "it starts with the old policy and ends with another"
    switch = int(old.long().cumprod(0).sum())
    if kv_cache == "recompute":
        assert new[switch:].all(), "after the update every log-prob is the new policy's"
    else:
        assert not new[switch:].all(), "after the update the old keys and values are still there"
