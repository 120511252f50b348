"""Tensor-parallel experts get unequal numbers of rows, and gloo sends equal ones only. The ranks are played."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import mappings
from torch.nn.functional import pad

from verl_vcpo.cpu import megatron_shims

SIZES, LONGEST = [1, 3], 3
ROWS = torch.arange(8.0).view(4, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_of_unequal_sizes_are_gathered_and_scattered(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    parts, group = ROWS.split(SIZES), SimpleNamespace(rank=lambda: rank)
    equal = torch.cat([pad(part, (0, 0, 0, LONGEST - len(part))) for part in parts])

    def gather(sent: torch.Tensor, of_group: Any) -> torch.Tensor:
        assert sent.equal(equal.split(LONGEST)[rank]) and of_group is group
        return equal

    def reduce_scatter(sent: torch.Tensor, of_group: Any) -> torch.Tensor:
        assert sent.equal(equal) and of_group is group
        return 2 * equal.split(LONGEST)[rank]  # both ranks have sent the same

    monkeypatch.setattr(megatron_shims, "_gather", gather)
    monkeypatch.setattr(megatron_shims, "_reduce_scatter", reduce_scatter)
    megatron_shims.install()
    assert mappings._gather_along_first_dim(parts[rank], group, SIZES).equal(ROWS)
    assert mappings._reduce_scatter_along_first_dim(ROWS, group, SIZES).equal(2 * parts[rank])
