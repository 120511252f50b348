"""Held-out metrics of rewards that have other keys for other answers; the means are over the answers that have them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_vcpo.loop.held_out import HeldOutTrainer, apart
from verl_vcpo.loop.trainer import LagKTrainer
from verl_vcpo.user_code.reward_function import RESERVED, checked, of_manager


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl draws 1000 times for what is none of the means."""
    bootstrap = metric_utils.bootstrap_metric
    monkeypatch.setattr(metric_utils, "bootstrap_metric", lambda **given: bootstrap(**given | {"n_bootstrap": 2}))


def metrics_of(results: list[Any], samples: int, sources: tuple[str, ...] = ("toy",)) -> dict[str, float]:
    """A validation's metrics, of the form that verl gives the rewards' results, `samples` of each prompt."""
    rows, prompts = [checked(result) for result in results], [str(i // samples) for i in range(len(results))]
    of_rows = [sources[i * len(sources) // len(rows)] for i in range(len(rows))]
    columns = {name: [row.get(name) for row in rows] for name in {name for row in rows for name in row}}
    columns["reward"] = [row["score"] for row in rows]
    expected = dict.fromkeys(zip(of_rows, prompts, strict=True), samples)
    assert issubclass(LagKTrainer, HeldOutTrainer)
    trainer = object.__new__(HeldOutTrainer)
    return trainer._val_metrics_update(of_rows, prompts, columns, [2] * len(rows), expected_acc_counts=expected)


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize(
    ("results", "accuracy", "others"),
    [
        ([0.0, {"score": 1.0, "pred": "7"}] * 4, 0.5, {}),
        ([0.0, 0.0, 1.0, {"score": 1.0}] * 2, 0.5, {"score": 0.5}),
        ([{"score": -1}, *[{"score": 1, "acc": 1}] * 3] * 2, 0.5, {"score": 0.5}),
        ([0.0, *[{"score": 1, "length": 6}] * 2, {"score": 1, "length": 3}] * 2, 0.75, {"length": 5.0}),
        ([*[{"score": 1, "by": 3.0}] * 2, {"score": 0, "by": "none"}, 0.0] * 2, 0.5, {"by": 3.0}),
        ([{"score": 1, "x": float("nan")}, 0.0, {"score": 1, "x": None}, {"score": 0, "x": 2}] * 2, 0.5, {"x": 2.0}),
        ([{"score": 1, "pred": 7}, {"score": 0, "pred": "none"}] * 4, 0.5, {"pred": None}),
        ([{"score": 1, "why": "a"}, {"score": 0, "why": None}] * 4, 0.5, {"why": None}),
    ],
)
def test_means(results: list[Any], accuracy: float, others: dict[str, float | None], samples: int) -> None:
    metrics = metrics_of(results, samples)
    assert metrics[f"val-core/toy/acc/mean@{samples}"] == pytest.approx(accuracy)
    assert metrics[f"val-aux/toy/reward/mean@{samples}"] == pytest.approx(metrics[f"val-aux/toy/score/mean@{samples}"])
    for name, mean in others.items():
        found = {metric: value for metric, value in metrics.items() if f"/toy/{name}/mean@" in metric}
        assert found == ({} if mean is None else {f"val-aux/toy/{name}/mean@{samples}": pytest.approx(mean)})


def test_numbers_of_numpy_have_a_mean() -> None:
    assert apart(["toy"] * 2, ["0", "1"], {"x": [np.float32(2), None]})[1] == {"val-aux/toy/x/mean@1": 2.0}


@pytest.mark.parametrize(("score", "acc"), [({"score": 1, "acc": 0}, 0.0), (1.0, 1.0)])
def test_what_a_manager_gives_beside_its_score_is_kept(score: Any, acc: float) -> None:
    assert of_manager(score, None) == (1.0, {"score": 1.0, "acc": acc})


def test_each_data_source_has_its_own_keys() -> None:
    results = [{"score": 1, "a": 4}, {"score": 0, "a": 2}, {"score": 1, "b": 8}, 0.0]
    metrics = metrics_of(results, 1, ("one", "two"))
    assert {name: value for name, value in metrics.items() if "/a/" in name or "/b/" in name} == {
        "val-aux/one/a/mean@1": 3.0,
        "val-aux/two/b/mean@1": 8.0,
    }
    assert metrics["val-core/one/acc/mean@1"] == metrics["val-core/two/acc/mean@1"] == 0.5


@pytest.mark.parametrize(("last", "vote"), [({"score": 0, "pred": "no"}, True), (0.0, False)])
def test_answers_vote_where_all_have_one(last: Any, vote: bool) -> None:
    metrics = metrics_of([*[{"score": 1, "pred": 7}] * 3, last], 2)
    assert any("/acc/maj@" in name for name in metrics) is vote, "of two prompts, not of the first alone"


def test_names_of_verls_own_are_reserved(tmp_path: Path) -> None:
    PPOTrainer._write_generations(["in"], ["out"], ["truth"], [1.0], {"uid": ["u"]}, str(tmp_path), 3)
    written = set(json.loads((tmp_path / "3.jsonl").read_text()))
    reported = {name.split("/")[2] for name in metrics_of([1.0, 0.0], 1) if "/toy/" in name}
    assert written | reported == RESERVED | {"score", "acc"}
