"""One batch of trajectories, as the trainer receives it."""

from dataclasses import dataclass, fields

import torch
from torch import Generator, Tensor

from recipe.lag_simulator.policy import Policy
from recipe.lag_simulator.task import Task, TokenizedPrompts


@dataclass(frozen=True)
class Batch:
    """B sequences; those of a prompt are adjacent."""

    prompt: Tensor
    """[B, P] padded on the left."""
    prompt_mask: Tensor
    """[B, P] false on padding."""
    response: Tensor
    """[B, T] padded on the right."""
    mask: Tensor
    """[B, T] true up to and with the end token."""
    rollout_log_prob: Tensor
    """[B, T] recorded when the tokens were drawn."""
    reward: Tensor
    """[B] float64."""
    group: Tensor
    """[B] integers, equal for the sequences of one prompt."""
    version: Tensor
    """[B] the policy version that drew the sequence."""

    def __len__(self) -> int:
        return len(self.reward)

    def rows(self, rows: slice | Tensor) -> "Batch":
        """Some of the sequences."""
        return Batch(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def roll_out(
    policy: Policy,
    task: Task,
    prompts: TokenizedPrompts,
    samples: int,
    max_tokens: int,
    version: int,
    generator: Generator,
) -> Batch:
    """Draw `samples` responses per prompt from `policy`, which has `version`, and score them."""
    response, log_prob, mask = policy.sample(prompts.tokens, prompts.mask, samples, max_tokens, generator)
    return Batch(
        prompt=prompts.tokens.repeat_interleave(samples, 0),
        prompt_mask=prompts.mask.repeat_interleave(samples, 0),
        response=response,
        mask=mask,
        rollout_log_prob=log_prob,
        reward=task.score(response, prompts.problems).reward,
        group=torch.arange(len(prompts)).repeat_interleave(samples),
        version=torch.full((len(response),), version),
    )
