"""Rewards of a user, each wrong in another way."""

import os
import time
from typing import Any


def raises(solution_str: str, extra_info: dict[str, Any], **_: Any) -> float:
    print("a reward's own output")
    return extra_info["answer"]


def gives_no_score(**_: Any) -> dict[str, float]:
    return {"points": 1.0}


def exits(**_: Any) -> float:
    os._exit(3)


def hangs(**_: Any) -> float:
    time.sleep(60)
    return 0.0
