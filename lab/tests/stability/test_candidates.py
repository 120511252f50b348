"""Other levels of the baseline: the runs that are read, the tables, and the published numbers on the page."""

from pathlib import Path

import pandas as pd
import pytest

from lab.stability import candidates

ROOT = Path(__file__).parents[3]


def curve(method: str, accuracy: float, lag: int = 8, lr: float = 1e-4, seed: int = 9) -> pd.DataFrame:
    """Return the steps of a run that has this accuracy from the first evaluation on."""
    steps = [step for step in range(0, 301) if step % 10 == 0]
    of = {"method": method, "lag": lag, "lr": lr, "seed": seed, "finite": 1.0}
    return pd.DataFrame([{"step": step, "val_accuracy": accuracy, **of} for step in steps])


def test_the_runs_of_the_screen_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        *(curve("vcpo_half_mean", 0.50 + 0.01 * (seed % 3), seed=seed) for seed in candidates.SEEDS),
        *(curve("vcpo_half_mean", 0.30, lr=3e-4, seed=seed) for seed in candidates.SEEDS),
        *(curve("topr", 0.40, lr=lr, seed=seed) for seed in candidates.SEEDS for lr in candidates.RATES),
        curve("vcpo_half_mean", 0.99, seed=1),
        curve("vcpo_half_mean", 0.99, lag=32),
        curve("gspo", 0.99),
    ]
    folders = [tmp_path / name for name in "abc"]
    (folders[1] / "runs").mkdir(parents=True)
    for number, of in enumerate(runs):
        of.to_parquet(folders[1] / f"runs/{number}.parquet")
    assert candidates.main(["--runs", *map(str, folders), "--out", str(tmp_path / "out")]) == 0
    written = pd.read_csv(tmp_path / "out/candidates.csv")
    assert len(written) == 16 and set(written["method"]) == {"vcpo_half_mean", "topr"}
    accuracies, differences = candidates.tables(written)
    assert accuracies.rows == [["countdown4", "8", "50.8", "40.0", "50.8"]]
    ((task, _, name, other, points, *_, p, seen),) = differences.rows
    assert (task, name, other, points) == ("countdown4", "`vcpo_half_mean`", "`topr`", "+10.8")
    assert float(p) < 0.01 and 0 < float(seen) < 5
    assert candidates.main(["--runs", *["nowhere"] * 3]) == 2
    assert "no such run" in capsys.readouterr().err


def test_the_page_has_the_published_runs() -> None:
    page = (ROOT / "lab/stability/candidates.md").read_text()
    for row in candidates.tables(pd.read_csv(ROOT / candidates.PUBLISHED))[0].rows:
        assert f"| {' | '.join(row)} |" in page
