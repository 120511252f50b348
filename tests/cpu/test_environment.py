"""A CPU run has logical GPUs, whatever chooses among the machine's."""

import os

import pytest
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from ray._private.resource_and_label_spec import ResourceAndLabelSpec

from verl_vcpo.common.machine import adapt_environment
from verl_vcpo.cpu import environment


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ROCR_VISIBLE_DEVICES"])
@pytest.mark.parametrize("value", ["", "-1", "0,1", "NoDevFiles", "GPU-8932f937-d72c"])
def test_ray_starts_with_more_gpus_than_are_visible(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, name: value})
    adapt_environment()
    environment.apply()
    assert name not in os.environ
    ResourceAndLabelSpec(num_gpus=16)._resolve_accelerator_resources(NvidiaGPUAcceleratorManager, 16)
