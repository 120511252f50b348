"""The records of a run: a line per step on the console and in `metrics.jsonl`, and `summary.json` at the end."""

import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl_vcpo.common import console
from verl_vcpo.common.held_folders import checked
from verl_vcpo.common.step_lines import append, lines_until
from verl_vcpo.common.whole_file import write_whole
from verl_vcpo.report.advice import Advisor, ArithmeticWatch, BaselineWatch, CollapseWarner
from verl_vcpo.report.learning_signal import IN_A_ROW, SignalWatch
from verl_vcpo.report.metrics_file import METRICS_FILE as METRICS_FILE
from verl_vcpo.report.metrics_file import read_metrics as read_metrics
from verl_vcpo.report.step_table import StepTable

SUMMARY_FILE, CONFIG_FILE = "summary.json", "config.yaml"
COMMAND_FILE = "command.txt"
"""The file in the run's folder with the command that started the run, for a shell."""
SAMPLES_FILE = "samples.jsonl"  # in the run's folder: some of the responses (sample_log.py)
SKIPPED_FILE = (
    "skipped_prompts.jsonl"  # in the run's folder: prompts that were left out (loop/prompts/failed_prompts.py)
)
MODEL_FOLDER = "model"  # in the run's folder: the trained policy, for transformers and vLLM
ACCURACIES = "val_accuracies"
"""The held-out accuracy of each data source, in lines that have a held-out accuracy."""
ANSWERS = "vcpo/val_answers"
"""The number of answers whose mean a held-out accuracy is, in lines that have one."""
SKIPPED, VAL_SKIPPED = "vcpo/async/skipped_prompts", "vcpo/val_skipped_prompts"
"""The number of prompts that always failed and were left out, of a step's training and of a validation."""
WEIGHTS_FOLDER = "weights"  # in the run's folder: the policies of its checkpoints, step_N, in the same form
EVALUATIONS_FOLDER = "evaluations"
"""The folder in the run's folder with the results of `recipe.evaluate --follow`, `step_N`."""
LINE_FILE = "metrics_line.json"
"""The file in a checkpoint with the line of its step, which `metrics.jsonl` gets only after the weight update."""

# Our name of a metric -> verl's name. These metrics come first in a line; all metrics follow under verl's names.
HEADLINES = {
    "reward": "critic/score/mean",
    "ess_ratio": "actor/vcpo/ess_ratio",
    "lr_multiplier": "actor/vcpo/lr_multiplier",
    "baseline": "actor/vcpo/baseline",
    "grad_norm": "actor/grad_norm",
    "kl": "actor/vcpo/kl_rollout_policy",
    "lag_min": "training/off_policy/trajectory_staleness_worst/min",
    "lag_mean": "training/off_policy/trajectory_staleness_worst/mean",
    "lag_max": "training/off_policy/trajectory_staleness_worst/max",
    "tokens_per_s": "vcpo/tokens_per_s",
    "trainer_idle_share": "vcpo/trainer_idle_share",
    "sampler_idle_share": "vcpo/sampler_idle_share",
    "weight_sync_share": "vcpo/weight_sync_share",
    "weight_sync_s": "timing_s/update_weights",
    "step_s": "timing_s/step",
}


