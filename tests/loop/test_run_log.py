"""metrics.jsonl and summary.json."""

import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl_vcpo.report.advice import Advisor
from verl_vcpo.report.run_log import (
    HEADLINES,
    SKIPPED,
    RunLog,
    how_answered,
    last_step,
    read_metrics,
    summary_in_words,
    write_summary,
)
from verl_vcpo.report.step_table import row


def step_metrics(lag_max: int, ess: float) -> dict[str, float]:
    metrics: dict[str, float] = dict.fromkeys(HEADLINES.values(), 1.0)
    metrics[HEADLINES["lag_max"]] = np.int64(lag_max)
    metrics[HEADLINES["ess_ratio"]] = np.float32(ess)
    metrics[HEADLINES["kl"]] = 0.01
    metrics["vcpo/async/deadline_wait_s"] = 0.0
    return metrics


def test_every_line_has_every_headline(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write(0, {"val-core/countdown/acc/mean@1": np.float64(0.25)})
    log.write(1, step_metrics(2, 0.5))
    first, second = read_metrics(tmp_path)
    assert set(HEADLINES) <= set(first) and set(HEADLINES) <= set(second)
    assert first["val_accuracy"] == 0.25 and first["reward"] is None
    assert second["lag_max"] == 2 and second["val_accuracy"] is None


def test_summary(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write(0, {"val-core/countdown/acc/mean@1": 0.1})
    log.write(1, step_metrics(2, 0.5))
    log.write(2, step_metrics(1, 0.7) | {"val-core/countdown/acc/mean@1": 0.3})
    summary = write_summary(tmp_path, "vcpo", lag=2, wall_clock_s=12.34)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["base_accuracy"] == 0.1 and summary["final_accuracy"] == 0.3
    assert (
        summary["method"] == "vcpo"
        and summary["steps"] == 2
        and summary["lag"] == 2
        and summary["max_realized_lag"] == 2
    )
    assert summary["mean_ess_ratio"] == pytest.approx(0.6) and summary["wall_clock_s"] == 12.3


def test_the_summary_in_words(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    log = RunLog(tmp_path)
    log.write(0, {"val-core/countdown/acc/mean@1": 0.1})
    assert last_step(tmp_path) == 0, "no step yet"
    assert summary_in_words(summary_of(tmp_path)).splitlines() == [
        "no training, 12 s",
        "held-out accuracy: 10.0%",
    ]
    log.write(1, step_metrics(2, 0.5) | {"val-core/countdown/acc/mean@1": 0.3, SKIPPED: 3})
    assert last_step(tmp_path) == 1
    assert summary_in_words(summary_of(tmp_path)).splitlines() == [
        "1 step in 12 s",
        "held-out accuracy: 10.0% before training, 30.0% after",
        "largest lag 2 of at most 4; mean ESS ratio 0.50; 1 tokens/s",
        "3 prompts skipped: skipped_prompts.jsonl in the run's folder",
    ]


def test_every_held_out_set_has_an_accuracy_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path)
    names = "val-core/countdown/acc/mean@4", "val-core/openai/gsm8k/reward/mean@4"
    others = {"val-core/countdown/acc/best@4/mean": 0.9, "val-core/countdown/acc/maj@4/mean": 0.8}
    log.write(0, dict(zip(names, (0.1, 0.5), strict=True)) | others)
    log.write(1, step_metrics(2, 0.5) | dict(zip(names, (0.2, float("nan")), strict=True)))
    before, after = read_metrics(tmp_path)
    assert before["val_accuracies"] == {"countdown": 0.1, "openai/gsm8k": 0.5}
    assert before["val_accuracy"] == pytest.approx(0.3)
    assert after["val_accuracies"] == {"countdown": 0.2, "openai/gsm8k": None} and after["val_accuracy"] is None
    shown = capfd.readouterr().out
    assert "step 0: held out, the mean of countdown 10.0%, openai/gsm8k 50.0%" in shown
    assert "step 1: held out, the mean of countdown 20.0%, openai/gsm8k -" in shown
    log.write(2, step_metrics(2, 0.5) | dict(zip(names, (0.3, 0.7), strict=True)))
    assert summary_in_words(summary_of(tmp_path)).splitlines()[1:4] == [
        "held-out accuracy: 30.0% before training, 50.0% after, the mean over 2 data sources:",
        "  countdown: 10.0% before training, 30.0% after",
        "  openai/gsm8k: 50.0% before training, 70.0% after",
    ]


def summary_of(run_dir: Path) -> dict:
    return write_summary(run_dir, "vcpo", lag=4, wall_clock_s=12.34)


def test_a_row_has_a_dash_for_what_was_not_measured_and_fits_80_columns(tmp_path: Path) -> None:
    metrics = step_metrics(128, 0.5) | {
        HEADLINES["kl"]: None,
        HEADLINES["lag_mean"]: 126.9,
        HEADLINES["grad_norm"]: 1e-7,
    }
    RunLog(tmp_path).write(10000, metrics | {HEADLINES["lag_mean"]: 126.9, HEADLINES["tokens_per_s"]: 123456.0})
    shown = row(read_metrics(tmp_path)[0])
    assert shown.split()[:6] == ["10000", "1.000", "0.500", "1.00", "1e-07", "-"]
    assert shown.split()[6:] == ["1/127/128", "123456", "100/100", "-"]
    assert len(shown) < 80


def test_advice_is_on_the_console_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, advisor=Advisor(lag=2, shares_cores=False))
    for step in range(1, 40):
        log.write(step, step_metrics(0, 0.9))
    assert capfd.readouterr().out.count("advice: ") == 1


def test_an_unknown_kind_of_metric_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object"):
        RunLog(tmp_path).write(0, {"x": object()})


def test_a_skipped_update_is_said_and_what_is_not_a_number_is_null(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    skipped = {"actor/vcpo/skipped_updates": 1.0, HEADLINES["baseline"]: float("nan"), "other": np.float32("inf")}
    skipped["actor/vcpo/dropped_sequences"] = 8.0
    RunLog(tmp_path).write(1, step_metrics(0, 0.0) | skipped)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert read_metrics(tmp_path)[0]["baseline"] is None
    assert "SKIPPED: no sequence to train on (excluded 0, dropped 8)" in capfd.readouterr().out


def test_a_resumed_log_goes_on_after_its_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.write(step, step_metrics(0, 1.0))
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, "half')
    before = read_metrics(tmp_path)[1]["wall_clock_s"]
    resumed = RunLog(tmp_path)
    resumed.resume(2)
    resumed.write(3, step_metrics(0, 1.0))
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["wall_clock_s"] >= before


def test_a_line_that_only_the_checkpoint_has_comes_back(tmp_path: Path) -> None:
    """The process ended after the checkpoint of step 2, in the weight update, before it wrote the step's line."""
    checkpoint = tmp_path / "global_step_2"
    checkpoint.mkdir()
    log = RunLog(tmp_path)
    log.write(1, step_metrics(0, 1.0))
    so_far = {name: value for name, value in step_metrics(3, 0.5).items() if name != HEADLINES["weight_sync_s"]}
    log.keep(2, so_far | {"trained_rows": [7, 9]}, checkpoint)
    for _ in range(2):  # a run that ends again before its next step finds the line in the file
        RunLog(tmp_path).resume(2, checkpoint)
        lines = read_metrics(tmp_path)
        assert [line["step"] for line in lines] == [1, 2]
        assert lines[1]["trained_rows"] == [7, 9] and lines[1]["lag_max"] == 3
        assert lines[1]["weight_sync_s"] is None, "not measured yet when the checkpoint was written"
    RunLog(tmp_path).resume(1, checkpoint.with_name("global_step_1"))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_a_collapse_is_announced_with_what_to_change(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, scales_step_size=False)
    for step in range(1, 14):
        log.write(step, step_metrics(0, 0.9 if step < 3 else 0.02))
    signs = [line["collapse_signs"] for line in read_metrics(tmp_path)]
    assert signs == [[]] * 11 + [["low_ess_ratio"]] + [[]], "after ten low steps, and once"
    text = capfd.readouterr().out
    assert text.count("collapse ahead") == 1
    assert "lower actor_rollout_ref.actor.optim.lr or async.lag, or set method=vcpo" in text


@pytest.mark.parametrize(("temperature", "said"), [(0, "greedy"), (1.0, "drawn at temperature 1")])
def test_the_console_says_how_held_out_prompts_are_answered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], temperature: float, said: str
) -> None:
    sampling = OmegaConf.create({"temperature": temperature})
    RunLog(tmp_path, answered=how_answered(sampling)).write(0, {"val-core/countdown/acc/mean@1": 0.25})
    assert f"accuracy on held-out prompts; answers: {said}\n" in capfd.readouterr().out
