"""What the trainer's processes take long for is said, each minute."""

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from verl_vcpo.loop import trainer as lag_k
from verl_vcpo.loop.processes import long_work
from verl_vcpo.loop.processes.long_work import WORK, tell_of_long_work
from verl_vcpo.loop.trainer import LagKTrainer

LIMIT_S = 20.0


class Trainer(LagKTrainer):
    """A trainer of which only the update is called."""

    def __init__(self) -> None:
        self.config = OmegaConf.create({"vcpo": {"enable": False}, "async": {"weight_update_timeout_s": 600}})
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _update_actor(self, batch: str, metrics: dict[str, float]) -> str:
        assert self.goes_on.wait(LIMIT_S)
        return batch


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's start makes none."""
    manager = SimpleNamespace(config=None, actor_wg=None, replicas=[])
    setup = lambda self: setattr(self, "standalone_checkpoint_manager", manager)  # noqa: E731
    monkeypatch.setattr(PPOTrainerSeparateAsync, "_setup", setup)
    monkeypatch.setattr(lag_k, "early_start", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(lag_k, "BoundedCheckpointEngineManager", lambda *_: None)


def test_an_update_that_hangs_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    trainer = Trainer()

    def said(line: str) -> None:
        lines.append(line)
        if len(lines) % 2 == 0:
            trainer.goes_on.set()

    monkeypatch.setattr(long_work, "print_line", said)
    trainer._setup()
    assert trainer._update_actor("quick", {}) == "quick" and not lines, "a minute has not passed"
    monkeypatch.setattr(long_work, "_TELL_S", 0.01)
    trainer.goes_on.clear()
    assert trainer._update_actor("hangs", metrics={}) == "hangs"
    assert lines == ["The update has taken 0 s."] * 2, "once a minute"


@pytest.mark.parametrize(
    ("method", "what"),
    [("_setup", "Starting the trainer and the samplers"), ("_load_checkpoint", "Reading the checkpoint")],
)
def test_a_start_that_hangs_is_told_of(monkeypatch: pytest.MonkeyPatch, method: str, what: str) -> None:
    lines: list[str] = []
    told_twice = threading.Event()

    def said(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            told_twice.set()

    def hangs(self: LagKTrainer) -> None:
        assert told_twice.wait(LIMIT_S)
        raise InterruptedError  # what follows is not for this test

    monkeypatch.setattr(long_work, "print_line", said)
    monkeypatch.setattr(long_work, "_TELL_S", 0.01)
    monkeypatch.setattr(PPOTrainerSeparateAsync, method, hangs)
    monkeypatch.setattr(LagKTrainer, "_end_unused_balancer", lambda self: None)
    monkeypatch.setattr(lag_k.checkpoint, "choose", lambda settings: None)
    trainer = Trainer()
    trainer.config.trainer = {}
    with pytest.raises(InterruptedError):
        getattr(trainer, method)()
    assert lines[:2] == [f"{what} has taken 0 s."] * 2


def test_what_is_raised_goes_on() -> None:
    trainer = Trainer()
    trainer._stage_weights = lambda: 1 / 0
    tell_of_long_work(trainer)
    with pytest.raises(ZeroDivisionError):
        trainer._stage_weights()


def test_a_wait_for_samples_is_no_writing_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines, doing, told = list[str](), list[str](), threading.Event()
    monkeypatch.setattr(long_work, "print_line", lambda line: (lines.append(line), told.set()))
    monkeypatch.setattr(long_work, "_TELL_S", 0.01)
    screen = SimpleNamespace(busy=lambda what: doing.append(what) or contextlib.nullcontext())
    monkeypatch.setattr(lag_k.console, "screen", lambda: screen)
    monkeypatch.setattr(PPOTrainerSeparateAsync, "_save_checkpoint", lambda self: told.wait(LIMIT_S) and 1 / 0)
    trainer = Trainer()
    trainer.config = OmegaConf.merge(trainer.config, {"async": {"exact_lag": True}, "run_dir": str(tmp_path)})
    trainer.config.trainer = {"default_local_dir": str(tmp_path / "checkpoints")}
    trainer.timing_raw, trainer.global_steps, trainer._trained = {}, 1, (None, {}, 0.0)

    def wait(*step: object) -> None:
        assert not told.wait(0.1), "that is told of by the buffer, in words of its own"

    trainer.replay_buffer = SimpleNamespace(wait_until_finished=wait)
    trainer._setup()
    with pytest.raises(RuntimeError, match="the checkpoint of step 1 was not written"):
        trainer._save_checkpoint()
    assert doing == ["Waiting for samples in flight", "Writing a checkpoint"]
    assert lines[0] == "Writing the checkpoint has taken 0 s."


def test_the_trainer_has_these_methods() -> None:
    assert [name for name in WORK if not callable(getattr(LagKTrainer, name, None))] == []
