"""One batch of trajectories, as the trainer receives it."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from lab.simulator.policy import Policy
from lab.simulator.sampling import sample
from lab.simulator.task import Task, TokenizedPrompts
from lab.simulator.tree import TokenTree
from vcpo.baseline import group_sum
from verl_vcpo.common.truncated import Truncated


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
    truncated: Tensor
    """[B] true where the longest response's length ended the sequence, not the end token."""

    def __len__(self) -> int:
        return len(self.reward)

    @cached_property
    def tree(self) -> TokenTree:
        """The sequences, common beginnings once."""
        _, counts = self.prompt.unique_consecutive(dim=0, return_counts=True)
        samples = int(counts[0]) if (counts == counts[0]).all() else 1
        return TokenTree.of(self.prompt[::samples], self.prompt_mask[::samples], self.response, self.mask)

    @cached_property
    def separate(self) -> TokenTree:
        """The sequences, nothing shared between them: each has a gradient of its own."""
        return TokenTree.of(self.prompt, self.prompt_mask, self.response, self.mask, shared=False)

    @cached_property
    def distinct(self) -> tuple[Tensor, Tensor]:
        """[D] one row of each of the D distinct sequences, and [B] which of them a row is."""
        known: dict[tuple[int, ...], int] = {}
        first, which = list[int](), list[int]()
        lengths = self.mask.sum(dim=1).tolist()
        for row, (prompt, response, length) in enumerate(
            zip(self.prompt.tolist(), self.response.tolist(), lengths, strict=True)
        ):
            number = known.setdefault((*prompt, *response[:length]), len(first))
            which.append(number)
            if number == len(first):
                first.append(row)
        return torch.tensor(first), torch.tensor(which)

    def left_out(self, treatment: Truncated) -> tuple[Tensor, list[str]]:
        """[B] true where `treatment` leaves a sequence out of the loss, and the group that it is compared within.

        As `verl_vcpo.loop.prompts.dropped` has it for verl's estimators: a dropped one is a group of its own, and so is
        one that is left alone.
        """
        gone = self.truncated & treatment.leaves_out
        if treatment is not Truncated.DROP:
            return gone, list(map(str, self.group.tolist()))
        group = self.group.unique(return_inverse=True)[1]
        left, all_of_it = group_sum((~gone).double(), group), group_sum(torch.ones_like(self.reward), group)
        gone |= (left == 1) & (all_of_it > 1)
        return gone, [f"row {i}" if out else str(g) for i, (g, out) in enumerate(zip(group, gone, strict=True))]

    def rows(self, rows: slice | Tensor) -> "Batch":
        """Some of the sequences."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        some: dict[str, Any] = {name: value if value is None else value[rows] for name, value in values.items()}
        return Batch(**some)


def roll_out(
    policy: Policy,
    task: Task,
    prompts: TokenizedPrompts,
    samples: int,
    max_tokens: int,
    version: int,
    generator: Generator,
) -> Batch:
    """Draw `samples` responses per prompt from the policy, which is `version`, and score them."""
    response, log_prob, mask = sample(policy, prompts, samples, max_tokens, generator)
    length = mask.sum(dim=1, keepdim=True)
    return Batch(
        prompt=prompts.tokens.repeat_interleave(samples, 0),
        prompt_mask=prompts.mask.repeat_interleave(samples, 0),
        response=response,
        mask=mask,
        rollout_log_prob=log_prob,
        reward=task.score(response, prompts.problems).reward,
        group=torch.arange(len(prompts)).repeat_interleave(samples),
        version=torch.full((len(response),), version),
        truncated=((length == max_tokens) & (response.gather(1, length - 1) != policy.shape.end_token))[:, 0],
    )
