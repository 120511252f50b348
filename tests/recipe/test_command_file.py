"""A run keeps the command that it was started with."""

import contextlib
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.fully_async_policy import main


def test_the_command_is_kept_for_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["+task=countdown", "async.lag=8", "data.train_files=[a b.parquet,c.parquet]"]
    kept = []

    def run(self: object, config: object, observe_processes: object) -> None:
        kept.append((tmp_path / "command.txt").read_text())
        (tmp_path / "metrics.jsonl").write_text("")

    stand_in = SimpleNamespace(LagKTaskRunner=type("Runner", (), {"run": run}))
    monkeypatch.setitem(sys.modules, "verl_vcpo.loop.main", stand_in)
    monkeypatch.setattr("recipe.fully_async_policy.launch.cluster_nodes.wait_for_nodes", lambda config: None)
    session = contextlib.nullcontext(SimpleNamespace(observe=None))
    monkeypatch.setattr(main, "ray_session", lambda *_: session)
    config = OmegaConf.create({"run_dir": str(tmp_path), "method": "vcpo", "async": {"lag": 8}})
    assert main.train(config, "id", overrides).startswith("no training, ")
    assert shlex.split(kept[0]) == ["python", "-m", "recipe.fully_async_policy.main", *overrides], (
        "there from the start"
    )
