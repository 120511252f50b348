"""The simulator's policy is the warm start's model, and its per-sequence norms are autograd's."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from recipe.lag_simulator.norms import output_gradients, squared_norms, weighted_gradients
from recipe.lag_simulator.policy import ParameterTap, Policy, draw

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
    return policy.sample(*prompts, samples=2, max_tokens=5, generator=torch.Generator().manual_seed(2))


def taken(
    policy: Policy, prompts: tuple[Tensor, Tensor], response: Tensor, taps: list[ParameterTap] | None = None
) -> Tensor:
    """[B, T] log-probs of the response."""
    tokens, mask = (part.repeat_interleave(2, 0) for part in prompts)
    return policy.log_probs(tokens, mask, response, taps).gather(2, response[..., None])[..., 0]


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
    response, _, mask = policy.sample(*prompts, samples=1, max_tokens=5)
    best = policy.log_probs(*prompts, response).argmax(dim=-1)
    assert torch.equal(response[mask], best[mask])


def test_norms_and_gradients_are_autograds(policy: Policy, prompts: tuple[Tensor, Tensor]) -> None:
    response, _, mask = drawn(policy, prompts)
    taps: list[ParameterTap] = []
    score = torch.where(mask, taken(policy, prompts, response, taps), 0.0).sum(dim=-1)
    gradients = output_gradients(score, taps)
    norms = squared_norms(gradients, taps)

    parameters = list(policy.parameters.values())
    again = torch.where(mask, taken(policy, prompts, response), 0.0).sum(dim=-1)
    single = [torch.autograd.grad(s, parameters, retain_graph=True) for s in again]
    expected = torch.stack([sum(g.double().square().sum() for g in gradient) for gradient in single])
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)

    coefficient = torch.linspace(-1, 2, len(score), dtype=torch.float64)
    whole = weighted_gradients(coefficient, gradients, taps)
    assert set(whole) == set(policy.parameters)
    for i, name in enumerate(policy.parameters):
        wanted = sum(c.float() * gradient[i] for c, gradient in zip(coefficient, single, strict=True))
        torch.testing.assert_close(whole[name], wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def test_a_tied_checkpoint_is_refused(assets: Path, tmp_path: Path) -> None:
    config = (assets / "model" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(ValueError, match="untied Qwen2"):
        Policy.load(tmp_path)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    chance = torch.tensor([0.0, 0.5, 0.3, 0.0, 0.2, 0.0])
    tokens = draw(chance.log().repeat(20_000, 1), torch.Generator().manual_seed(0))
    share = tokens.bincount(minlength=len(chance)) / len(tokens)
    torch.testing.assert_close(share, chance, rtol=0, atol=0.015)  # four standard errors
    assert not share[chance == 0].any()
