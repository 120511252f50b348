"""Training from a notebook: what the command is given, and what the run has."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_vcpo import notebook

VALUES = ["a b", "it's", "x=1,y", "", r"\d+\\", "plain/path", 3, 2.5, True, None, [1, "b c"], {"a": {"b": 1}}]


@pytest.mark.parametrize("value", VALUES)
def test_hydra_reads_every_value_as_it_was(value: Any) -> None:
    override = OverridesParser.create().parse_override(f"name={notebook.spelt(value)}")
    assert override.value() == value


def test_what_the_command_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def instead(command: list[str], **options: Any) -> Any:
        given.append(command)
        return real(["true"], **options)

    given: list[list[str]] = []
    real = notebook.subprocess.Popen
    monkeypatch.setattr(notebook.subprocess, "Popen", instead)
    settings = {"trainer.total_training_steps": 3, "data": {"train_batch_size": 4}}
    run = notebook.train("countdown", model="m", lag=2, method="vcpo", folder=str(tmp_path), **settings)
    assert run.folder == tmp_path
    assert given[0][-8:] == [
        *("train", "+task=countdown", "async.lag=2", f"run_dir={tmp_path}", "method=vcpo"),
        *("actor_rollout_ref.model.path=m", "trainer.total_training_steps=3", "data.train_batch_size=4"),
    ]
    notebook.train("mine", folder=str(tmp_path), config_dir=tmp_path)
    words = ["train", "--config-dir", str(tmp_path), "+task=mine", "async.lag=8", f"run_dir={tmp_path}"]
    assert given[1][-len(words) :] == words


def test_a_wrong_setting_is_the_commands_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match=r"error: method=vpco: there is no such method; did you mean vcpo or vespo"):
        notebook.train("countdown", method="vpco", folder=str(tmp_path / "run"))
    assert "did you mean vcpo" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_an_interrupted_cell_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def sleeper(_: list[str], **options: Any) -> Any:
        wait = "try: time.sleep(60)\nexcept KeyboardInterrupt: open('ended', 'w')"
        program = f"import time\nprint('on', flush=True)\n{wait}"
        process = real([notebook.sys.executable, "-c", program], cwd=tmp_path, start_new_session=True, **options)
        threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return process

    real = notebook.subprocess.Popen
    monkeypatch.setattr(notebook.subprocess, "Popen", sleeper)
    with pytest.raises(KeyboardInterrupt):
        notebook.train("countdown")
    assert (tmp_path / "ended").is_file()


def test_what_a_run_has(tmp_path: Path) -> None:
    matplotlib.use("Agg")
    lines = [
        {"step": 0, "val_accuracy": 0.1, "reward": None, "ess_ratio": None},
        {"step": 1, "val_accuracy": None, "reward": 0.2, "ess_ratio": 0.9},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text('{"final_accuracy": 0.1}')
    run = notebook.Run(tmp_path)
    assert run.summary["final_accuracy"] == 0.1 and run.metrics.loc[1, "reward"] == 0.2
    assert [ax.get_title() for ax in run.plot()] == ["val_accuracy", "reward", "ess_ratio"]
