"""TBA (arXiv 2503.18929): trajectory balance on a mixture of recent responses and the best of those seen before."""

from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.simulator.batch import Batch
from lab.simulator.policy import Policy
from lab.simulator.update import Update, kl, sampled_log_probs
from vcpo.ess import ess_ratio
from vcpo.importance import sequence_log_weights
from vcpo.stabilizers.group_replay import GroupReplay
from vcpo.stabilizers.tba import tba


class TrajectoryBalance:
    """TBA as a method of the simulator. Replayed groups are older than the lag.

    Args:
        beta: how much reward one nat is worth.
        reference: the policy that training begins with; it is kept.
        seed: of the draws from the buffer.
    """

    def __init__(self, beta: float, reference: Policy, seed: int) -> None:
        self._beta, self._reference = beta, reference.copied()
        self._replay: GroupReplay[Batch] = GroupReplay(seed)

    def prepare(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        """Nothing is needed of the batch as a whole."""
        return {}

    def update(self, policy: Policy, batch: Batch, fields: dict[str, Tensor], lag: int) -> Update:
        mixed = self._mix(batch)
        log_prob = sampled_log_probs(policy, mixed)
        with torch.no_grad():
            reference = sampled_log_probs(self._reference, mixed)
        loss = tba(log_prob, reference, mixed.reward, mixed.group, mixed.mask, beta=self._beta).mean()
        log_prob = log_prob.detach()
        log_weight = sequence_log_weights(log_prob, mixed.rollout_log_prob, mixed.mask)
        return Update(
            gradient=torch.autograd.grad(loss, policy.flat)[0],
            lr_multiplier=1.0,
            log_prob=log_prob,
            log_weight=log_weight,
            ess_ratio=ess_ratio(log_weight),
            baseline=float("nan"),
            kl=kl(log_prob, mixed),
        )

    def _mix(self, batch: Batch) -> Batch:
        """As many groups as `batch` has: its own or, in their place, remembered ones."""
        groups = [batch.rows(batch.group == index) for index in batch.group.unique()]
        drawn = self._replay.draw(len(groups))
        self._replay.remember(groups, [group.reward.mean().item() for group in groups])
        return _joined([own if other is None else other for own, other in zip(groups, drawn, strict=True)])


def _joined(groups: list[Batch]) -> Batch:
    """One batch, responses padded to the longest, groups numbered anew."""
    longest = max(group.response.shape[1] for group in groups)
    padded = {"response", "mask", "rollout_log_prob"}
    columns = {}
    for field in fields(Batch):
        parts = [getattr(group, field.name) for group in groups]
        if field.name in padded:
            parts = [F.pad(part, (0, longest - part.shape[1])) for part in parts]
        columns[field.name] = torch.cat(parts)
    columns["group"] = torch.cat([torch.full((len(group),), i) for i, group in enumerate(groups)])
    return Batch(**columns)
