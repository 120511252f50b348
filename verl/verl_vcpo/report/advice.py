"""Advice while a run trains: which side waits for the other; truncation; a high baseline; signs of a collapse."""

import math
import statistics
from collections import deque
from typing import Any

from vcpo.diagnostics import CollapseAlarm, Sign
from verl_vcpo.common.truncated import SHARE

_WINDOW = 10
_IDLE = 0.3
_HELD_BACK = 0.2
_RISE = 0.1
_ROUNDING = 1e-6  # of the mean reward and the mean baseline, which are formed by different sums


class Advisor:
    """An adviser that reads the lines of `metrics.jsonl`. Each advice is given once in a run.

    Args:
        lag: k. With 0 one side waits while the other side works, whatever the devices are.
        shares_cores: trainer and samplers run on one processor, so that there is no device to move.
    """

    def __init__(self, lag: float, shares_cores: bool) -> None:
        self._lag, self._shares_cores = lag, shares_cores
        self._lines: deque[dict[str, Any]] = deque(maxlen=_WINDOW)
        self._given: set[str] = set()
        self._fewest = 1.0

    def look_at(self, line: dict[str, Any]) -> str | None:
        """Take in a line of `metrics.jsonl`. Returns a line of advice, or None."""
        self._lines.append(line)
        if len(self._lines) < _WINDOW:
            return None
        found, cure = self._truncation()
        if not cure or cure in self._given:
            found, cure = self._advice()
        if not cure or cure in self._given:
            return None
        self._given.add(cure)
        return f"{found}: {cure}"

    def _mean(self, name: str) -> float:
        return sum(line[name] for line in self._lines) / len(self._lines)

    def _call_s(self) -> float:
        """Return the mean seconds of a tool's call, with its wait in the tool's queue; 0 without calls."""
        calls = sum(line.get("tool_use/calls", 0) for line in self._lines)
        return sum(line.get("tool_use/call_s", 0.0) for line in self._lines) / calls if calls else 0.0

    def _truncation(self) -> tuple[str, str]:
        """Return (the finding, the change to make) where the share of truncated responses has risen."""
        if any(SHARE not in line for line in self._lines):
            return "", ""
        share = self._mean(SHARE)
        self._fewest = min(self._fewest, share)
        if share < self._fewest + _RISE:
            return "", ""
        return f"truncated responses have risen from {self._fewest:.0%} to {share:.0%} of the batch", (
            "read some (samples.jsonl), raise data.max_response_length, or set async.truncated=mask"
        )

    def _advice(self) -> tuple[str, str]:
        """Return (the finding, the change to make); both empty where nothing is to be changed."""
        trainer, samplers = self._mean("trainer_idle_share"), self._mean("sampler_idle_share")
        held_back = self._mean("vcpo/async/deadline_wait_s") / max(self._mean("step_s"), 1e-9)
        last = f"over the last {_WINDOW} steps"
        waited = f"the trainer waited for rollouts {trainer:.0%} of the time {last}"
        if self._lag == 0:
            cure = "async.lag=1 or more lets both work at the same time"
            return (waited, cure) if trainer > _IDLE else ("", "")
        if held_back > _HELD_BACK:
            found = f"stragglers held the trainer up {held_back:.0%} of the time {last}"
            call_s = self._call_s()
            if call_s > _HELD_BACK * self._mean("step_s"):
                return f"{found}, and a tool's call took {call_s:.1f} s", (
                    "raise async.lag, or, unless calls wait for tool_use.latency_median_s, give the tool more places "
                    "(python -m code_sandbox --concurrency) or cores"
                )
            return found, "raise async.lag, shorten data.max_response_length, or set async.on_deadline=reissue"
        if self._shares_cores:
            return "", ""
        if trainer > _IDLE and trainer > samplers:
            return waited, (
                "give the samplers more devices (actor_rollout_ref.rollout.n_gpus_per_node, .nnodes) or raise async.lag"
            )
        if samplers > _IDLE:
            return f"the samplers had nothing to do {samplers:.0%} of the time {last}, so rollouts age in the buffer", (
                "give the trainer more devices (trainer.n_gpus_per_node, .nnodes), or take samplers away"
            )
        return "", ""


_SIGNS = {
    Sign.LOW_ESS_RATIO: "the ESS ratio stays low, a few sequences are the whole update",
    Sign.VANISHED_GRADIENT: "the gradient norm jumped and then all but vanished",
    Sign.KL_GROWTH: "KL(rollout || policy) has grown large, the trainer has left the samplers' policy",
}


