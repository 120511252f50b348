"""The simulator's policy is the warm start's model, and its per-sequence norms are autograd's."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from recipe.lag_simulator.norms import block_gradients, squared_norms, weighted_gradient
from recipe.lag_simulator.policy import Policy, Taps
from recipe.lag_simulator.sampling import draw, sample

PAD = 0


@pytest.fixture(scope="module")
def policy(assets: Path) -> Policy:
    return Policy.load(assets / "model")


@pytest.fixture(scope="module")
def prompts() -> tuple[Tensor, Tensor]:
    """([3, 7] tokens padded on the left, [3, 7] mask)"""
    mask = torch.tensor([[False] * gap + [True] * (7 - gap) for gap in (0, 3, 1)])
    tokens = torch.randint(10, 500, (3, 7), generator=torch.Generator().manual_seed(1))
    return tokens.masked_fill(~mask, PAD), mask


def drawn(policy: Policy, prompts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Two responses to each prompt, [6, T] each."""
    tokens, mask = (part[None] for part in prompts)
    generators = [torch.Generator().manual_seed(2)]
    response, log_prob, mask = sample(policy, tokens, mask, samples=2, max_tokens=5, generators=generators)
    return response[0], log_prob[0], mask[0]


def taken(policy: Policy, prompts: tuple[Tensor, Tensor], response: Tensor, taps: Taps | None = None) -> Tensor:
    """[B, T] log-probs of the response; with taps every sequence has its prompt to itself."""
    tokens, mask = (part.repeat_interleave(1 if taps is None else 2, 0)[None] for part in prompts)
    return policy.log_probs(tokens, mask, response[None], taps)[0].gather(2, response[..., None])[..., 0]


def test_it_is_the_transformers_model(assets: Path, policy: Policy, prompts: tuple[Tensor, Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(assets / "model", dtype=torch.float32)
    response, log_prob, mask = drawn(policy, prompts)
    recomputed = taken(policy, prompts, response)
    for row in range(len(response)):
        prompt = prompts[0][row // 2][prompts[1][row // 2]]
        answer = response[row][mask[row]]
        with torch.no_grad():
            logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        torch.testing.assert_close(log_prob[row][mask[row]], expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(recomputed[row][mask[row]], expected, rtol=0, atol=2e-5)


def test_greedy_is_the_most_likely(policy: Policy, prompts: tuple[Tensor, Tensor]) -> None:
    tokens, prompt_mask = (part[None] for part in prompts)
    response, _, mask = sample(policy, tokens, prompt_mask, samples=1, max_tokens=5)
    best = policy.log_probs(tokens, prompt_mask, response).argmax(dim=-1)
    assert torch.equal(response[mask], best[mask])


def test_norms_and_gradients_are_autograds(policy: Policy, prompts: tuple[Tensor, Tensor]) -> None:
    response, _, mask = drawn(policy, prompts)
    taps: Taps = {}
    score = torch.where(mask, taken(policy, prompts, response, taps), 0.0).sum(dim=-1)
    gradients = block_gradients(score, taps)
    norms = squared_norms(gradients)

    again = torch.where(mask, taken(policy, prompts, response), 0.0).sum(dim=-1)
    single = torch.cat([torch.autograd.grad(s, policy.flat, retain_graph=True)[0] for s in again])  # [B, D]
    torch.testing.assert_close(norms, single.double().square().sum(dim=1), rtol=1e-5, atol=0)

    coefficient = torch.linspace(-1, 2, len(score), dtype=torch.float64)
    whole = policy.by_name(weighted_gradient(coefficient, gradients, policy))
    assert set(whole) == set(policy.parameters)
    for name, wanted in policy.by_name((coefficient.float() @ single)[None]).items():
        torch.testing.assert_close(whole[name], wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def test_a_tied_checkpoint_is_refused(assets: Path, tmp_path: Path) -> None:
    config = (assets / "model" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(ValueError, match="untied Qwen2"):
        Policy.load(tmp_path)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    chance = torch.tensor([0.0, 0.5, 0.3, 0.0, 0.2, 0.0])
    numbers = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = draw(chance.log().repeat(20_000, 1), numbers)
    share = tokens.bincount(minlength=len(chance)) / len(tokens)
    torch.testing.assert_close(share, chance, rtol=0, atol=0.015)  # four standard errors
    assert not share[chance == 0].any()
