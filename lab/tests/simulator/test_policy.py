"""The simulator's policy is the warm start's model, and its per-sequence norms are autograd's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lab.simulator.batch import Batch
from lab.simulator.norms import block_gradients, squared_norms, weighted_gradient
from lab.simulator.policy import Policy, Taps
from lab.simulator.sampling import draw, sample
from lab.simulator.task import Problem, TokenizedPrompts
from lab.simulator.tree import TokenTree
from lab.simulator.update import sampled_log_probs

PAD = 0


@pytest.fixture(scope="module")
def policy(assets: Path) -> Policy:
    return Policy.load(assets / "model")


@pytest.fixture(scope="module")
def prompts() -> TokenizedPrompts:
    """Three of up to 7 tokens; the first two begin with the same."""
    mask = torch.tensor([[False] * gap + [True] * (7 - gap) for gap in (0, 3, 1)])
    tokens = torch.randint(10, 500, (3, 7), generator=torch.Generator().manual_seed(1))
    tokens[1, 3:5] = tokens[0, :2]
    return TokenizedPrompts(tokens.masked_fill(~mask, PAD), mask, [Problem("", None, {})] * 3)


def drawn(policy: Policy, prompts: TokenizedPrompts, samples: int = 3) -> Batch:
    """Responses to each prompt, up to 5 tokens each; the first two of each prompt begin with the same."""
    response, log_prob, mask = sample(policy, prompts, samples, 5, torch.Generator().manual_seed(2))
    reward = torch.zeros(len(response), dtype=torch.float64)
    group = torch.arange(len(prompts)).repeat_interleave(samples)
    tokens, prompt_mask = (of.repeat_interleave(samples, 0) for of in (prompts.tokens, prompts.mask))
    return Batch(tokens, prompt_mask, response, mask, log_prob, reward, group, torch.zeros_like(group), group < 0)


def branching(batch: Batch) -> Batch:
    """Every second response of a group begins as the one before it, every third is the first one again."""
    response, mask = batch.response.clone(), batch.mask.clone()
    response[1::3, :3], mask[1::3, :3] = response[::3, :3], True
    response[2::3], mask[2::3] = response[::3], mask[::3]
    return replace(batch, response=response, mask=mask)


def transformers_log_probs(model: Any, batch: Batch, row: int) -> Tensor:
    """[tokens] of one response, which is computed by itself."""
    prompt, answer = batch.prompt[row][batch.prompt_mask[row]], batch.response[row][batch.mask[row]]
    with torch.no_grad():
        logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]


def test_it_is_the_transformers_model(assets: Path, policy: Policy, prompts: TokenizedPrompts) -> None:
    """Token by token when responses are drawn, and as trees when they are read; no matter what they share."""
    model = AutoModelForCausalLM.from_pretrained(assets / "model", dtype=torch.float32)
    batch = drawn(policy, prompts)
    for row in range(len(batch)):
        expected = transformers_log_probs(model, batch, row)
        torch.testing.assert_close(batch.rollout_log_prob[row][batch.mask[row]], expected, rtol=0, atol=2e-5)
    batch = branching(batch)
    recomputed = sampled_log_probs(policy, batch)
    for row in range(len(batch)):
        expected = transformers_log_probs(model, batch, row)
        torch.testing.assert_close(recomputed[row][batch.mask[row]], expected, rtol=0, atol=2e-5)


def test_greedy_is_the_most_likely(policy: Policy, prompts: TokenizedPrompts) -> None:
    response, _, mask = sample(policy, prompts, 1, 5)
    tree = TokenTree.of(prompts.tokens, prompts.mask, response, mask)
    best = policy.outputs(tree).argmax(dim=-1)[0][tree.parent[0]]
    assert torch.equal(response[mask], best[mask])


def test_norms_and_gradients_are_autograds(policy: Policy, prompts: TokenizedPrompts) -> None:
    batch = branching(drawn(policy, prompts))
    taps = Taps(batch.separate)
    log_prob = sampled_log_probs(policy, batch, taps)
    gradients = block_gradients(torch.where(batch.mask, log_prob, 0.0).sum(dim=-1), taps)
    norms = squared_norms(gradients)

    again = torch.where(batch.mask, sampled_log_probs(policy, batch), 0.0).sum(dim=-1)
    single = torch.cat([torch.autograd.grad(s, policy.flat, retain_graph=True)[0] for s in again])  # [B, D]
    torch.testing.assert_close(norms, single.double().square().sum(dim=1), rtol=1e-5, atol=0)

    coefficient = torch.linspace(-1, 2, len(batch), dtype=torch.float64)
    whole = policy.by_name(weighted_gradient(coefficient, gradients, policy))
    assert set(whole) == set(policy.parameters)
    for name, wanted in policy.by_name((coefficient.float() @ single)[None]).items():
        torch.testing.assert_close(whole[name], wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def test_a_tied_checkpoint_is_refused(assets: Path, tmp_path: Path) -> None:
    config = (assets / "model" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(ValueError, match="untied Qwen2"):
        Policy.load(tmp_path)


@pytest.mark.parametrize("size", [6, 32, 70])
def test_tokens_are_drawn_as_often_as_they_are_likely(size: int) -> None:
    """Of vocabularies of less than a block, one, and several; two distributions, one the reverse of the other."""
    chance = torch.zeros(size)
    chance[[1, 2, size - 2]] = torch.tensor([0.5, 0.3, 0.2])
    both = torch.stack([chance, chance.flip(0)])
    numbers = torch.rand(1, 40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    row = torch.arange(40_000)[None] % 2
    tokens = draw(both.log()[None], row, numbers)
    for number, wanted in enumerate(both):
        share = tokens[row == number].bincount(minlength=size) / 20_000
        torch.testing.assert_close(share, wanted, rtol=0, atol=0.015)  # four standard errors
        assert not share[wanted == 0].any()
