"""`async.lag=auto`: a lag that governs itself, between 0 and `async.max_lag`.

n batches on their way lead to a lag of n-1. The controller says how many there are to be, from the ESS ratio and the
KL of each step. It adds one at a time and halves, as TCP does with its window (V. Jacobson, "Congestion Avoidance and
Control", 1988), and ignores the steps that train on what was registered before the number was last halved.

    outside the band   ESS ratio below `_ESS_RATIO`, or KL above `_KL`      half as many
    well inside        `_MARGIN` away from both levels, for `_CALM_STEPS`   one more
    in between                                                              as many as before
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from verl_vcpo.trainer.ppo.v1.lag_setting import AUTO
from verl_vcpo.whole_file import write_whole

LAG_TARGET = "vcpo/async/lag_target"
"""The metric: one less than the batches that are to be on their way after the step."""
STATE_FILE = "lag_controller.json"
"""In a checkpoint."""

_ESS_RATIO, _KL = 0.3, 0.3  # KL in nats per token
_MARGIN = 1.5
_CALM_STEPS = 4
_MOST_AT_A_STEP = 2  # batches: with one the number on their way stays, as a step trains on one


@dataclass
class LagController:
    """How many batches are to be on their way: between 1, which is synchronous training, and `max_lag + 1`.

    It begins with 1, so that a lag is reached by steps that were inside the band.
    """

    max_lag: int
    batches: int = 1
    calm_steps: int = 0
    """Steps in a row well inside the band, since the last change."""
    hold_steps: int = 0
    """Steps that will still train on batches registered before the number was halved: they say nothing of the half."""

    @classmethod
    def of(cls, settings: DictConfig) -> "LagController | None":
        """That of a run with these settings, the section `async`; None where the lag is fixed."""
        return cls(settings.max_lag) if settings.lag == AUTO else None

    @property
    def lag(self) -> int:
        """The lag that so many batches lead to, in policy updates."""
        return self.batches - 1

    def update(self, ess_ratio: float, kl: float, on_their_way: int) -> None:
        """Take in one step. NaN counts as outside the band.

        Args:
            ess_ratio: of the step's batch, in [0, 1].
            kl: KL(rollout || policy) of the step's batch, in nats per token.
            on_their_way: batches registered and not trained on, without the step's own.
        """
        if self.hold_steps:
            self.hold_steps -= 1
        elif not (ess_ratio >= _ESS_RATIO and kl <= _KL):
            self.batches, self.calm_steps, self.hold_steps = max(1, self.batches // 2), 0, on_their_way
        elif ess_ratio < _MARGIN * _ESS_RATIO or kl > _KL / _MARGIN:
            self.calm_steps = 0
        elif self.calm_steps + 1 < _CALM_STEPS:
            self.calm_steps += 1
        else:
            self.batches, self.calm_steps = min(self.batches + 1, self.max_lag + 1), 0

    def to_register(self, prompts: int, batch_size: int) -> int:
        """Batches to register at the beginning of a step: 0, 1 or 2.

        Prompts that are no whole batch, which another batch size leaves after a resume, count as one: more than
        `max_lag + 1` batches on their way could not all be trained on in time.

        Args:
            prompts: on their way.
            batch_size: prompts that a step trains on.
        """
        at_least = 1 if prompts < batch_size else 0  # otherwise the step would have nothing to train on
        missing = self.batches - math.ceil(prompts / batch_size)
        return min(max(missing, at_least), _MOST_AT_A_STEP)

    def save(self, checkpoint: Path) -> None:
        """Write the state into the folder of a checkpoint."""
        state = {"batches": self.batches, "calm_steps": self.calm_steps, "hold_steps": self.hold_steps}
        write_whole(checkpoint / STATE_FILE, json.dumps(state))

    def resume(self, checkpoint: str | Path) -> None:
        """Take over a checkpoint's state, as far as `max_lag` allows; that of a fixed lag has none."""
        file = Path(checkpoint) / STATE_FILE
        if file.is_file():
            state = json.loads(file.read_text())
            self.batches = min(state["batches"], self.max_lag + 1)
            self.calm_steps, self.hold_steps = state["calm_steps"], state["hold_steps"]
