"""`trainer.val_only=true`: verl's own loop evaluates once, and nothing is trained or written besides."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode

from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings.errors import SettingError
from recipe.fully_async_policy.settings.run_folder import check_nothing_replaced
from tests.loop.test_replay_buffer import failed_prompts
from verl_vcpo.common.run_id import RUN_ID_VARIABLE
from verl_vcpo.loop.trainer import LagKTrainer
from verl_vcpo.report.run_log import ANSWERS, VAL_SKIPPED, RunLog, read_metrics, summary_in_words, write_summary


def config_of(run_dir: Path, val_only: bool = True) -> Any:
    main.prepare_environment(["hardware=cpu"])
    settings = [f"run_dir={run_dir}", f"trainer.val_only={val_only}", "trainer.logger=[console]"]
    return main.compose(["hardware=cpu", "+task=countdown", *settings])


@pytest.mark.parametrize("step", [0, 40])
def test_it_evaluates_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """`step`: of the checkpoint that was loaded. A trainer without samplers and workers fails where it uses one.

    Of five prompts with an answer each one is right, and one, `e`, is skipped.
    """

    def validate(self: LagKTrainer) -> dict[str, float]:
        asked = dict.fromkeys((("countdown", uid) for uid in "abcde"), 1)
        answers = ["countdown"] * 4, [*"abcd"], {"acc": [0, 1, 0, 0]}, [1] * 4
        return self._val_metrics_update(*answers, expected_acc_counts=asked)

    monkeypatch.setenv(RUN_ID_VARIABLE, "evaluation")
    monkeypatch.setattr(PPOTrainer, "_validate", validate)
    trainer = object.__new__(LagKTrainer)
    trainer.config, trainer.global_steps, trainer.total_training_steps = config_of(tmp_path), step, 40
    trainer.run_log, trainer.replay_buffer = RunLog(tmp_path), SimpleNamespace(failed_prompts=failed_prompts("skip"))
    trainer.replay_buffer.failed_prompts._held_out = {"e"}
    trainer.current_mode = HybridEngineMode.ROLLOUT
    trainer._dump_futures, trainer._dump_executor = [], ThreadPoolExecutor(1)
    trainer.fit(SimpleNamespace())

    (line,) = read_metrics(tmp_path)
    assert (line["step"], line["val_accuracy"], line["reward"]) == (step, 0.25, None)
    assert (line[ANSWERS], line[VAL_SKIPPED]) == (4, 1)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"], "no model, no checkpoint"
    summary = write_summary(tmp_path, "vcpo", lag=8, wall_clock_s=61)
    assert (summary["final_accuracy"], summary["steps"]) == (0.25, 0)
    assert summary_in_words(summary) == "no training, 1 min 01 s\nheld-out accuracy: 25.0%"


def test_the_metrics_of_a_run_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 7}\n')
    with pytest.raises(SettingError, match=f"run_dir={tmp_path}: has the metrics of a run of 7 steps"):
        check_nothing_replaced(config_of(tmp_path))
    check_nothing_replaced(config_of(tmp_path, val_only=False))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    check_nothing_replaced(config_of(tmp_path))
