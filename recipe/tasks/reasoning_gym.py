"""Tasks of the package reasoning-gym: generated problems, scored by the package's own verifiers.

    python -m recipe.tasks.reasoning_gym [NAME ...]     lists the tasks, each with an example

A row holds what its problem was generated from. The reward generates the problem again, so that a verifier has all that
it wants to know. The score is 1 where the verifier gives full marks, else 0.
"""

import argparse
import functools
import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from recipe.command_line import OneLineParser, run_command
from recipe.tasks.boxed import last_boxed, last_number, last_tagged
from recipe.tasks.countdown.reward import solves
from recipe.tasks.rows import Prepared, Row, make_row

HELP = "a task of reasoning-gym; its reward is reasoning-gym's verifier"
SOURCE = "reasoning_gym"
INSTRUCTION = "Write the answer between <answer> and </answer>."
TAGGED, LAST_NUMBER = "tagged", "last_number"
MAX_ANSWER_CHARS = 4096

_RUNS_PYTHON = "its verifier runs the answer as Python"
REFUSED = {
    "binary_matrix": _RUNS_PYTHON,
    "boxnet": "its verifier raises for a number as the answer, and no problem has an answer to check the verifier with",
    "complex_arithmetic": "its verifier gives full marks for the answer nan",
    "composite": "it is made of other tasks; give those",
    "game_of_life_halting": "its verifier gives full marks for any text",
    "intermediate_integration": _RUNS_PYTHON,
    "list_functions": "its problems are others in every process, whatever the seed",
    "n_queens": _RUNS_PYTHON,
    "polynomial_multiplication": _RUNS_PYTHON,
    "simple_integration": _RUNS_PYTHON,
    "spiral_matrix": _RUNS_PYTHON,
    "string_insertion": _RUNS_PYTHON,
}
"""Tasks that no policy should be trained on -> why. tests/tasks/test_reasoning_gym.py looks at all."""
_BY_COUNTDOWN = ("countdown", "puzzle24")
"""Tasks whose verifier runs the answer as Python, and whose answers our reward of Countdown can score."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, help="`python -m recipe.tasks.reasoning_gym` lists them")
    parser.add_argument("--difficulty", type=json.loads, default={}, metavar="JSON", help='as {"max_terms": 3}')
    parser.add_argument("--level", type=int, default=0, help="of reasoning-gym's curriculum; 0: its default settings")
    parser.add_argument("--train", type=int, default=2000, help="training problems (default: %(default)s)")
    parser.add_argument("--val", type=int, default=100, help="held-out problems (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--instruction", default=INSTRUCTION, help="follows each question (default: %(default)s)")
    parser.add_argument("--answer", choices=(TAGGED, LAST_NUMBER), default=TAGGED, help="where a response has it")


def build(args: argparse.Namespace) -> Prepared:
    """Distinct problems of one task, none both taught and held out. Raises ValueError for settings it cannot have."""
    if min(args.train, args.val) < 1:
        raise ValueError(f"train={args.train}, val={args.val}: give 1 or more of each")
    made = {
        "task": args.name,
        "settings": settings_of(args.name, args.difficulty, args.level),
        "seed": args.seed,
        "size": args.train + args.val,
        "answer": args.answer,
        "version": installed(),
    }
    problems = _problems(*_generated_from(made))
    split: dict[str, list[Row]] = {"train": [], "val": []}
    seen: set[str] = set()
    for index in range(made["size"]):
        question = problems[index]["question"]
        part = "val" if len(split["val"]) < args.val else "train"
        if question not in seen:
            seen.add(question)
            message = f"{question}\n{args.instruction}".strip()
            row = make_row(f"{SOURCE}/{args.name}", message, json.dumps(made), part, index)
            row["extra_info"]["index"] = f"{args.name}/{args.level}/{index}"  # not that of a row of another file
            split[part].append(row)
    return Prepared(**split, settings=made, removed={"repeated": made["size"] - len(seen)})


def settings_of(task: str, difficulty: Mapping[str, Any], level: int) -> dict[str, Any]:
    """What reasoning-gym generates the task's problems from: a level of its curriculum, and `difficulty` above that.

    Raises ValueError for what reasoning-gym, or we, refuse.
    """
    gym = package()
    known = gym.factory.DATASETS
    if task in REFUSED:
        raise ValueError(f"{task}: {REFUSED[task]}")
    if task not in known:
        raise ValueError(f"{task}: reasoning-gym has no such task; `python -m recipe.tasks.reasoning_gym` lists them")
    settings: dict[str, Any] = {}
    if not 0 <= level <= levels_of(task):
        raise ValueError(f"{task}: has {levels_of(task) or 'no'} levels in reasoning-gym's curriculum, and no {level}.")
    if level:
        curriculum = gym.factory.create_curriculum(task)
        curriculum.set_global_level(level - 1)
        made = vars(curriculum.generate_configuration())
        settings = {name: made[name] for name in made if made[name] != getattr(known[task][1](), name)}
    if not isinstance(difficulty, Mapping):
        raise ValueError(f'{task}: {difficulty!r} is no difficulty; give settings, as {{"max_terms": 3}}')
    settings |= difficulty
    fields = _fields_of(task)
    if strangers := [name for name in settings if name not in fields]:
        raise ValueError(f"{task}: has no setting {strangers[0]}, but {', '.join(fields)}")
    try:
        _problems(task, json.dumps(settings), 1, 1)[0]
    except Exception as error:  # reasoning-gym asserts, and raises what its dataclasses raise
        raise ValueError(f"{task}: {str(error).splitlines()[0]}") from None
    return settings


def _fields_of(task: str) -> list[str]:
    """The settings of a task's difficulty."""
    return [field for field in vars(package().factory.DATASETS[task][1]()) if field not in ("seed", "size")]


