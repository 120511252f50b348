"""The kernel of the Gram form on a GPU; tests/vcpo/test_gram_kernel.py has it over Triton's interpreter."""

from unittest.mock import patch

import pytest
import torch

from tests.kit.fake_cuda.__main__ import STAND_INS
from vcpo.gradnorm import Segments

LENGTHS = [40, 3, 0, 165, 20]


def largest_error(device: str, dtype: torch.dtype, lengths: list[int]) -> float:
    """Of the squared norms of all sequences but one, relative; another one's norm stays what it was."""
    from vcpo.gradnorm import gram_kernel

    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(sum(lengths), d, generator=generator).to(device, dtype) for d in (80, 200))
    dy = dy[:, 20:170]  # as a rank's part
    some = tuple(i for i in range(len(lengths)) if i != 1)
    found = torch.ones(2, len(lengths), device=device)
    for norms, largest in zip(found, (gram_kernel._MEMBERS, 0), strict=True):  # pairs add up in one of two ways
        with patch.object(gram_kernel, "_MEMBERS", largest):
            gram_kernel.Tiles(Segments.of_lengths(lengths, device), some).add_norms(x, dy, norms)
    parts = zip(x.double().split(lengths), dy.double().split(lengths), strict=True)
    wanted = 1 + torch.stack([(b.T @ a).square().sum() for a, b in parts])
    wanted[1] = 1
    return float((found.cpu() / wanted.cpu() - 1).abs().max())


@pytest.mark.skipif(STAND_INS, reason="a GPU is needed")
@pytest.mark.parametrize("lengths", [LENGTHS, [700] * 30], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(dtype: torch.dtype, lengths: list[int]) -> None:
    assert largest_error("cuda", dtype, lengths) < 1e-5
