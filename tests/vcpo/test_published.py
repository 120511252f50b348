"""`method=vcpo_published` is the authors' update: their formulas, retyped from mit-han-lab/vcpo at c7f030f."""

import pytest
import torch
from torch import Tensor

from vcpo import VCPOConfig, estimate
from vcpo.importance import sequence_log_weights

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""[B, T] log-probs of trainer and sampler, mask; [B] rewards, groups; [B, D] gradients of the sum over tokens."""


def batch(seed: int, drift: float) -> Batch:
    """64 answers to 8 problems, of 4 to 24 tokens."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.double)

    length = torch.randint(4, 25, (64,), generator=draw)
    sampler = -2 * torch.rand(64, 24, generator=draw, dtype=torch.double) - 0.05
    trainer = sampler + drift * normal(64, 24) - drift**2 / 2
    reward = (torch.rand(64, generator=draw) < 0.4).double()
    of_sum = normal(64, 200) * length.double().sqrt()[:, None] * (0.5 * normal(64)).exp()[:, None]
    return trainer, sampler, torch.arange(24) < length[:, None], reward, torch.arange(64) // 8, of_sum


def authors(made: Batch) -> tuple[Tensor, ...]:
    """(update, factor of the learning rate, baselines) by staleness_utils.py and megatron_actor.py:749-930."""
    trainer, sampler, mask, reward, group, of_sum = made
    size, length = len(reward), mask.sum(dim=1)
    w = ((trainer - sampler) * mask).sum(dim=1).exp()
    of_loss = (w.clamp(max=8.0) / (length + 1e-8))[:, None] * of_sum / size
    influence = (of_loss.norm(dim=1) * length * size) ** 2 * w**2
    update, baseline = torch.zeros(of_sum.shape[1], dtype=torch.double), torch.zeros_like(reward)
    for i in (group == prompt for prompt in group.unique()):
        baseline[i] = (influence[i] * reward[i]).sum() / (influence[i].sum() + 1e-8)
        std = reward[i].std(unbiased=False)
        update += ((reward[i] - baseline[i]) / (std if std > 1e-8 else 1.0)) @ of_loss[i]
    rho = w.sum() ** 2 / (w.square().sum() + 1e-8) / size
    return update, rho.clamp(max=1.0).sqrt(), baseline


def ours(made: Batch, **settings: str) -> tuple[Tensor, ...]:
    trainer, sampler, mask, reward, group, of_sum = made
    length = mask.sum(dim=1)
    of_mean, log_weight = of_sum / length[:, None], sequence_log_weights(trainer, sampler, mask)
    norms = {"squared_norm": of_mean.square().sum(dim=1), "length": length}
    step = estimate(VCPOConfig(**settings), log_weight, reward, group, **norms)
    return step.coefficient @ of_mean, torch.tensor(step.step_size_multiplier).double(), step.baseline


@pytest.mark.parametrize("drift", [0.0, 0.02, 0.15, 0.4, 0.8])
def test_a_hundred_batches_have_the_authors_update(drift: float) -> None:
    cosines = []
    for seed in range(20):
        made = batch(seed, drift)
        theirs, published = authors(made), ours(made, opob_weights="published")
        for wanted, got, tolerance in zip(theirs, published, (1e-6, 1e-6, 1e-5), strict=True):  # b: for their 1e-8
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
        cosines.append(torch.cosine_similarity(theirs[0], ours(made)[0], dim=0).item())
    assert 0.7 < min(cosines) < max(cosines) < 1 - 1e-6, "the default is another update"


def test_the_published_weights_need_the_lengths() -> None:
    with pytest.raises(ValueError, match="vcpo.opob_weights=published needs the length of every sequence"):
        estimate(VCPOConfig(opob_weights="published"), *torch.ones(3, 2), squared_norm=torch.ones(2))
