"""An agent that answers at once with the longest response: for the last row of `tests.reliability.scale`.

The stored data of a trajectory has a real trajectory's size, and no engine counts tokens meanwhile.
"""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

_PROMPT_TOKENS, _TOKEN = 64, 5


class LongResponses(AgentLoopBase):
    """An agent loop without requests and rewards, which returns a trajectory of policy version 0."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        most = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=[_TOKEN] * _PROMPT_TOKENS,
            response_ids=[_TOKEN] * most,
            response_mask=[1] * most,
            response_logprobs=[-1.0] * most,
            reward_score=1.0,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"min_global_steps": 0, "max_global_steps": 0, "reward_extra_info": {}},
        )
