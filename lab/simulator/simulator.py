"""A run: sample, wait k updates in the queue, train. The lag is exact and a seed decides the numbers.

The schedule is the lag-k trainer's (verl/verl_vcpo/loop/trainer.py): k+1 batches are drawn before step
1 and one after each step, so step s trains on version max(0, s-1-k) of the policy.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch
from omegaconf import DictConfig
from torch import Tensor

from lab.simulator.analysis import LAST, LAST_SAMPLES
from lab.simulator.batch import Batch, roll_out
from lab.simulator.memory import keep_freed_memory
from lab.simulator.optimizer import Optimizer
from lab.simulator.policy import Policy
from lab.simulator.sampling import sample
from lab.simulator.task import Task
from lab.simulator.update import LossMethod, Update, VCPOMethod
from recipe.fully_async_policy.settings.own_code import reward_of
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.common.truncated import Truncated, soft_length_penalty
from verl_vcpo.dataset.shares import InShares
from verl_vcpo.report.run_log import mean_accuracy
from verl_vcpo.report.trajectory_metrics import of_truncated

Row = dict[str, float]
"""One step, under the names of metrics.jsonl."""


class Simulator:
    """One run.

    Args:
        config: the real stack's whole configuration; `data.seed` decides prompts and samples.

    Raises:
        ValueError: rows, reward or model cannot be used.
    """

    def __init__(self, config: DictConfig) -> None:
        keep_freed_memory()
        self._config = config
        self._lag, self._steps = int(config["async"].lag), int(config.trainer.total_training_steps)
        self.task = Task(config.data, reward_of(config), config.actor_rollout_ref.model.path)
        self.policy = Policy.load(config.actor_rollout_ref.model.path)
        self.generator = torch.Generator().manual_seed(config.data.seed)
        self._val_generator = torch.Generator().manual_seed(config.data.seed)  # looking at a run does not change it
        self._method_draws = torch.Generator().manual_seed(config.data.seed).get_state()
        self.method = build_method(config)
        self._optimizer = Optimizer(self.policy, config.actor_rollout_ref.actor.optim, config.trainer)
        self._prompt_rows = self._epochs()
        self.queue: deque[Batch] = deque()
        self.rows: list[Row] = []

    def run(self, on_step: Callable[[Row], object] = lambda row: None) -> list[Row]:
        """Train until `trainer.total_training_steps`, or until a parameter is not finite.

        Args:
            on_step: called with every row, as soon as it is there.

        Returns:
            The rows, the first of step 0.
        """
        self.rows = [{"step": 0, **self._evaluated()}]
        on_step(self.rows[0])
        for step in range(1, self._steps + 1):
            while len(self.queue) <= self._lag and len(self.queue) <= self._steps - step:
                self.roll_out(version=step - 1)
            self.rows.append(self._train(step))
            on_step(self.rows[-1])
            if not self.rows[-1]["finite"]:
                break
        return self.rows

    def roll_out(self, version: int) -> None:
        """A batch for the queue, drawn by the policy as it is, which has `version`."""
        prompts, rollout = self.task.train.take(self.next_prompts()), self._config.actor_rollout_ref.rollout
        longest = self._config.data.max_response_length
        batch = roll_out(self.policy, self.task, prompts, rollout.n, longest, version, self.generator)
        settings = self._config["async"]
        if settings.truncated == Truncated.PENALTY:
            penalty = longest, settings.overlong_buffer_len, settings.overlong_penalty_factor
            for row, length in enumerate(batch.mask.sum(dim=1).tolist()):
                batch.reward[row] += soft_length_penalty(length, *penalty)
        self.queue.append(batch)

    def accuracies(self) -> dict[str, float]:
        """Share of responses to each data source's held-out problems that solve them: `val_kwargs.n` per problem."""
        settings = self._config.actor_rollout_ref.rollout.val_kwargs
        return self._accuracies(settings.n, self._val_generator if settings.do_sample else None)

    def _evaluated(self) -> Row:
        """The accuracy; of several data sources their mean, and each under verl's name."""
        each, n = self.accuracies(), self._config.actor_rollout_ref.rollout.val_kwargs.n
        of_each = {f"val-core/{source}/acc/mean@{n}": value for source, value in each.items()} if len(each) > 1 else {}
        return {"val_accuracy": mean_accuracy(each), **of_each}

    def _accuracies(self, samples: int, generator: torch.Generator | None) -> dict[str, float]:
        return self.task.accuracies(self._held_out(samples, generator)[0], self.task.held_out.problems)

    def _held_out(self, samples: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """[N samples] accuracies and [tokens] log-probs of `samples` responses per held-out problem.

        Without a generator they are the most likely ones.
        """
        held_out, longest = self.task.held_out, self._config.data.max_response_length
        response, log_prob, mask = sample(self.policy, held_out, samples, longest, generator)
        return self.task.score(response, held_out.problems).accuracy, log_prob[mask]

    def last(self) -> Row:
        """Measure what `LAST` names of the policy as it is: drawn, greedy, one of 8 right, and nats per token."""
        drawn = torch.Generator().manual_seed(self._config.data.seed)
        accuracy, log_prob = self._held_out(LAST_SAMPLES, drawn)
        solved = accuracy.unflatten(0, (-1, LAST_SAMPLES)).amax(dim=1).mean().item()
        each = self.task.accuracies(accuracy, self.task.held_out.problems), self._accuracies(1, None)
        return dict(zip(LAST, (*map(mean_accuracy, each), solved, -log_prob.mean().item()), strict=True))

    def next_prompts(self) -> list[int]:
        """The training problems of the next batch."""
        return next(self._prompt_rows)

    def _train(self, step: int) -> Row:
        """Step `step`, on the oldest batch of the queue; the evaluation after it where there is one."""
        row: Row = {"step": step, **self._step(self.queue.popleft(), version=step - 1)}
        row["finite"] = float(self.policy.flat.isfinite().all())
        test_freq = self._config.trainer.test_freq
        if not row["finite"]:
            row |= {name: 0.0 for name in self.rows[0] if name != "step"}
        elif (test_freq > 0 and step % test_freq == 0) or step == self._steps:
            row |= self._evaluated()
        if step == self._steps or not row["finite"]:
            row |= self.last() if row["finite"] else dict.fromkeys(LAST, 0.0)
        return row

    def _epochs(self) -> Iterator[list[int]]:
        """The rows of each batch: every epoch in another order, a last incomplete batch left out; or `data.shares`."""
        data, total = self._config.data, len(self.task.train)
        size = data.train_batch_size
        if data.shares:
            mixed = InShares(self.task.train.of_files, data.shares, data.seed)
            while True:
                yield [mixed.next_row() for _ in range(size)]
        while True:
            order = torch.randperm(total, generator=self.generator).tolist()
            for start in range(0, total - size + 1, size):
                yield order[start : start + size]

    def _step(self, batch: Batch, version: int) -> Row:
        """All optimizer steps of one batch, and one line of metrics: means over its mini-batches."""
        lag = version - int(batch.version.min())
        torch.set_rng_state(self._method_draws)  # some methods leave tokens out at random
        fields = self.method.prepare(self.policy, batch)
        size = self._config.actor_rollout_ref.actor.ppo_mini_batch_size * self._config.actor_rollout_ref.rollout.n
        updates: list[tuple[Update, float]] = []
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            part = {name: value[rows] for name, value in fields.items()}
            # earlier updates of the same batch have made the rows staler than the batch's lag says
            update = self.method.update(self.policy, batch.rows(rows), part, lag + len(updates))
            updates.append((update, self._optimizer.step(update.gradient, update.lr_multiplier)))
        self._optimizer.advance()
        self._method_draws = torch.get_rng_state()

        def mean(values: list[float]) -> float:
            return sum(values) / len(values)

        parts = [(update.parts, update.ess_ratio) for update, _ in updates if update.parts]
        split = [update.of_truncated for update, _ in updates]
        of_lag = {"actor/vcpo/ess/lag": mean([max(ratio, part.lag) for part, ratio in parts])} if parts else {}
        return {
            **of_lag,
            "reward": batch.reward.mean().item(),
            "ess_ratio": mean([update.ess_ratio for update, _ in updates]),
            "lr_multiplier": mean([update.lr_multiplier for update, _ in updates]),
            "baseline": mean([update.baseline for update, _ in updates]),
            "log_weight_std": mean([update.log_weight.std(correction=0).item() for update, _ in updates]),
            "log_weight_max": max(update.log_weight.max().item() for update, _ in updates),
            "largest_share": max(update.log_weight.softmax(dim=0).max().item() for update, _ in updates),
            "grad_norm": mean([norm for _, norm in updates]),
            "kl": mean([update.kl for update, _ in updates]),
            "lag_max": float(lag),
            "response_length": batch.mask.sum(dim=-1).double().mean().item(),
            "tokens": float(batch.prompt_mask.sum() + batch.mask.sum()),
            **of_truncated(batch.truncated.tolist(), batch.reward.tolist()),
            **{
                f"actor/{name}": mean([found[name] for found in split if name in found])
                for name in dict.fromkeys(name for found in split for name in found)
            },
        }


def build_method(config: DictConfig) -> VCPOMethod | LossMethod:
    """The method that the configuration asks for."""
    settings, treatment = config.actor_rollout_ref.actor, Truncated(config["async"].truncated)
    if config.vcpo.enable:
        vcpo = VCPOSettings.of(config.vcpo)
        return VCPOMethod(vcpo, settings, treatment)
    from verl.utils.config import omega_conf_to_dataclass

    return LossMethod(omega_conf_to_dataclass(settings), config.algorithm, treatment)
