"""VCPO in a trainer of one's own: a plain torch loop, which needs `torch` and `vcpo` and nothing else.

    python examples/plain_loop.py

The task is to count on: after the digit 3 the right response is 4 5 6 7. Rollouts wait LAG updates in a queue before
they are trained on, as they do between the samplers and the trainer of an asynchronous run. `train` is the loop; the
calls of vcpo are in `step`.
"""

import argparse
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from vcpo import Estimate, VCPOConfig, estimate
from vcpo.importance import sequence_log_weights

DIGITS, LENGTH, WIDTH = 10, 4, 32
PROMPTS, SAMPLES = 16, 8  # B = 128 sequences in a batch
LEARNING_RATE = 5e-3


class Policy(nn.Module):
    """The next digit, from the prompt, the digit before, and the position."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.before = nn.Embedding(DIGITS, WIDTH), nn.Embedding(DIGITS, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, DIGITS))

    def forward(self, prompt: Tensor, response: Tensor) -> Tensor:
        """[..., T] log-probabilities of the response's digits; `prompt` [...], `response` [..., T]."""
        before = torch.cat([prompt[..., None], response[..., :-1]], dim=-1)  # [..., T]
        x = self.prompt(prompt)[..., None, :] + self.before(before) + self.position.weight
        return self.head(x).log_softmax(dim=-1).gather(-1, response[..., None])[..., 0]

    @torch.no_grad()
    def sample(self, prompt: Tensor) -> Tensor:
        """[B] -> [B, T], drawn at temperature 1."""
        response = torch.zeros(len(prompt), LENGTH, dtype=torch.long)
        for t in range(LENGTH):
            before = prompt if t == 0 else response[:, t - 1]
            x = self.prompt(prompt) + self.before(before) + self.position.weight[t]
            response[:, t] = torch.multinomial(self.head(x).softmax(dim=-1), 1)[:, 0]
        return response


@dataclass(frozen=True)
class Rollouts:
    """B sequences, as a sampler hands them over."""

    prompt: Tensor
    """[B]"""
    response: Tensor
    """[B, T]"""
    log_prob: Tensor
    """[B, T] recorded when the digits were drawn."""
    reward: Tensor
    """[B] share of right digits."""
    group: Tensor
    """[B] equal for the sequences of one prompt."""


def roll_out(policy: Policy) -> Rollouts:
    """SAMPLES responses to each of PROMPTS random prompts."""
    prompt = torch.randint(DIGITS, (PROMPTS,)).repeat_interleave(SAMPLES)
    response = policy.sample(prompt)
    right = (prompt[:, None] + torch.arange(1, LENGTH + 1)) % DIGITS
    with torch.no_grad():
        log_prob = policy(prompt, response)
    group = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    return Rollouts(prompt, response, log_prob, (response == right).double().mean(dim=-1), group)


def score_gradients(policy: Policy, batch: Rollouts) -> tuple[dict[str, Tensor], Tensor]:
    """(g_i by parameter name, each [B, ...]; log-probabilities [B, T]): g_i is the gradient of sequence i's mean.

    A model of billions of parameters cannot keep B gradients: there vcpo.gradnorm has the norms from one backward.
    """

    def score(parameters: dict[str, Tensor], prompt: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        log_prob = functional_call(policy, parameters, (prompt, response))
        return log_prob.mean(), log_prob

    parameters = {name: p.detach() for name, p in policy.named_parameters()}
    every = vmap(grad_and_value(score, has_aux=True), in_dims=(None, 0, 0))
    gradients, (_, log_prob) = every(parameters, batch.prompt, batch.response)
    return gradients, log_prob


def step(config: VCPOConfig, policy: Policy, optimizer: torch.optim.Optimizer, batch: Rollouts) -> Estimate:
    """One optimizer step on a batch, however old."""
    gradients, log_prob = score_gradients(policy, batch)
    update = estimate(
        config,
        sequence_log_weights(log_prob, batch.log_prob, torch.ones_like(log_prob)),
        batch.reward,
        batch.group,
        squared_norm=torch.stack([g.flatten(1).square().sum(dim=1) for g in gradients.values()]).sum(dim=0),
    )
    for name, parameter in policy.named_parameters():
        parameter.grad = -torch.einsum("b,b...->...", update.coefficient.float(), gradients[name])
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * update.step_size_multiplier
    optimizer.step()
    return update


def train(config: VCPOConfig, lag: int, steps: int, seed: int = 0) -> list[float]:
    """The mean reward of the newest rollouts before each step."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    queue: deque[Rollouts] = deque()
    rewards = []
    for number in range(steps):
        while len(queue) <= lag:  # lag + 1 batches before the first step, then one for each step
            queue.append(roll_out(policy))
        rewards.append(queue[-1].reward.mean().item())
        update = step(config, policy, optimizer, queue.popleft())
        if number % 50 == 0:
            print(f"step {number:4}  reward {rewards[-1]:.2f}  ESS ratio {update.ess_ratio:.3f}")
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lag", type=int, default=8, help="updates that rollouts wait (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    arguments = parser.parse_args()
    rewards = train(VCPOConfig(), arguments.lag, arguments.steps)
    print(f"lag {arguments.lag}: reward {rewards[0]:.2f} -> {rewards[-1]:.2f} in {arguments.steps} steps")


if __name__ == "__main__":
    main()
