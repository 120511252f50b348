"""Rewards that do what the response says: `sync`, and the same as a coroutine."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any


def sync(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], bonus: int = 1
) -> dict[str, Any] | float | None:
    match solution_str:
        case "sleep":
            time.sleep(600)
        case "wait":
            time.sleep(0.5)
        case "loop":
            while True:
                pass
        case "regex":
            re.fullmatch("(a|aa)+", "a" * 64 + "!")
        case "os._exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "sys.exit":
            sys.exit("bye")
        case "raise":
            raise ValueError("no number\nwith details")
        case "none":
            return None
        case "nan":
            return float("nan")
        case "child":
            subprocess.run(["sleep", "86399"])
        case "orphan":
            subprocess.run(["/bin/sh", "-c", "setsid sleep 86399 & exit"], env={"PATH": "/bin:/usr/bin"})
            os._exit(3)
        case text if text.startswith("daemon, "):
            subprocess.Popen(["/bin/sleep", "86399"], start_new_session=True, env={})
            match text.removeprefix("daemon, "):
                case "exit":
                    os._exit(3)
                case "kill the parent":
                    os.kill(os.getppid(), signal.SIGKILL)
                case "stop the parent":
                    os.kill(os.getppid(), signal.SIGSTOP)
                case "kill all":
                    os.killpg(0, signal.SIGKILL)
            time.sleep(600)
        case "flood":
            for _ in range(50):
                print("x" * 999_999)
    number = int(solution_str.split()[-1]) if solution_str.startswith("text") else 0
    score = number * bonus if not extra_info else float(extra_info["index"] + bonus)
    return {"score": score, "acc": 0.5, "truth": ground_truth}


async def coroutine(solution_str: str, **kwargs: Any) -> dict[str, Any] | float | None:
    if solution_str == "sleep":
        await asyncio.sleep(600)
    return sync(solution_str=solution_str, **kwargs)
