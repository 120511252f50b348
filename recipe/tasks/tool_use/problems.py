r"""Tool use: DAPO for training, AIME 2025 for evaluation; the model may run Python, and answers in \boxed{}.

Raw files, into one folder: `hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir raw/dapo` and
`hf download math-ai/aime25 --repo-type dataset --local-dir raw/aime25`; then --source raw.
"""

import argparse
from pathlib import Path

from recipe.tasks.math_reward import compute_score
from recipe.tasks.rows import Prepared, Row, add_source, find_files, make_row, read_rows, text_of

__all__ = ["add_arguments", "build", "compute_score", "prompt"]

HELP = "mathematics with a Python interpreter (DAPO-Math-17k), evaluated on AIME 2025"
TRAIN_SOURCE, VAL_SOURCE = "dapo", "aime25"
_ADVICE = (
    "get them with `hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir DIR/dapo` and "
    "`hf download math-ai/aime25 --repo-type dataset --local-dir DIR/aime25`"
)
# DAPO's own instructions, around the problem: they ask for another format.
_DAPO_HEAD, _DAPO_TAIL = "Solve the following math problem step by step.", "Remember to put your answer on its own line"
_PARAGRAPH = "\n\n"

add_arguments = add_source


def prompt(problem: str) -> str:
    """The user's message (the format of SimpleTIR, arXiv 2509.02479)."""
    return (
        "Solve the following problem step by step. Where it helps, write Python code in a block that starts with "
        "```python and ends with ```. The block is run as soon as it is closed, and what it prints is shown to you; so "
        "print what you need. Every block runs in a fresh interpreter: repeat imports and definitions. When you know "
        f"the answer, give it within \\boxed{{}}.\n\n{problem}"
    )


def build(args: argparse.Namespace) -> Prepared:
    """Distinct DAPO problems, without those of AIME 2025. Raises ValueError naming what is missing or wrong."""
    val: list[Row] = []
    for file in find_files(args.source, "AIME 2025", "aime", _ADVICE, any_folder=True):
        for raw in read_rows(file):
            message = prompt(text_of(raw, file, "problem", "question"))
            val.append(make_row(VAL_SOURCE, message, text_of(raw, file, "answer"), "val", len(val)))
    held_out = {row["prompt"][0]["content"] for row in val}
    truths: dict[str, str] = {}
    removed = {"repeated": 0, "repeated with another answer": 0, "in AIME 2025": 0}
    for file in find_files(args.source, "DAPO", "dapo", _ADVICE, any_folder=True):
        for raw in read_rows(file):
            message, truth = prompt(_problem(raw, file)), _ground_truth(raw, file)
            if message in held_out:
                removed["in AIME 2025"] += 1
            elif message in truths:
                removed["repeated" if truths[message] == truth else "repeated with another answer"] += 1
            else:
                truths[message] = truth
    train = [
        make_row(TRAIN_SOURCE, message, truth, "train", index) for index, (message, truth) in enumerate(truths.items())
    ]
    return Prepared(train, val, removed=removed)


def _problem(raw: Row, file: Path) -> str:
    """The problem in DAPO's prompt, without the instructions around it."""
    chat = raw.get("prompt")
    if not isinstance(chat, list) or len(chat) != 1 or not isinstance(chat[0], dict):
        raise ValueError(f"{file}: column 'prompt' must hold one chat message: {chat!r:.80}")
    text = text_of(chat[0], file, "content")
    if text.startswith(_DAPO_HEAD):
        text = text.partition(_PARAGRAPH)[2]
    if text.rpartition(_PARAGRAPH)[2].startswith(_DAPO_TAIL):
        text = text.rpartition(_PARAGRAPH)[0]
    if not text.strip():
        raise ValueError(f"{file}: a prompt without a problem: {chat!r:.80}")
    return text.strip()


def _ground_truth(raw: Row, file: Path) -> str:
    reward_model = raw.get("reward_model")
    if not isinstance(reward_model, dict):
        raise ValueError(f"{file}: column 'reward_model' must hold a ground_truth: {reward_model!r:.80}")
    return text_of(reward_model, file, "ground_truth")
