"""The first section in W&B and TensorBoard: eight curves and, in W&B, a table of responses and the collapse alarm."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.tracking import Tracking

from verl_vcpo.report.run_log import HEADLINES, held_out_accuracies, mean_accuracy

SECTION = "00_overview"
"""The prefix of the section's names: W&B and TensorBoard sort sections, and curves in a section, by the alphabet."""
ACCURACY = f"{SECTION}/1_held_out_accuracy"
CURVES = {
    f"{SECTION}/2_reward": HEADLINES["reward"],
    f"{SECTION}/3_kl": HEADLINES["kl"],
    f"{SECTION}/4_ess_ratio": HEADLINES["ess_ratio"],
    f"{SECTION}/5_grad_norm": HEADLINES["grad_norm"],
    f"{SECTION}/6_lag_max": HEADLINES["lag_max"],
    f"{SECTION}/7_lr_multiplier": HEADLINES["lr_multiplier"],
    f"{SECTION}/8_response_length": "response_length/mean",
}
"""The curves of the steps: name -> verl's name of the metric, under which W&B and TensorBoard have the metric too."""
TABLE = f"{SECTION}/samples"
ALERT = "Collapse ahead"

_LOGGERS = ["wandb", "tensorboard"]


class Overview:
    """The writer of the section; without effect if `trainer.logger` has neither W&B nor TensorBoard.

    Args:
        tracking: verl's loggers of the run. A step's values have to be logged before verl logs the next step.
    """

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self._wandb: Any = tracking.logger.get("wandb")

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the held-out accuracy, from verl's metrics of an evaluation."""
        accuracies = held_out_accuracies(metrics)
        self._log(step, {ACCURACY: mean_accuracy(accuracies)} if accuracies else {})

    def step(self, step: int, metrics: Mapping[str, Any], warning: str | None) -> None:
        """Log the curves of a step from verl's metrics, and send a collapse warning as an alert of W&B."""
        self._log(step, {name: metrics.get(source) for name, source in CURVES.items()})
        if warning and self._wandb:
            # W&B drops an alert with the title of one within `wait_duration`. The alarm gives each warning once.
            level = self._wandb.AlertLevel.WARN
            self._wandb.alert(title=ALERT, text=f"step {step}: {warning}", level=level, wait_duration=0)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the responses of a step that are in `samples.jsonl`, as one table."""
        if self._wandb and samples:
            rows = [list(sample.values()) for sample in samples]
            self._wandb.log({TABLE: self._wandb.Table(columns=list(samples[0]), data=rows)}, step=step)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        measured = {name: value for name, value in values.items() if value is not None}
        self._tracking.log(measured, step, backend=_LOGGERS)


def finish(tracking: Tracking | None, exit_code: int) -> None:
    """End verl's loggers, if there are any yet, and W&B's process, before the run's processes are ended.

    W&B's own hook at the end of this process can raise if somebody else has ended W&B's process.
    """
    try:
        if tracking is not None:
            tracking.finish(exit_code=exit_code)
    finally:
        if wandb := sys.modules.get("wandb"):
            wandb.teardown()
