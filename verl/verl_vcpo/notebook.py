"""Training from a notebook: the command `vcpo train` in a process of its own, and the run that it leaves.

    from verl_vcpo.notebook import train

    run = train("countdown", model="models/countdown-tiny", lag=8, **{"trainer.total_training_steps": 20})
    run.summary["final_accuracy"], run.metrics, run.plot()

The package `vcpo` knows torch alone, so the function is not there.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.override_parser.types import Quote, QuotedString

from verl_vcpo.report.metrics_file import read_metrics
from verl_vcpo.report.run_log import SUMMARY_FILE

_PLAIN = re.compile(r"[\w./:-]+")
_SHOWN = ("val_accuracy", "reward", "ess_ratio")


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` has: accuracies before and after, steps, lag, seconds."""
        summary: dict[str, Any] = json.loads((self.folder / SUMMARY_FILE).read_text())
        return summary

    @property
    def metrics(self) -> pd.DataFrame:
        """The lines of `metrics.jsonl`, by step."""
        return pd.DataFrame(read_metrics(self.folder)).set_index("step")

    def plot(self) -> Any:
        """Held-out accuracy, reward and ESS ratio by step, as matplotlib's axes; `vcpo report` has more."""
        from matplotlib import pyplot

        axes = pyplot.subplots(len(_SHOWN), sharex=True, figsize=(6, 6), layout="constrained")[1]
        shown = self.metrics[list(_SHOWN)].astype(float)
        return [shown[name].dropna().plot(ax=ax, title=name, marker=".") for name, ax in zip(_SHOWN, axes, strict=True)]


def train(
    task: str,
    model: str | None = None,
    lag: float = 8,
    method: str | None = None,
    folder: str | None = None,
    config_dir: str | Path | None = None,
    **settings: Any,
) -> Run:
    """Train as `vcpo train +task=TASK ...` does, its lines below the cell. Interrupting the cell ends the run.

    Args:
        model: a Hugging Face folder, or a name of the hub; None: the task's preset says.
        method: None: the default, as for `vcpo train`.
        folder: the run's folder; None: outputs/ and the time.
        config_dir: a folder with presets of your own, task/NAME.yaml and method/NAME.yaml.
        settings: by their full names, `**{"data.train_batch_size": 16}`; or a section, `data={"train_batch_size": 16}`.

    Raises:
        RuntimeError: the command's last line, where it has not ended well.
    """
    place = Path(folder or f"outputs/{datetime.now():%Y%m%d-%H%M%S}")
    named = {"method": method, "actor_rollout_ref.model.path": model}
    given = {"async.lag": lag, "run_dir": str(place)} | {name: value for name, value in named.items() if value}
    presets = ["--config-dir", str(config_dir)] if config_dir else []
    overrides = [f"{name}={spelt(value)}" for name, value in _by_full_name(given | settings).items()]
    program = "from verl_vcpo.command import main; main()"
    command = [sys.executable, "-u", "-c", program, "train", *presets, f"+task={task}", *overrides]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        line = ""
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # a notebook's interruption reaches its own process alone
            raise
    if process.returncode:
        raise RuntimeError(line.strip())
    return Run(place)


def spelt(value: Any) -> str:
    """A value as Hydra reads it on a command line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {spelt(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(spelt, value))}]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else QuotedString(value, Quote.single).with_quotes()
    return json.dumps(value)  # null, true, false, numbers


def _by_full_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of the configuration's first level become settings; deeper ones Hydra merges."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        of_section = isinstance(value, Mapping) and "." not in name
        found |= {f"{name}.{below}": one for below, one in value.items()} if of_section else {name: value}
    return found