def ess_ratio_of_lag(line: dict[str, Any]) -> float | None:
    """Return the ESS ratio of the lag part of a step's weights, or of the whole where the parts are not known."""
    of_lag: float | None = line.get("actor/vcpo/ess/lag")
    return line["ess_ratio"] if of_lag is None else of_lag


class ArithmeticWatch:
    """Two looks at arithmetic, each with one line: is the ESS ratio low for the length of the responses alone, by the
    first step that knows? And is what arithmetic makes of the weights too little known, while the step needs it?

    Args:
        follows_lag: whether a step size that is scaled follows the lag's part of the weights (`vcpo.ess_part=lag`).
    """

    _LOW, _MATTERS = 0.5, 0.9
    _UNKNOWN = 0.5
    """The error of the RMS, relative to it, from which on the step is nearly that of the whole weights."""

    def __init__(self, follows_lag: bool = True) -> None:
        self._follows_lag = follows_lag
        self._looked = self._said_unknown = False

    def look_at(self, line: dict[str, Any]) -> str | None:
        """Take in one step. Returns a warning, or None."""
        ratio = line.get("actor/vcpo/ess/arithmetic")
        if ratio is None:
            return None
        if self._looked:
            return self._look_at_error(line) if ratio < self._MATTERS else None
        self._looked = True
        if ratio >= self._LOW:
            return None
        return (
            f"sampler and trainer differ by {line['actor/vcpo/mismatch/rms']:.2g} per token in arithmetic, so fresh "
            f"responses of this length have an ESS ratio of {ratio:.2f}: with vcpo.ess_part=lag, the default, the "
            "step follows the lag alone; weights of sequences stay noise until data.max_response_length is "
            "shorter, or both sides compute log-probs more exactly"
        )

    def _look_at_error(self, line: dict[str, Any]) -> str | None:
        rms, error = (line.get(f"actor/vcpo/mismatch/{name}", 0.0) for name in ("rms", "rms_error"))
        if self._said_unknown or not error or error < self._UNKNOWN * rms:
            return None
        if not self._follows_lag or line["lr_multiplier"] >= 1:  # no step is shortened where none is scaled
            return None
        self._said_unknown = True
        return (
            f"arithmetic makes {rms:.2g} of a token's log-prob, of which {error:.2g} is not certain: too little is "
            "known of it, and the step, which follows the lag, is now nearly that of vcpo.ess_part=whole"
        )


class BaselineWatch:
    """A look at the baseline: above the mean reward it pushes most of each batch down, and training suffers.

    A mean over `STEPS` steps counts as above where it is so by more than two standard errors.
    """

    STEPS = 20

    def __init__(self) -> None:
        self._above: deque[float] = deque(maxlen=self.STEPS)
        self._said = False

    def look_at(self, line: dict[str, Any]) -> str | None:
        """Take in a line of `metrics.jsonl`. Returns a line of advice, once in a run, or None."""
        if line.get("baseline") is None or line.get("reward") is None or line.get("actor/vcpo/dropped_sequences"):
            return None  # `reward` is the mean over dropped trajectories, too, and `baseline` is not
        self._above.append(line["baseline"] - line["reward"])
        if self._said or len(self._above) < self.STEPS:
            return None
        above, deviation = statistics.fmean(self._above), statistics.stdev(self._above)
        self._said = above > max(2 * deviation / math.sqrt(self.STEPS), _ROUNDING)
        if not self._said:
            return None
        return (
            f"the baseline is above the mean reward, by {above:.2g} over the last {self.STEPS} steps, so that most of "
            "a batch is pushed down: method=vcpo_capped keeps it below"
        )


class CollapseWarner:
    """A collapse alarm that reads the lines of `metrics.jsonl`.

    Args:
        scales_step_size: whether VCPO scales the step size already; otherwise the warning recommends scaling.
    """

    def __init__(self, scales_step_size: bool) -> None:
        self._alarm = CollapseAlarm()
        self._scales = scales_step_size

    def look_at(self, line: dict[str, Any]) -> tuple[list[str], str | None]:
        """Take in a line of `metrics.jsonl`. Returns the signs that appeared, and the text of a warning, or None."""
        values = (ess_ratio_of_lag(line), line["grad_norm"], line["kl"])
        signs = self._alarm.update(*(math.nan if value is None else float(value) for value in values))
        if not signs:
            return [], None
        cure = "lower actor_rollout_ref.actor.optim.lr or async.lag"
        cure += "" if self._scales else ", or set method=vcpo_capped"
        return [str(sign) for sign in signs], f"collapse ahead: {'; '.join(_SIGNS[sign] for sign in signs)}: {cure}"
