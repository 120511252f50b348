"""Log-weights against their formula written out."""

import math

import pytest
import torch

from vcpo.importance import sequence_log_weights


def test_log_weights_of_a_long_response_are_sums_in_float64() -> None:
    """In float32 the differences, and their sum, are off by 1e-7 and more each."""
    generator = torch.Generator().manual_seed(0)
    log_prob, rollout = (-3 * torch.rand(1, 2**15, generator=generator) for _ in range(2))
    found = sequence_log_weights(log_prob, rollout, torch.ones(1, 2**15))
    exact = math.fsum(p - q for p, q in zip(log_prob[0].tolist(), rollout[0].tolist(), strict=True))
    assert found.item() == pytest.approx(exact, abs=1e-9)
