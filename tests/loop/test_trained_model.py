"""The trained model is written once, before anything that may fail after the last step."""

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_vcpo.loop.held_out import HeldOutTrainer
from verl_vcpo.loop.trainer import LagKTrainer


@pytest.mark.parametrize("after", ["_validate", "_compute_metrics"])
@pytest.mark.parametrize(("step", "written"), [(2, []), (3, ["model"])])
def test_a_reward_or_a_logger_that_fails_after_the_last_step_costs_no_model(
    monkeypatch: pytest.MonkeyPatch, after: str, step: int, written: list[str]
) -> None:
    def fails(*_: Any) -> None:
        raise ConnectionError("the judge has gone")

    saved: list[str] = []
    trainer = object.__new__(LagKTrainer)
    trainer.config = OmegaConf.create({"save_model": True, "trainer": {"val_only": False}})
    trainer.global_steps, trainer.total_training_steps = step, 3
    monkeypatch.setattr(LagKTrainer, "_save_hugging_face", lambda _, folder: saved.append(folder))
    monkeypatch.setattr(HeldOutTrainer, after, fails)
    monkeypatch.setattr(LagKTrainer, "_verls_metrics", fails)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            getattr(trainer, after)(*([SimpleNamespace(), {}, {}, step, 0] if after == "_compute_metrics" else []))
    assert saved == written
