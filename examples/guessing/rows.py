"""The rows of the guessing game, and lessons for a first policy: `python -m examples.guessing.rows`.

The lessons' player guesses at random among the numbers that are left, and finds 60 % of them in four guesses. One
that halves what is left finds all.
"""

import random
from pathlib import Path
from typing import Any

import pandas as pd

from examples.guessing.server import GUESSES, HIGHEST, Game

OUT = Path("data/guessing")


def row(number: int) -> dict[str, Any]:
    """The prompt of a game. Its number is the seed that the server draws from."""
    words = f"Game {number}: find a number from 1 to {HIGHEST} in {GUESSES} guesses."
    return {
        "data_source": "guessing",
        "prompt": [{"role": "user", "content": words}],
        "reward_model": {"ground_truth": ""},  # the server knows
        "extra_info": {"index": number},
    }


def lessons(number: int) -> list[dict[str, Any]]:
    """Each turn of a random player's game: what was said so far, and the guess."""
    game, rng, chat, low, high = Game(), random.Random(f"lesson/{number}"), row(number)["prompt"], 1, HIGHEST
    turns = []
    game.reset("lesson", number)
    while True:
        guess = rng.randint(low, high)
        turns.append({"prompt": chat, "answer": str(guess)})
        reply = game.step("lesson", str(guess))
        if reply["done"]:
            return turns
        low, high = (guess + 1, high) if reply["text"] == "higher" else (low, guess - 1)
        chat = [*chat, {"role": "assistant", "content": str(guess)}, {"role": "user", "content": reply["text"]}]


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    pd.DataFrame([row(number) for number in range(4000)]).to_parquet(OUT / "train.parquet")
    pd.DataFrame([row(number) for number in range(4000, 4256)]).to_parquet(OUT / "val.parquet")
    pd.DataFrame([turn for number in range(5000, 8000) for turn in lessons(number)]).to_parquet(OUT / "lessons.parquet")
