"""Some of the responses that a run was trained on, in `samples.jsonl`: the text, its reward, lag and weight."""

import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from verl_vcpo.actor.update.sequence_weights import SequenceWeight, Session
from verl_vcpo.common.step_lines import StepLines, read_lines
from verl_vcpo.report.run_log import SAMPLES_FILE
from verl_vcpo.report.trajectory_metrics import RAW_REWARD

SAMPLES = 4
"""The number of lines of a step."""

_UNKNOWN = SequenceWeight(math.nan, math.nan)
_FIELDS = ["prompts", "responses", "uid", "session_id", "data_source", "extra_fields", "rm_scores"]


class SampleLog(StepLines):
    """The lines of `<run_dir>/samples.jsonl`, every `samples_every` steps; 0: never."""

    def __init__(self, run_dir: str | Path, every: int) -> None:
        super().__init__(Path(run_dir) / SAMPLES_FILE)
        self._every = every

    def is_due(self, step: int) -> bool:
        """Return True if responses of `step` are recorded: the first step, and every step that `every` divides."""
        return self._every > 0 and (step == 1 or step % self._every == 0)


def read_samples(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the lines of `samples.jsonl` that can be read, oldest first; [] without a file."""
    path = Path(run_dir) / SAMPLES_FILE
    return list(read_lines(path)) if path.is_file() else []


def samples_of(batch: KVBatchMeta, step: int, weights: Mapping[Session, SequenceWeight], tokenizer: Any) -> list[Any]:
    """Draw `SAMPLES` of the batch's trajectories, with the same chance for each; `step` seeds the draw.

    Args:
        batch: the batch of `step`, still in TransferQueue.
        weights: the sequences' importance weights in the update; some may be missing.

    Returns:
        The lines of `samples.jsonl`. `weight` and `log_weight` are None where unknown or not finite.
    """
    trained = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding")]
    rows = sorted(random.Random(step).sample(trained, min(SAMPLES, len(trained))))
    keys = [batch.keys[i] for i in rows]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=_FIELDS)
    stored: dict[str, Any] = {name: list(_rows(data, name)) for name in _FIELDS}
    samples = []
    for i, row in enumerate(rows):
        uid, response = str(stored["uid"][i]), stored["responses"][i]
        reward = stored["extra_fields"][i].get(RAW_REWARD)
        weight = weights.get((uid, int(stored["session_id"][i])), _UNKNOWN)
        samples.append(
            {
                "step": step,
                "uid": uid,
                "prompt": tokenizer.decode(stored["prompts"][i], skip_special_tokens=True),
                "response": tokenizer.decode(response, skip_special_tokens=True),
                "tokens": len(response),
                "reward": float(stored["rm_scores"][i].sum() if reward is None else reward),
                "lag": step - 1 - batch.tags[row]["min_global_steps"],
                "weight": _finite(weight.weight),
                "log_weight": _finite(weight.log_weight),
                "data_source": str(stored["data_source"][i]),
            }
        )
    return samples


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rows(data: Any, name: str) -> Iterable[Any]:
    values = tu.get(data, name)
    return values.unbind() if hasattr(values, "unbind") else values
