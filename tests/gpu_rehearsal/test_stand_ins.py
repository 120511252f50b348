"""The stand-ins behave as what they stand for, where other tests rely on it; and all code is this repository's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.kit import ROOT
from tests.kit.fake_cuda import operations
from tests.kit.layout_run import run_processes


def test_the_code_is_this_repositorys() -> None:
    """Whatever project the environment has installed; the plugin too, which verl finds by the installed entry point."""
    code = """
import sys, verl, vcpo, recipe, verl_vcpo.actor.megatron_actor
ours = {name: m for name, m in sys.modules.items() if name.partition(".")[0] in ("vcpo", "verl_vcpo", "recipe")}
print("FILES", *(f"{name}={module.__file__}" for name, module in ours.items() if module.__file__))
"""
    found = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True).stdout
    files = dict(item.split("=") for item in found.rpartition("FILES")[2].split())
    assert {"vcpo", "recipe", "verl_vcpo.plugin", "verl_vcpo.actor.resume"} <= files.keys()
    assert [file for file in files.values() if not Path(file).is_relative_to(ROOT)] == []


def test_a_tensor_is_on_a_gpu() -> None:
    tensor = torch.arange(6.0, device="cuda:1").reshape(2, 3)
    assert tensor.is_cuda and tensor.device.index == 1 and torch.cuda.get_device_capability() == (9, 0)
    assert torch.equal((tensor @ tensor.T).cpu(), tensor.cpu() @ tensor.cpu().T)
    assert torch.cuda.memory_allocated("cuda:1") >= tensor.nbytes


def test_views_share_memory_and_results_do_not() -> None:
    tensor = torch.zeros(4, device="cuda")
    tensor[1:3].add_(1)
    tensor.view(2, 2).t()[0, 1] = 5
    (tensor + 1).mul_(10)
    assert tensor.tolist() == [0, 1, 5, 0]
    out = torch.empty(0, device="cuda")
    torch.add(tensor, 1, out=out)
    assert out.is_cuda and out.tolist() == [1, 2, 6, 1]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_activations_have_their_gradients(dtype: torch.dtype) -> None:
    """Of the operation that the stand-ins compute themselves, against torch's on the CPU."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 8, dtype=dtype), torch.randn(8, dtype=dtype)
    found = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.clone().to(device).requires_grad_() for tensor in (x, weight)]
        y = torch.nn.functional.rms_norm(leaves[0], (8,), leaves[1], 1e-6)
        y.float().square().sum().backward()
        found.append([y.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found[0], found[1], **tolerance)


def test_collectives_of_two_processes(tmp_path: Path) -> None:
    run_processes("collectives", 2, __name__, (), tmp_path)
    assert not list(Path("/dev/shm").glob(f"vcpo-fake-nccl-{os.environ['VCPO_TEST_SESSION']}-*")), "files are left"


def test_who_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCPO_FAKE_NCCL_TIMEOUT_S", "1")
    with pytest.raises(RuntimeError, match="waited too long"):
        run_processes("late", 2, __name__, ("late",), tmp_path, timeout_s=120)


def run(*arguments: object) -> None:
    """One of the two processes: rank and folder are the last two arguments."""
    *late, folder, rank = arguments
    from tests.kit.actor import join_processes

    join_processes(rank, 2, folder)
    if late:
        if rank == 0:
            dist.all_reduce(torch.ones(1, device="cuda"))
            torch.cuda.synchronize()
        return
    big = 3_000_000  # of 4 bytes: more than a piece of the shared file
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = torch.arange(big, device="cuda").remainder(97).to(dtype) + rank
        other = mine + 1 - 2 * rank
        total = mine.clone()
        dist.all_reduce(total)
        assert torch.equal(total, mine + other), dtype
        half = torch.empty(big // 2, device="cuda", dtype=dtype)
        dist.reduce_scatter_tensor(half, mine)
        assert torch.equal(half, (mine + other).chunk(2)[rank]), dtype
        both = torch.empty(2 * big, device="cuda", dtype=dtype)
        dist.all_gather_into_tensor(both, mine)
        assert torch.equal(both.chunk(2)[rank], mine) and torch.equal(both.chunk(2)[1 - rank], other), dtype
    top = mine.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    assert torch.equal(top, torch.maximum(mine, other))
    from_one = mine.clone()
    dist.broadcast(from_one, 1)
    assert torch.equal(from_one, mine if rank else other)
    # both send before they receive, and more than fits
    received, small = torch.empty_like(mine), torch.empty(3, device="cuda")
    messages = [
        dist.P2POp(dist.isend, mine, 1 - rank),
        dist.P2POp(dist.isend, torch.full((3,), float(rank), device="cuda"), 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
        dist.P2POp(dist.irecv, small, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    assert torch.equal(received, other) and small.tolist() == [1.0 - rank] * 3
    dist.barrier()
    dist.destroy_process_group()
