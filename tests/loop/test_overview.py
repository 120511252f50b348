"""What W&B and TensorBoard show first, by the trainer's own calls: logged with real W&B, offline, and read back."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode

from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings.logger import check_logger
from tests.kit.wandb_file import offline_run
from tests.loop.test_run_log import step_metrics
from verl_vcpo.common.run_id import RUN_ID_VARIABLE
from verl_vcpo.loop import main as loop_main
from verl_vcpo.loop.trainer import LagKTrainer
from verl_vcpo.report.overview import ACCURACY, ALERT, CURVES, SECTION, TABLE, finish
from verl_vcpo.report.run_log import HEADLINES, RunLog

pytestmark = pytest.mark.slow
STEPS = 14
SAMPLES = [
    {"step": 3, "prompt": "1 + 1", "response": "2", "reward": 1.0, "lag": 1, "weight": None},
    {"step": 3, "prompt": "2 + 2", "response": "5", "reward": 0.0, "lag": 0, "weight": 0.5},
]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv(RUN_ID_VARIABLE, "overview")
    monkeypatch.setattr(PPOTrainer, "_validate", lambda self: {"val-core/countdown/acc/mean@1": 0.25})
    return monkeypatch


def trained(run_dir: Path, loggers: str, environment: pytest.MonkeyPatch) -> None:
    """An evaluation, for which verl's `fit` makes the loggers, and steps with a low ESS ratio from the third one on."""
    main.prepare_environment(["hardware=cpu"])
    settings = [f"run_dir={run_dir}", "trainer.val_only=true", f"trainer.logger={loggers}"]
    trainer = object.__new__(LagKTrainer)
    trainer.val_dataset = range(4)  # its length is asked for
    trainer.config, trainer.global_steps = main.compose(["hardware=cpu", "+task=countdown", *settings]), 0
    trainer.run_log, trainer.current_mode, trainer.total_training_steps = RunLog(run_dir), HybridEngineMode.ROLLOUT, 9
    trainer._dump_futures, trainer._dump_executor = [], ThreadPoolExecutor(1)

    check_logger(trainer.config)
    environment.setenv("WANDB_DIR", str(run_dir))  # as the launcher: after the checks
    environment.setenv("TENSORBOARD_DIR", str(run_dir / "tensorboard"))
    environment.setenv("VERL_FILE_LOGGER_PATH", str(run_dir / "verl_metrics.jsonl"))
    trainer.fit(SimpleNamespace())
    for step in range(1, STEPS + 1):
        metrics: dict[str, Any] = step_metrics(2, 0.9 if step < 3 else 0.02) | {"response_length/mean": 7.5}
        if step == 1:
            del metrics[HEADLINES["lr_multiplier"]]  # a method that does not scale the step size has none
        if step == 3:
            trainer.overview.samples(step, SAMPLES)
        trainer._record(step, metrics, metrics | {"trained_rows": [1]})
        trainer.logger.log(metrics, step)  # as verl's `fit`
    finish(trainer.logger, 0)  # as the launcher: W&B's process may write until it has ended


def test_both_show_the_curves_first_and_wandb_the_responses_and_the_alarm(
    tmp_path: Path, offline: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, "[tensorboard,wandb]", offline)
    (warning,) = re.findall("warning: (collapse ahead.*)", capfd.readouterr().out)

    run = offline_run(tmp_path)
    logged = {name for values in run.history.values() for name in values if not name.startswith("_")}
    assert sorted(logged)[: len(CURVES) + 1] == [ACCURACY, *CURVES], "before all that verl logs"
    assert [step for step, values in run.history.items() if ACCURACY in values] == [0]
    assert run.history[0][ACCURACY] == 0.25
    assert len(CURVES) == 7 and list(run.history) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        of_step = run.history[step]
        assert {name: of_step.get(name) for name in CURVES} == {name: of_step.get(CURVES[name]) for name in CURVES}
    assert run.table(3, TABLE) == SAMPLES
    assert run.alerts == [(ALERT, f"step 12: {warning}")], "once, where ten steps were low"

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"])[: len(CURVES) + 1] == [ACCURACY, *CURVES]
    assert [(event.step, event.value) for event in events.Scalars(ACCURACY)] == [(0, 0.25)]
    for name, source in CURVES.items():
        shown, flat = ([(event.step, event.value) for event in events.Scalars(each)] for each in (name, source))
        assert shown == flat and len(shown) == STEPS - (name.endswith("lr_multiplier"))


def test_other_loggers_get_what_verl_logs(tmp_path: Path, offline: pytest.MonkeyPatch) -> None:
    trained(tmp_path, "[file]", offline)
    lines = (tmp_path / "verl_metrics.jsonl").read_text()
    assert len(lines.splitlines()) == STEPS + 1 and SECTION not in lines
    assert not (tmp_path / "wandb").exists()


@pytest.mark.parametrize("of_the_run", [RuntimeError("a worker died"), None])
def test_what_loggers_raise_at_the_end_hides_no_error_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], of_the_run: Exception | None
) -> None:
    """As TensorBoard's writer, whose folder was removed."""

    class Trainer:
        def __init__(self, config: Any) -> None:
            self.init = lambda: None

        def fit(self, loops: Any) -> None:
            if of_the_run:
                raise of_the_run

    def finish(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("tfevents")

    for name, value in (
        ("tq", SimpleNamespace(init=lambda _: None)),
        ("bound_custom_reward", lambda _: None),
        ("without_workers", lambda _: None),
        ("get_trainer_cls", lambda _: Trainer),
        ("ActorWatch", lambda: SimpleNamespace(start=lambda: None, stop=lambda: None, reason=None)),
        ("finish", finish),
        ("end_queue", lambda: None),
    ):
        monkeypatch.setattr(loop_main, name, value)
    runner = loop_main.LagKTaskRunner()
    runner.agent_loop_manager, runner.init_agent_loop_manager = object(), lambda: None
    config = OmegaConf.create({"transfer_queue": {}, "trainer": {"v1": {"trainer_mode": "lag_k"}}})
    with pytest.raises(RuntimeError if of_the_run else FileNotFoundError):
        runner.run(config)
    assert ("FileNotFoundError: tfevents" in capsys.readouterr().err) == bool(of_the_run)


def test_wandbs_process_is_ended_whatever_another_logger_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def fails(exit_code: int) -> None:
        raise FileNotFoundError("tfevents")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(teardown=lambda: ended.append(1)))
    with pytest.raises(FileNotFoundError):
        finish(SimpleNamespace(finish=fails), exit_code=1)  # type: ignore[arg-type]
    assert ended
