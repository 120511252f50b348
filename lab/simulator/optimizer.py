"""Megatron's AdamW as verl sets it up."""

import math
from typing import Any

import torch
from torch import Tensor

from lab.simulator.policy import Policy


class Optimizer:
    """AdamW with clipping, linear warm-up from 0, and no decay of vectors.

    Args:
        policy: what is trained; one.
        optim: `actor_rollout_ref.actor.optim`.
        trainer: `trainer`, for the number of steps.
    """

    def __init__(self, policy: Policy, optim: Any, trainer: Any) -> None:
        self._rate, self._clip = optim.lr, optim.clip_grad
        steps, ratio = optim.lr_warmup_steps or 0, optim.lr_warmup_steps_ratio
        if steps <= 0 and ratio:  # as in verl, whose default number of steps is -1
            steps = int(ratio * trainer.total_training_steps)
        self._warm_up = max(0, steps)
        self._done = 0
        self._sizes = [policy.matrix_entries, policy.flat.shape[1] - policy.matrix_entries]
        self._parts = policy.flat.detach()[0].split(self._sizes)  # matrices and vectors, in the policy's memory
        groups = [
            {"params": [part], "weight_decay": decay}
            for part, decay in zip(self._parts, (optim.weight_decay, 0.0), strict=True)
        ]
        options = {"adam_eps": 1e-8} | dict(optim.override_optimizer_config or {})
        self._adam = torch.optim.AdamW(
            groups, lr=optim.lr, betas=tuple(optim.betas), eps=options["adam_eps"], fused=True
        )

    def step(self, gradient: Tensor | None, multiplier: float = 1.0) -> float:
        """One step with the scheduled rate times `multiplier`; the gradient's norm before clipping.

        Args:
            gradient: [1, D] of the loss; None: no step at all, NaN is returned.
            multiplier: of the learning rate.
        """
        if gradient is None:
            return math.nan
        for part, of in zip(self._parts, gradient[0].split(self._sizes), strict=True):
            part.grad = of
        norm = torch.nn.utils.clip_grad_norm_(self._parts, self._clip).item()
        scheduled = self._rate * (min(1.0, self._done / self._warm_up) if self._warm_up else 1.0)
        for group in self._adam.param_groups:
            group["lr"] = scheduled * multiplier
        self._adam.step()
        return norm

    def advance(self) -> None:
        """The scheduler's step: one per batch."""
        self._done += 1
