"""The objects of agent loops (replaces a name of verl/experimental/agent_loop/agent_loop.py).

verl has Hydra find and make an agent loop for every trajectory. Here its class is found once; a loop for one turn,
which keeps nothing of a trajectory, is one object for all trajectories of a worker.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import hydra
from omegaconf import DictConfig, ListConfig
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

_PROMPTS = 512
"""The number of prompts whose tokens an object remembers: a prompt's samples begin at about the same time."""


class SharedSingleTurnLoop(SingleTurnAgentLoop):
    """verl's agent loop for one turn, which makes the tokens of a prompt once for all of the prompt's samples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts: OrderedDict[str, asyncio.Task[list[int]]] = OrderedDict()

    async def ct_build_initial_tokens(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """The prompt's tokens: a new list for each caller. See verl's method for arguments and errors."""
        build = super().ct_build_initial_tokens
        if any(value for value in kwargs.values()):  # pictures, sounds, tools
            return await build(messages, **kwargs)
        text = json.dumps(messages, default=repr)
        if text not in self._prompts:
            self._prompts[text] = asyncio.ensure_future(build(messages, **kwargs))
            if len(self._prompts) > _PROMPTS:
                self._prompts.popitem(last=False)
        try:
            return list(await asyncio.shield(self._prompts[text]))  # a sample that is stopped must not stop the others
        except BaseException:  # it failed, or took too long: whoever tries again begins anew
            self._prompts.pop(text, None)
            raise

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> Any:
        """The response's tokens, mask and log-probs, as verl's method joins them in another thread."""
        builder = self.continuous_token_builder
        merged = builder.merge_assistant_tokens(runtime_token_ids, assistant_token_ids)
        aligned = builder.align_response_metadata(
            merged, response_mask, response_logprobs, assistant_logprobs=assistant_logprobs
        )
        return merged, *aligned


class _Instantiate:
    """Stands for `hydra.utils.instantiate`, for configurations of agent loops."""

    def __init__(self) -> None:
        self._makers: dict[int, tuple[Any, Callable[..., Any]]] = {}

    def __call__(self, config: Any, **given: Any) -> Any:
        """Return a loop as Hydra would make it of `config`, with the arguments `given`."""
        if id(config) not in self._makers:  # verl keeps a configuration for each name
            self._makers[id(config)] = config, _maker(config)
        _, make = self._makers[id(config)]
        return make(**given)


class _Shared:
    """Makes one loop, with the arguments of the first call: all calls of a worker have the same."""

    def __init__(self) -> None:
        self._loop: SharedSingleTurnLoop | None = None

    def __call__(self, **given: Any) -> SharedSingleTurnLoop:
        self._loop = self._loop or SharedSingleTurnLoop(**given)
        return self._loop


def _maker(config: Mapping[str, Any]) -> Callable[..., Any]:
    fixed = {str(name): value for name, value in config.items()}
    if any(isinstance(value, Mapping | DictConfig | ListConfig | list) for value in fixed.values()) or any(
        name.startswith("_") and name != "_target_" for name in fixed
    ):  # Hydra makes what is nested anew for each trajectory
        return partial(hydra.utils.instantiate, config)
    made = hydra.utils.get_object(fixed.pop("_target_"))
    return _Shared() if made is SingleTurnAgentLoop and not fixed else partial(made, **fixed)


def make_directly() -> None:
    """Have verl's agent-loop worker of this process make agent loops without Hydra."""
    agent_loop.hydra = SimpleNamespace(utils=SimpleNamespace(instantiate=_Instantiate()))