def levels_of(task: str) -> int:
    """Levels of reasoning-gym's own curriculum of a task; 0: it has none."""
    gym = package()
    if not gym.factory.has_curriculum(task):
        return 0
    return max(len(attribute.levels) for attribute in gym.factory.create_curriculum(task).attributes.values())


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Score one response: 1 if the verifier gives its answer full marks, else 0. `acc` is the same.

    Raises ValueError for a row of another version of reasoning-gym, and what a verifier raises that is not seen to
    accept the problem's own answer.
    """
    made = json.loads(ground_truth)
    if made["version"] != installed():
        raise ValueError(f"the row is of reasoning-gym {made['version']}, not {installed()}; make the rows anew")
    answer = answer_of(solution_str, made["answer"])
    index = int(str((extra_info or {})["index"]).rpartition("/")[2])
    right = float(answer is not None and _is_right(answer, index, *_generated_from(made)))
    return {"score": right, "acc": right}


def answer_of(response: str, how: str) -> str | None:
    r"""The answer in a response: between its last <answer> and </answer>, or in its last \boxed{}; or a last number."""
    if how == LAST_NUMBER:
        return last_number(response)
    tagged = last_tagged(response, MAX_ANSWER_CHARS)
    found = last_boxed(response, MAX_ANSWER_CHARS) if tagged is None else tagged
    return found.strip() or None if found else None


def _is_right(answer: str, index: int, *of: Any) -> bool:
    problem = _problem(index, *of)
    if of[0] in _BY_COUNTDOWN:
        return solves(answer, problem["metadata"].get("target", 24), problem["metadata"]["numbers"])
    verify = _problems(*of).score_answer
    try:
        return bool(verify(answer, entry=problem) >= 1)
    except Exception:
        # A verifier that accepts the problem's own answer has failed because of the response's answer.
        if problem["answer"] is None or verify(problem["answer"], entry=problem) < 1:
            raise
        return False


def _generated_from(made: dict[str, Any]) -> tuple[str, str, int, int]:
    return made["task"], json.dumps(made["settings"]), made["seed"], made["size"]


@functools.lru_cache(maxsize=4096)  # a prompt has several responses
def _problem(index: int, *of: Any) -> dict[str, Any]:
    problem: dict[str, Any] = _problems(*of)[index]
    return problem


@functools.lru_cache(maxsize=64)
def _problems(task: str, settings: str, seed: int, size: int) -> Any:
    return package().create_dataset(task, seed=seed, size=size, **json.loads(settings))


def installed() -> str:
    """The version of reasoning-gym: another one generates other problems from the same row."""
    return version("reasoning-gym")


def package() -> Any:
    """The package reasoning_gym. Raises ValueError where it is not installed."""
    try:
        import reasoning_gym
    except ModuleNotFoundError:
        raise ValueError("reasoning-gym is not installed: pip install -e 'verl[tasks]'") from None
    return reasoning_gym


def main(argv: list[str] | None = None) -> int:
    """Print each task, with its levels, its settings, and an example."""
    parser = OneLineParser(prog="python -m recipe.tasks.reasoning_gym", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these tasks alone, with whole examples")
    args = parser.parse_args(argv)
    try:
        known = package().factory.DATASETS
        for name in args.names or sorted(known):
            if name in REFUSED and not args.names:
                print(f"{name}: refused, {REFUSED[name]}")
                continue
            settings_of(name, {}, 0)
            problem = _problems(name, "{}", 1, 1)[0]
            print(f"{name}: {levels_of(name) or 'no'} levels; settings {', '.join(_fields_of(name))}")
            print(f"    {problem['question'] if args.names else ' '.join(problem['question'].split())[:160]!r}")
            print(f"    answer: {str(problem['answer'])[:80]!r}", flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