def held_out_accuracies(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return verl's core accuracy of each data source among `metrics`; empty without a validation."""
    core = {n.removeprefix("val-core/"): float(v) for n, v in metrics.items() if n.startswith("val-core/")}
    return {name.rsplit("/", 2)[0]: value for name, value in core.items() if "/mean@" in name}


def mean_accuracy(accuracies: dict[str, float]) -> float:
    """Return the mean over the data sources; there is at least one."""
    return sum(accuracies.values()) / len(accuracies)


def how_answered(sampling: Any) -> str:
    """Say how held-out prompts are answered; `sampling` is `actor_rollout_ref.rollout.val_kwargs`."""
    return f"drawn at temperature {sampling.temperature:g}" if sampling.temperature else "greedy"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a metric of type {type(value).__name__} cannot be written as JSON")


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON does not have, by None: null in the file, as for metrics not measured."""
    return {
        name: None if isinstance(value, float | np.floating) and not np.isfinite(value) else value
        for name, value in line.items()
    }


def _json(line: dict[str, Any]) -> str:
    return json.dumps(_finite(line), default=_plain, allow_nan=False)


class RunLog:
    """The writer of whole lines to `<run_dir>/metrics.jsonl`, and of rows, warnings and advice to the console.

    Args:
        scales_step_size: whether the step size follows the ESS ratio; otherwise the collapse warning recommends that.
        advisor: the source of advice on the console; None: no advice.
        answered: how held-out prompts are answered (`how_answered`), which the console says beside the accuracy.
        follows_lag: whether a scaled step size follows the lag's part of the weights (`vcpo.ess_part=lag`).
    """

    def __init__(
        self,
        run_dir: str | Path,
        scales_step_size: bool = True,
        advisor: Advisor | None = None,
        answered: str = "",
        follows_lag: bool = True,
    ) -> None:
        self._path = Path(run_dir) / METRICS_FILE
        self._start = time.perf_counter()
        self._advisor = advisor
        self._table = StepTable(answered)
        self._warner = CollapseWarner(scales_step_size)
        self._signal = SignalWatch()
        self._arithmetic = ArithmeticWatch(follows_lag)
        self._baseline = BaselineWatch()

    def resume(self, step: int, checkpoint: str | Path | None = None) -> None:
        """Continue an earlier process's file after step `step`: drop lines of later steps, and continue the clock.

        A process that ended between the checkpoint of a step and the step's line has left the line in `checkpoint`.
        """
        if not self._path.is_file():
            return
        lines = lines_until(self._path, step)
        kept = Path(checkpoint) / LINE_FILE if checkpoint else None
        if kept and kept.is_file() and step not in {line["step"] for line in lines}:
            lines.append(json.loads(kept.read_text()))
        write_whole(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        if lines:
            self._start = time.perf_counter() - lines[-1].get("wall_clock_s", 0.0)

    def _line(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        headlines = {name: metrics.get(source) for name, source in HEADLINES.items()}
        accuracies = held_out_accuracies(metrics)
        return {
            "step": step,
            "wall_clock_s": round(time.perf_counter() - self._start, 3),
            "val_accuracy": mean_accuracy(accuracies) if accuracies else None,
            **({ACCURACIES: _finite(accuracies)} if accuracies else {}),
            **headlines,
            **metrics,
        }

    def keep(self, step: int, metrics: dict[str, Any], checkpoint: Path) -> None:
        """Write the line of a step, as far as it is known, into the folder of the step's checkpoint."""
        write_whole(checkpoint / LINE_FILE, _json(self._line(step, metrics)))

    def append(self, step: int, metrics: dict[str, Any]) -> None:
        """Write the line of an evaluation without training; the console shows the accuracy by `summary_in_words`."""
        self._append(self._line(step, metrics))

    def _append(self, line: dict[str, Any]) -> None:
        append(self._path, _json(line) + "\n")

    def write(self, step: int, metrics: dict[str, Any]) -> str | None:
        """Write the line of one step (0: before training), with all headlines: null for one that was not measured.

        Returns the text of the collapse warning that begins at this step, or None.
        """
        line = self._line(step, metrics)
        warning = note = advice = of_arithmetic = of_baseline = None
        trained = line["reward"] is not None
        if trained:
            line["collapse_signs"], warning = self._warner.look_at(line)
            of_arithmetic = self._arithmetic.look_at(line)
            of_baseline = self._baseline.look_at(line)
            line[IN_A_ROW], note = self._signal.look_at(line)
            advice = self._advisor.look_at(line) if self._advisor else None
        self._append(line)
        for text in self._table.lines(line):
            console.print_line(text)
        for said in filter(None, (note, of_arithmetic, warning)):
            console.print_line(f"warning: {said}")
        for said in filter(None, (advice, of_baseline)):
            console.print_line(f"advice: {said}")
        if trained:
            console.screen().step_done()
        return warning


def write_summary(run_dir: str | Path, method: str, lag: float, wall_clock_s: float) -> dict[str, Any]:
    """Write the summary of a run to `summary.json`, and return the summary.

    `method` is that of `method=NAME`, `lag` the bound, `wall_clock_s` the seconds of the whole run, with the start.
    """
    run_dir = checked(run_dir)
    lines = read_metrics(run_dir)
    steps = [line for line in lines if line.get("reward") is not None]
    accuracies = [line["val_accuracy"] for line in lines if line.get("val_accuracy") is not None]
    before = [line.get("val_accuracy") for line in lines if line["step"] == 0]
    by_source = [(line["step"], line[ACCURACIES]) for line in lines if line.get(ACCURACIES)]
    timed = [line for line in steps if "step_s" in line and "tokens_per_s" in line]
    trained_s = sum(line["step_s"] for line in timed)
    ratios = [line["ess_ratio"] for line in steps if line.get("ess_ratio") is not None]  # null: not finite
    summary = {
        "method": method,
        "base_accuracy": before[0] if before else None,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "base_accuracies": by_source[0][1] if by_source and by_source[0][0] == 0 else {},
        "final_accuracies": by_source[-1][1] if by_source else {},
        "steps": len(steps),
        "lag": lag,
        "skipped_prompts": int(sum(line.get(SKIPPED) or 0 for line in steps)),
        "max_realized_lag": max((line["lag_max"] for line in steps if "lag_max" in line), default=None),
        "mean_ess_ratio": sum(ratios) / len(ratios) if ratios else None,
        "wall_clock_s": round(wall_clock_s, 1),
        "tokens_per_s": sum(line["tokens_per_s"] * line["step_s"] for line in timed) / trained_s if timed else None,
    }
    write_whole(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return summary


def summary_in_words(summary: dict[str, Any]) -> str:
    """Return the summary in lines for the console."""

    def share(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.1%}"

    def accuracy(base: float | None, final: float | None) -> str:
        return f"{share(base)} before training, {share(final)} after" if summary["steps"] else share(final)

    took, steps = console.duration(summary["wall_clock_s"]), summary["steps"]
    lines = [f"{steps} {'step' if steps == 1 else 'steps'} in {took}" if steps else f"no training, {took}"]
    if summary["final_accuracy"] is not None or not steps:
        base, final = summary["base_accuracies"], summary["final_accuracies"]
        lines.append(f"held-out accuracy: {accuracy(summary['base_accuracy'], summary['final_accuracy'])}")
        if len(final) > 1:
            lines[-1] += f", the mean over {len(final)} data sources:"
            lines += [f"  {source}: {accuracy(base.get(source), value)}" for source, value in final.items()]
    if not steps:  # trainer.val_only=true
        return "\n".join(lines)
    lag = f"{summary['max_realized_lag']:g} of at most {summary['lag']:g}"
    speed = f"{summary['tokens_per_s']:.0f} tokens/s"
    ratio = "not measured" if summary["mean_ess_ratio"] is None else f"{summary['mean_ess_ratio']:.2f}"
    lines.append(f"largest lag {lag}; mean ESS ratio {ratio}; {speed}")
    if skipped := summary["skipped_prompts"]:
        lines.append(f"{skipped} {'prompt' if skipped == 1 else 'prompts'} skipped: {SKIPPED_FILE} in the run's folder")
    return "\n".join(lines)


def command(module: str, given: list[str]) -> str:
    """Return the command that starts a run, for a shell: `python -m module` with the arguments `given`."""
    return shlex.join(["python", "-m", module, *given])


def write_command(run_dir: str | Path, module: str, given: list[str]) -> None:
    """Keep the run's command in the run's folder."""
    (checked(run_dir) / COMMAND_FILE).write_text(command(module, given) + "\n")


def last_step(run_dir: str | Path) -> int:
    """Return the last step in `metrics.jsonl`; 0 before the first step."""
    if not (Path(run_dir) / METRICS_FILE).is_file():
        return 0
    return max((line["step"] for line in read_metrics(run_dir)), default=0)
