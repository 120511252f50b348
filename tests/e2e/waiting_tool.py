"""A tool of test_survives.py, in a file as `multi_turn.function_tool_path` names it."""

import time

from verl.tools.function_tool import function_tool


@function_tool
def wait(seconds: int) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    time.sleep(seconds)
    return "waited"
