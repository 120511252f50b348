"""An agent loop for a game on a server: a turn of the model is a move, and the server says what comes of it.

No error is caught: whatever fails, the trajectory fails, and its prompt is sampled again. So there is no reward but the
server's own.
"""

import asyncio
from typing import Any
from uuid import uuid4

from aiohttp import ClientConnectionError, ClientSession, ClientTimeout
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

_MOVE_TOKENS = 8
_REQUEST_LIMIT = ClientTimeout(total=30)
_PAUSES_S = (1, 2, 4, 8, 16)
"""Between attempts to begin an episode, for a server that is started again. A move is never repeated: a server that
broke off its answer may have made the move."""


class GuessingLoop(AgentLoopBase):
    """Plays one episode. `actor_rollout_ref.rollout.custom.game_url` is the server's address."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **row: Any) -> AgentLoopOutput:
        """Take turns until the server ends the episode, or the response has no room for another move."""
        episode, messages = uuid4().hex, list(row["raw_prompt"])
        tokens = await self.ct_build_initial_tokens(messages)
        prompt, mask, log_probs, versions = len(tokens), list[int](), list[float](), list[int]()
        async with ClientSession(timeout=_REQUEST_LIMIT, raise_for_status=True) as server:
            await self._begin(server, id=episode, seed=int(row["extra_info"]["index"]))
            while True:
                move = await self.server_manager.generate(
                    episode,  # the samplers' name for it: all turns go to the one that has the prefix in its cache
                    prompt_ids=tokens,
                    sampling_params={**sampling_params, "max_tokens": _MOVE_TOKENS},
                    priority=priority,
                )
                versions += [move.extra_fields["min_global_steps"], move.extra_fields["max_global_steps"]]
                merged, mask, log_probs = await self.ct_merge_assistant_token(
                    tokens, move.token_ids, mask, log_probs, move.log_probs
                )
                tokens, text = merged.token_ids, self.tokenizer.decode(move.token_ids, skip_special_tokens=True)
                reply = await self._ask(server, "step", id=episode, text=text)
                moved = [*messages, {"role": "assistant", "content": text}]
                if reply["done"]:
                    break
                messages = [*moved, {"role": "user", "content": reply["text"]}]
                merged, longer, observed = await self.ct_merge_context_msg(moved, messages, tokens, mask, log_probs)
                if len(longer) + _MOVE_TOKENS > self.rollout_config.response_length:
                    break
                tokens, mask, log_probs = merged.token_ids, longer, observed
        return AgentLoopOutput(
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            response_mask=mask,
            response_logprobs=log_probs,
            reward_score=reply["score"],
            num_turns=len(moved),
            metrics={},
            extra_fields={
                "min_global_steps": min(versions),  # of all turns: the lag bound counts from the oldest
                "max_global_steps": max(versions),
                "truncated": not reply["done"],
            },
        )

    async def _begin(self, server: ClientSession, **episode: Any) -> None:
        for pause_s in _PAUSES_S:
            try:
                return await self._ask(server, "reset", **episode)
            except ClientConnectionError:
                await asyncio.sleep(pause_s)
        return await self._ask(server, "reset", **episode)

    async def _ask(self, server: ClientSession, what: str, **arguments: Any) -> Any:
        url = self.rollout_config.custom["game_url"]
        if not url:
            raise ValueError("actor_rollout_ref.rollout.custom.game_url=null: give the server's address")
        async with server.post(f"{url}/{what}", json=arguments) as answer:
            return await answer.json(content_type=None)
