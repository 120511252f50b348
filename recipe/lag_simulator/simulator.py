"""One run: sample, wait k updates in the queue, train. The lag is exact and the same seed gives the same numbers.

The schedule is the lag-k trainer's (verl/verl_vcpo/trainer/ppo/v1/trainer_lag_k.py): k+1 batches are drawn before step
1 and one after each step, so step s trains on version max(0, s-1-k) of the policy.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch
from omegaconf import DictConfig

from recipe.lag_simulator.batch import Batch, roll_out
from recipe.lag_simulator.optimizer import Optimizer
from recipe.lag_simulator.policy import Policy
from recipe.lag_simulator.replay import TrajectoryBalance
from recipe.lag_simulator.task import Task
from recipe.lag_simulator.update import LossMethod, Update, VCPOMethod
from verl_vcpo.workers.config.vcpo import VCPOSettings

Row = dict[str, float]
"""One step, under the names of metrics.jsonl."""


class Simulator:
    """A run in this process.

    Args:
        config: the real stack's whole configuration; `data.seed` decides prompts and samples.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._lag = int(config["async"].lag)
        self._generator = torch.Generator().manual_seed(config.data.seed)
        self._val_generator = torch.Generator().manual_seed(config.data.seed)  # looking at a run does not change it
        self._task = Task(config.data, config.reward, config.actor_rollout_ref.model.path)
        self.policy = Policy.load(config.actor_rollout_ref.model.path)
        self.method = build_method(config, self.policy)
        self._optimizer = Optimizer(self.policy, config.actor_rollout_ref.actor.optim, config.trainer)

    def run(self, on_step: Callable[[Row], object] = lambda row: None) -> list[Row]:
        """Train until `trainer.total_training_steps`, or until a parameter is not finite; the first row is step 0.

        Args:
            on_step: called with every row, as soon as it is there.
        """
        steps, test_freq = self._config.trainer.total_training_steps, self._config.trainer.test_freq
        rows: list[Row] = [{"step": 0, "val_accuracy": self.accuracy()}]
        on_step(rows[0])
        queue: deque[Batch] = deque()
        prompts = self._prompt_rows()
        for step in range(1, steps + 1):
            while len(queue) <= self._lag and len(queue) <= steps - step:
                queue.append(self.roll_out(next(prompts), version=step - 1))
            row = {"step": step, **self._step(queue.popleft(), version=step - 1)}
            row["finite"] = float(all(p.isfinite().all() for p in self.policy.parameters.values()))
            if not row["finite"]:
                row["val_accuracy"] = 0.0
            elif (test_freq > 0 and step % test_freq == 0) or step == steps:
                row["val_accuracy"] = self.accuracy()
            rows.append(row)
            on_step(row)
            if not row["finite"]:
                break
        return rows

    def accuracy(self) -> float:
        """Share of responses to the held-out problems that solve them: `val_kwargs.n` per problem, drawn or greedy."""
        held_out, settings = self._task.held_out, self._config.actor_rollout_ref.rollout.val_kwargs
        longest = self._config.data.max_response_length
        generator = self._val_generator if settings.do_sample else None
        response, _, _ = self.policy.sample(held_out.tokens, held_out.mask, settings.n, longest, generator)
        return self._task.accuracy(response, held_out.problems)

    def _prompt_rows(self) -> Iterator[list[int]]:
        """The rows of each batch: every epoch in another order, a last incomplete batch left out."""
        size, total = self._config.data.train_batch_size, len(self._task.train)
        while True:
            order = torch.randperm(total, generator=self._generator).tolist()
            for start in range(0, total - size + 1, size):
                yield order[start : start + size]

    def roll_out(self, rows: list[int], version: int) -> Batch:
        """A batch of the training problems `rows`, drawn by the policy as it is, which has `version`."""
        samples, longest = self._config.actor_rollout_ref.rollout.n, self._config.data.max_response_length
        prompts = self._task.train.take(rows)
        return roll_out(self.policy, self._task, prompts, samples, longest, version, self._generator)

    def _step(self, batch: Batch, version: int) -> Row:
        """All optimizer steps of one batch, and one line of metrics: means over its mini-batches."""
        lag = version - int(batch.version.min())
        fields = self.method.prepare(self.policy, batch)
        size = self._config.actor_rollout_ref.actor.ppo_mini_batch_size * self._config.actor_rollout_ref.rollout.n
        updates: list[tuple[Update, float]] = []
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            part = {name: value[rows] for name, value in fields.items()}
            # earlier updates of the same batch have made the rows staler than the batch's lag says
            update = self.method.update(self.policy, batch.rows(rows), part, lag + len(updates))
            updates.append((update, self._optimizer.step(update.gradients, update.lr_multiplier)))
        self._optimizer.advance()

        def mean(values: list[float]) -> float:
            return sum(values) / len(values)

        return {
            "reward": batch.reward.mean().item(),
            "ess_ratio": mean([update.ess_ratio for update, _ in updates]),
            "lr_multiplier": mean([update.lr_multiplier for update, _ in updates]),
            "baseline": mean([update.baseline for update, _ in updates]),
            "grad_norm": mean([norm for _, norm in updates]),
            "kl": mean([update.kl for update, _ in updates]),
            "lag_max": float(lag),
            "response_length": batch.mask.sum(dim=-1).double().mean().item(),
            "tokens": float(batch.prompt_mask.sum() + batch.mask.sum()),
        }


def build_method(config: DictConfig, policy: Policy) -> VCPOMethod | LossMethod | TrajectoryBalance:
    """The method that the configuration asks for; `policy` is the first one."""
    settings = config.actor_rollout_ref.actor
    if config.vcpo.enable:
        vcpo = VCPOSettings.of(config.vcpo)
        return VCPOMethod(vcpo, settings)
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(settings)
    if actor.policy_loss.loss_mode == "tba":
        return TrajectoryBalance(actor.stabilizer["beta"], policy, config.data.seed)
    if config.critic.enable:
        from recipe.lag_simulator.actor_critic import ActorCritic

        return ActorCritic(actor, config, policy)
    return LossMethod(actor, config.algorithm)
