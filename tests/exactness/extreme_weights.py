"""Is the gradient right for every weight? `python -m tests.exactness.extreme_weights [--json]`.

One update of the real Megatron actor on a small model, in one process on CPU, with log importance weights between -40
and 40, for every way to form the gradient (`vcpo.norms.how` and scope). Its gradient is compared
with one backward per sequence, whose gradients are added up in float64 with coefficients in which nothing cancels. A
`+` marks an update that found that its two sums would not do, and took a second backward. A less exact way stands
beside: the two sums without a second backward. Takes a minute; exits with 1 where a relative error of the others
exceeds 1e-4.
"""

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.kit.actor import adamw, build_engine, join_processes, loss_function  # applies the environment first

import torch  # isort: skip
from tensordict import TensorDict
from torch import Tensor
from tqdm import tqdm
from verl.utils import tensordict_utils as tu

from recipe.command_line import OneLineParser, run_command
from tests.kit.layout_run import GROUPS, ParallelLayout, make_checkpoint
from tests.kit.layout_worker import make_batch
from vcpo import OpobScope
from verl_vcpo.actor.update import rounding
from verl_vcpo.actor.update.losses import note_longest_response, padded_responses, weighted_score_loss
from verl_vcpo.actor.vcpo_settings import VCPOSettings

LIMIT = 1e-4
"""The largest relative error of a gradient of one of `WAYS`."""

_ONE_PROCESS = ParallelLayout("one process", distributed_optimizer=False)
_SCORE = partial(weighted_score_loss, loss_agg_mode="seq-mean-token-mean")

WAYS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, mini-batch": {"opob_scope": "minibatch"},
    "two backwards": {"norms": {"how": "two_backwards"}},
    "per trajectory": {"norms": {"how": "per_trajectory"}},
}
"""Ways to form the gradient, as settings of VCPOSettings."""

TWO_SUMS = "two sums alone"
BESIDE: dict[str, dict[str, Any]] = {TWO_SUMS: WAYS["packed"]}
"""A way that is less exact, to be compared with: without a second backward."""

ONE, EACH_GROUP, ALL, RANDOM = "one above the rest", "one of each group above the rest", "all low", "random"
SPREADS: dict[str, tuple[float, ...]] = {
    ONE: (0, 8, 11, 14, 17, 20, 25, 30, 40),
    EACH_GROUP: (6, 8, 10, 14, 18, 22, 30, 40),
    ALL: (10, 20, 30, 40),
    RANDOM: (1, 4, 10, 20, 40),
}
"""Which sequences have other log-weights than the rest, and by how much."""


@dataclass(frozen=True)
class Error:
    """The error of one update's gradient."""

    way: str
    weights: str
    spread: float
    relative: float
    """Norm of the difference, relative to the norm of the exact gradient."""
    second_backward: bool
    """Whether the update took a second backward."""


def log_weights(weights: str, spread: float, sequences: int) -> Tensor:
    """[B] float64 log-weights, in an order in which sequence i is of group i % GROUPS."""
    log_weight = torch.zeros(sequences, dtype=torch.float64)
    if weights == ONE:
        log_weight[0] = spread
    elif weights == EACH_GROUP:
        log_weight[GROUPS:] = -spread
    elif weights == ALL:
        log_weight[:] = -spread
    else:
        log_weight.uniform_(-spread, spread, generator=torch.Generator().manual_seed(0))
    return log_weight


def truncation(weights: str) -> float | None:
    """8, or None where the weights in question would be truncated."""
    return None if weights in (ONE, RANDOM) else 8.0


