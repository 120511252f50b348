"""Small raw files in the schema of a task's hub, which scripts.prepare_data reads as it reads the real ones."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from verl_vcpo.common.whole_file import whole_file, write_whole

TRAIN, VAL = 64, 16
# as in the files of BytedTsinghua-SIA/DAPO-Math-17k
DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'

Sum = tuple[int, int]


def sums() -> tuple[list[Sum], list[Sum]]:
    """(training, validation) pairs of numbers, all distinct; the same at every call."""
    rng = random.Random("sample data/0")
    pairs = rng.sample([(a, b) for a in range(1, 21) for b in range(1, 21)], TRAIN + VAL)
    return pairs[:TRAIN], pairs[TRAIN:]


def gsm8k(out: Path, train: list[Sum], val: list[Sum]) -> None:
    """JSON lines, as in the repository of openai/gsm8k."""
    for name, pairs in (("train", train), ("test", val)):
        rows = [
            {
                "question": f"Ann has {a} pens and buys {b} more. How many pens has she?",
                "answer": f"She has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} pens.\n#### {a + b}",
            }
            for a, b in pairs
        ]
        write_lines(out / f"{name}.jsonl", rows)


def math(out: Path, train: list[Sum], val: list[Sum]) -> None:
    """Parquet as in EleutherAI/hendrycks_math, JSON lines as in HuggingFaceH4/MATH-500."""

    def row(a: int, b: int) -> dict[str, str]:
        return {"problem": f"Compute ${a} + {b}$.", "solution": f"We get $\\boxed{{{a + b}}}$.", "level": "Level 1"}

    write_parquet(
        out / "hendrycks/algebra/train-00000-of-00001.parquet", [{**row(a, b), "type": "Algebra"} for a, b in train]
    )
    write_lines(
        out / "math-500/test.jsonl",
        [
            {**row(a, b), "answer": str(a + b), "subject": "Algebra", "level": 1, "unique_id": f"test/algebra/{i}.json"}
            for i, (a, b) in enumerate(val)
        ],
    )


def tool_use(out: Path, train: list[Sum], val: list[Sum]) -> None:
    """Parquet as in BytedTsinghua-SIA/DAPO-Math-17k, each row twice; JSON lines as in math-ai/aime25."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"{DAPO_HEAD}What is {a} + {b}?{DAPO_TAIL}", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(a + b), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": str(i)},
        }
        for i, (a, b) in enumerate(train)
    ]
    write_parquet(out / "dapo/data/dapo-math-17k.parquet", rows * 2)
    problems = [{"problem": f"What is {a} + {b}?", "answer": str(a + b), "id": str(i)} for i, (a, b) in enumerate(val)]
    write_lines(out / "aime25/test.jsonl", problems)


TASKS: dict[str, Callable[[Path, list[Sum], list[Sum]], None]] = {"gsm8k": gsm8k, "math": math, "tool_use": tool_use}


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as partial:
        pd.DataFrame(rows).to_parquet(partial, index=False)


def write(task: str, out: Path) -> None:
    """Write the raw files of a task, with sums of small numbers as problems."""
    TASKS[task](out, *sums())
