"""Agent loops are made without Hydra, and are those that Hydra would make."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.workers.rollout.replica import TokenOutput

from verl_vcpo.samplers.loop_objects import SharedSingleTurnLoop, _Instantiate

HERE = f"{__name__}.Loop"


class Loop(AgentLoopBase):
    """Keeps its arguments."""

    def __init__(self, limit: int = 1, limits: Any = None, **given: Any) -> None:
        self.limit, self.limits, self.given = limit, limits, given

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("fixed", [{}, {"limit": 3}, {"limits": {"turns": 2}}])
def test_a_loop_of_ones_own_is_made_for_each_trajectory(fixed: dict[str, Any]) -> None:
    make, config, tools = _Instantiate(), OmegaConf.create({"_target_": HERE, "name": "own", **fixed}), ToolListWrap([])
    first, second = make(config, tools=tools), make(config, tools=tools)
    assert first is not second and type(first) is Loop
    assert (first.limit, first.limits) == (fixed.get("limit", 1), fixed.get("limits"))
    assert first.given == {"name": "own", "tools": tools}, "the arguments that verl gives are given as they are"


class Tokenizer:
    """Counts the prompts that become tokens."""

    def __init__(self) -> None:
        self.calls, self.fails = 0, False
        self.chat_template = "{{ messages }}"

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        self.calls += 1
        if self.fails:
            raise RuntimeError("Already borrowed")
        return [len(message["content"]) for message in messages]


class Server:
    """Answers with the prompt and its length."""

    async def generate(self, prompt_ids: list[int], **_: Any) -> TokenOutput:
        prompt_ids.append(5)  # a caller's own list
        return TokenOutput(token_ids=[*prompt_ids, 9], log_probs=[-1.0] * (len(prompt_ids) + 1), extra_fields={})


async def outputs(loops: list[Any]) -> list[dict[str, Any]]:
    prompts = [[{"role": "user", "content": "ab" * (i % 2)}] for i in range(len(loops))]
    answers = await asyncio.gather(*[loop.run({}, raw_prompt=p) for loop, p in zip(loops, prompts, strict=True)])
    return [{**answer.model_dump(), "metrics": None} for answer in answers]


def test_a_prompt_becomes_tokens_once_and_the_output_is_verls() -> None:
    rollout = {"prompt_length": 8, "response_length": 8}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    registered, make = agent_loop._agent_loop_registry["single_turn_agent"], _Instantiate()

    def given(tokenizer: Tokenizer) -> dict[str, Any]:
        return dict(
            trainer_config=DictConfigWrap(config), server_manager=Server(), tokenizer=tokenizer, processor=None,
            dataset_cls=SimpleNamespace, data_config=DictConfigWrap(config.data), tools=ToolListWrap([]),
        )  # fmt: skip

    async def main() -> None:
        ours, verls = Tokenizer(), Tokenizer()
        own = [make(registered, **given(ours)) for _ in range(8)]
        assert len({*map(id, own)}) == 1 and type(own[0]) is SharedSingleTurnLoop
        assert await outputs(own) == await outputs([SingleTurnAgentLoop(**given(verls)) for _ in range(8)])
        assert (ours.calls, verls.calls) == (2, 8)
        ours.fails = True
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Already borrowed"):
                await own[0].ct_build_initial_tokens([{"role": "user", "content": b"new"}])
        ours.fails = False
        assert await own[0].ct_build_initial_tokens([{"role": "user", "content": b"new"}]) == [3]

    asyncio.run(main())
