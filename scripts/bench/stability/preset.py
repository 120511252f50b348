"""The methods there are, and what all runs begin with: the data and the first policy."""

from pathlib import Path

from recipe.fully_async_policy import method

# vcpo_off is tis_seq by another implementation.
METHODS = tuple(name for name in method.names() if name != "vcpo_off")
MODEL, DATA = Path("models/countdown-lag"), Path("data/countdown")
# A policy that solves half of the problems, by reading them: from one that guesses, RL goes for the sum of all numbers,
# which is right for 46 %, and stays there.
WARM_START = ("--layers", "2", "--heads", "2", "--steps", "900", "--correct-fraction", "0.4", "--samples", "4")


def prepare() -> None:
    """The data and the warm-started model that all runs begin with; nothing where they are there."""
    from recipe.warm_start.train import main as warm_start
    from scripts.prepare_data import main as prepare_data

    if not (DATA / "meta.json").is_file() and prepare_data(["countdown", "--out", str(DATA)]):
        raise SystemExit(2)
    if warm_start(["--data", str(DATA), "--out", str(MODEL), *WARM_START]):  # or reuse
        raise SystemExit(2)
