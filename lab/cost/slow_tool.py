"""An agent that waits for a tool before it answers: the long-tailed latency of lab/cost/overlap.py."""

import asyncio
import random
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

_MEAN_S, _LONGEST_S = 1.0, 6.0


class SlowToolAgentLoop(SingleTurnAgentLoop):
    """verl's single-turn agent after a call whose duration is exponential, cut at `_LONGEST_S`."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        await asyncio.sleep(min(random.expovariate(1 / _MEAN_S), _LONGEST_S))
        return await super().run(sampling_params, **kwargs)
