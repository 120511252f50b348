"""The process behind `recipe.tasks.verifier`: reads questions, answers with math-verify. Started by it only."""

import json
import logging
import math
import os
import resource
import sys
from typing import Any

MEMORY_BYTES = 4 << 30  # address space; imports alone take about one GiB
_GRACE_S = 1  # more than the parent's limit, so that the parent ends this process first, and reports why


def main() -> None:
    """One JSON line per question, until the other side closes the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)  # math-verify warns, at every call, that its own time limit is off
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    from math_verify import parse, verify

    def compare(truth: str, answer: str) -> dict[str, Any]:
        gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
        if not gold:
            return {"error": "math-verify cannot read it"}
        return {"equal": bool(verify(gold, given, timeout_seconds=None))}

    for line in sys.stdin:
        question = json.loads(line)
        # The other side kills this process at the limit. Where it has died itself, the kernel does.
        limit_cpu(question["limit_s"])
        try:
            reply = compare(question["truth"], question["answer"])
        except (MemoryError, RecursionError):
            return  # no state to go on with; the other side takes a fresh process
        answers.write(json.dumps(reply) + "\n")


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so many more seconds of processor time."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds) + _GRACE_S, hard))


if __name__ == "__main__":
    main()