class Actor:
    """The patched Megatron actor on a small model whose weights stay as they are."""

    def __init__(self, folder: Path) -> None:
        self.engine = build_engine(_ONE_PROCESS, make_checkpoint("untied", folder), adamw())
        self._seen: list[Tensor] = []
        self.engine.optimizer_step = self._look
        self.batch = make_batch(_ONE_PROCESS)
        self.group = torch.tensor([int(uid, 16) for uid in self.batch["uid"]])
        self.masks = [mask.bool() for mask in self.batch["response_mask"].unbind()]
        self.gradients, self.log_probs = self._by_sequence()

    def _look(self) -> float:
        self._seen.append(self._gradient())
        return 0.0

    def _gradient(self) -> Tensor:
        parameters = [p for chunk in self.engine.module for p in chunk.parameters()]
        return torch.cat([p.main_grad.double().flatten() for p in parameters])

    def _by_sequence(self) -> tuple[Tensor, list[Tensor]]:
        """([B, P] score gradients, B log-probs of response tokens), by one backward per sequence."""
        gradients, log_probs = [], []
        with self.engine.train_mode():
            for i in range(len(self.batch)):
                one = tu.index_select_tensor_dict(self.batch, [i])
                tu.assign_non_tensor(one, micro_batch_size_per_gpu=1)
                note_longest_response(one)
                one["vcpo_coefficient"] = torch.ones(1)
                self.engine.optimizer_zero_grad()
                out = self.engine.forward_backward_batch(one, _SCORE)
                gradients.append(self._gradient())
                log_probs.append(padded_responses(out["model_output"]["log_probs"], one)[0].detach().float())
        return torch.stack(gradients), log_probs

    def with_log_weights(self, log_weight: Tensor, reward: Tensor | None = None) -> TensorDict:
        """The batch with these log-weights, up to float32, and with these rewards."""
        batch = self.batch.clone()
        rollout = [
            torch.where(mask, log_prob - (wanted / mask.sum()).float(), 0.0)
            for log_prob, mask, wanted in zip(self.log_probs, self.masks, log_weight, strict=True)
        ]
        batch["rollout_log_probs"] = torch.nested.as_nested_tensor(rollout, layout=torch.jagged)
        if reward is not None:
            batch["rm_scores"].values()[:] = 0
            batch["rm_scores"].values()[batch["rm_scores"].offsets()[1:] - 1] = reward.float()
        return batch

    def update(self, batch: TensorDict, settings: VCPOSettings, **score: Any) -> tuple[Tensor, dict[str, Any]]:
        """([P] float64 the gradient that the optimizer is given, the metrics) of one update."""
        with self.engine.train_mode():
            metrics = self.engine.train_batch(batch.clone(), loss_function(settings, **score))["metrics"]
        return self._seen.pop(), metrics

    def exact(self, batch: TensorDict, settings: VCPOSettings) -> Tensor:
        """[P] float64: the definition, with coefficients that no cancellation has touched."""
        rows = zip(self.log_probs, batch["rollout_log_probs"].unbind(), self.masks, strict=True)
        log_weight = torch.stack([(policy.double() - rollout.double())[mask].sum() for policy, rollout, mask in rows])
        reward = torch.stack([row.double().sum() for row in batch["rm_scores"].unbind()])
        log_used = log_weight.clamp(max=min(math.log(settings.truncation or math.inf), 40.0))
        groups = [self.group == group for group in self.group.unique()]
        scale = torch.ones_like(log_weight)
        if settings.norm_by_std:
            for rows in groups:
                std = reward[rows].std(correction=0)
                scale[rows] = 1 / std if std > 0 else 0.0
        log_influence = 2 * log_used + self.gradients.square().sum(1).log()
        if settings.opob_scope == OpobScope.MINIBATCH:
            groups, log_influence = [torch.ones_like(self.group).bool()], log_influence + 2 * scale.log()
        coefficient = torch.zeros_like(log_weight)
        for rows in groups:
            share = (log_influence[rows] - log_influence[rows].max()).exp().nan_to_num(1.0)
            difference = reward[rows][:, None] - reward[rows][None]  # [n, n]
            coefficient[rows] = (log_used.exp() * scale)[rows] * (difference * share).sum(1) / share.sum()
        return coefficient @ self.gradients / len(log_weight)

    def error(self, batch: TensorDict, settings: VCPOSettings) -> tuple[float, bool]:
        """(error of one update's gradient, relative to the exact one's norm; whether it took a second backward)."""
        gradient, metrics = self.update(batch, settings)
        exact = self.exact(batch, settings)
        missed = (gradient - exact).norm().item()
        return missed / (exact.norm().item() or 1.0), metrics["vcpo/second_backwards"] == [1]


def errors(folder: Path) -> Iterator[Error]:
    """Every way to form the gradient, under every spread of the weights."""
    actor = Actor(folder)
    for weights, spreads in SPREADS.items():
        for spread in spreads:
            batch = actor.with_log_weights(log_weights(weights, spread, len(actor.batch)))
            for way, of_way in {**WAYS, **BESIDE}.items():
                settings = VCPOSettings(truncation=truncation(weights), **of_way)
                with mock.patch.object(rounding, "LIMIT", math.inf if way == TWO_SUMS else rounding.LIMIT):
                    error, second_backward = actor.error(batch, settings)
                yield Error(way, weights, spread, error, second_backward)


def print_table(rows: list[Error]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("weights", "spread", *WAYS, *BESIDE)
    for weights, spreads in SPREADS.items():
        for spread in spreads:
            of_spread = {row.way: row for row in rows if (row.weights, row.spread) == (weights, spread)}
            cells = (f"{row.relative:.1e}{'+' if row.second_backward else ''}" for row in of_spread.values())
            table.add_row(weights, f"{spread:g}", *cells)
    Console(width=180).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        join_processes(0, 1, Path(folder))
        total = (len(WAYS) + len(BESIDE)) * sum(map(len, SPREADS.values()))
        rows = list(tqdm(errors(Path(folder)), total=total, desc="updates", file=sys.stderr))
    print_table(rows)
    worst = max(row.relative for row in rows if row.way in WAYS)
    if arguments.json:
        print(json.dumps({"limit": LIMIT, "worst_relative_error": worst, "updates": [asdict(row) for row in rows]}))
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    run_command(main)
