"""The stand-ins refuse what they cannot do, and all code is this repository's. That they compute right, others see."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kit import ROOT
from tests.kit.fake_cuda import operations


def test_the_code_is_this_repositorys() -> None:
    """Whatever project the environment has installed; the plugin too, which verl finds by the installed entry point."""
    code = """
import sys, verl, vcpo, recipe, verl_vcpo.actor.megatron_actor
ours = {name: m for name, m in sys.modules.items() if m and name.partition(".")[0] in ("vcpo", "verl_vcpo", "recipe")}
print("FILES", *(f"{name}={module.__file__}" for name, module in ours.items() if module.__file__))
"""
    found = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True).stdout
    files = dict(item.split("=") for item in found.rpartition("FILES")[2].split())
    assert {"vcpo", "recipe", "verl_vcpo.plugin", "verl_vcpo.actor.resume"} <= files.keys()
    assert [file for file in files.values() if not Path(file).is_relative_to(ROOT)] == []


def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") + torch.ones(2)
    assert (torch.ones(2, device="cuda") + torch.tensor(1.0)).tolist() == [2, 2], "a number is taken, as by CUDA"


def test_a_kernel_is_refused() -> None:
    """What is left to CUDA fails, instead of leaving what was in the memory before."""
    with pytest.raises(RuntimeError, match="a kernel was launched"):
        torch.cuda._sleep(1000)


def test_what_the_cpu_has_no_kernel_for_is_refused() -> None:
    query = torch.zeros(1, 1, 8, 16, device="cuda", dtype=torch.bfloat16)
    before = operations.without_kernel()
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_cudnn_attention"):
        torch.ops.aten._scaled_dot_product_cudnn_attention(query, query, query, None, False)
    found = {name: n - before.get(name, 0) for name, n in operations.without_kernel().items()}
    assert found["aten::_scaled_dot_product_cudnn_attention"] == 1
