"""A2C: a learned value as the baseline, with verl's advantage estimator (GAE) and value loss."""

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_value_loss

from lab.simulator.batch import Batch
from lab.simulator.optimizer import Optimizer
from lab.simulator.policy import HEAD, Policy
from lab.simulator.update import LossMethod, Update, token_rewards


class ActorCritic(LossMethod):
    """verl's policy loss with advantages from a critic, which starts as the policy with a head of zeros.

    Args:
        actor: verl's ActorConfig.
        config: the whole configuration: `algorithm`, `critic` and `trainer` are used.
        policy: the first one.
    """

    def __init__(self, actor: Any, config: DictConfig, policy: Policy) -> None:
        super().__init__(actor, config.algorithm)
        self._settings, self._gae = config.critic, config.algorithm
        head = torch.zeros(1, 1, policy.parameters[HEAD].shape[-1])
        self._critic = Policy(policy.parameters | {HEAD: head}, policy.shape)
        self._critic_optimizer = Optimizer(self._critic, config.critic.optim, config.trainer)
        self._started = False

    def prepare(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        """The critic's values, and verl's advantages and returns."""
        if self._started:
            self._critic_optimizer.advance()
        self._started = True
        with torch.no_grad():
            values = self._values(batch)
        advantages, returns = compute_gae_advantage_return(
            token_rewards(batch), values, batch.mask.float(), self._gae.gamma, self._gae.lam
        )
        return {
            "old_log_probs": batch.rollout_log_prob,
            "response_mask": batch.mask,
            "advantages": advantages,
            "returns": returns,
            "left_out": torch.zeros(len(batch), dtype=torch.bool),
            "values": values,
        }

    def update(self, policy: Policy, batch: Batch, fields: dict[str, Tensor], lag: int) -> Update:
        loss, _ = compute_value_loss(
            vpreds=self._values(batch),
            returns=fields["returns"],
            values=fields["values"],
            response_mask=batch.mask,
            cliprange_value=self._settings.cliprange_value,
            loss_agg_mode=self._settings.loss_agg_mode,
        )
        self._critic_optimizer.step(torch.autograd.grad(loss, self._critic.flat)[0])
        return super().update(policy, batch, fields, lag)

    def _values(self, batch: Batch) -> Tensor:
        """[B, T] before each response token; 0 outside the mask."""
        values = self._critic.outputs(batch.tree)[0, :, 0]  # [M - C]
        return torch.where(batch.mask, values[batch.tree.parent[0]], 0.0)
