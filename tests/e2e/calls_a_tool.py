"""An agent loop of test_survives.py, which calls a tool that does not return."""

import json
from pathlib import Path
from typing import Any, ClassVar

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall

_FIRST_STEP = 3  # by then rewards do not fail any more, so that no prompt fails for two reasons
_AN_HOUR_S = 3600


class CallsATool(ToolAgentLoop):
    """verl's loop, which calls `wait` (waiting_tool.py) before the first turn of one trajectory, and for an hour. When
    the trajectory is sampled again, the call returns at once, and leaves a mark.

    marks: the folder of the mark.
    """

    _waits: ClassVar[tuple[str, int] | None] = None
    """The trajectory: of this worker, so another worker would leave no mark."""

    def __init__(self, *args: Any, marks: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._marks = marks

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        this = kwargs["uid"], kwargs["session_id"]
        if self._waits is None and kwargs["extra_info"]["split"] == "train" and kwargs["global_steps"] >= _FIRST_STEP:
            type(self)._waits = this
            await self._wait(_AN_HOUR_S)
        elif self._waits == this:
            await self._wait(0)
            Path(self._marks, "tool-returned").touch()
        return await super().run(sampling_params, **kwargs)

    async def _wait(self, seconds: int) -> None:
        call = FunctionCall(name="wait", arguments=json.dumps({"seconds": seconds}))
        response, _, _ = await self._call_tool(call, {}, None)
        assert response.text == "waited", response.text
