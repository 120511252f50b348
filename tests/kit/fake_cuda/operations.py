"""The redirection of torch's operations to the CPU, and stand-ins for kernels that only CUDA has."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.kit.fake_cuda import flash_attention
from tests.kit.fake_cuda.build import REDIRECT

# The operations that torch's CUDA build does on the stand-in's memory: allocations, views, copies of numbers to the
# host.
_TORCHS = {
    *("empty.memory_format", "empty_strided", "resize_", "_local_scalar_dense", "record_stream"),
    *("as_strided", "as_strided_", "_reshape_alias", "view", "view_as_real", "view_as_complex", "unfold"),
    *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
    *("alias", "detach", "is_pinned", "_pin_memory", "is_set_to", "_has_same_storage_numel", "_fused_sdp_choice"),
}
_kept: list[Any] = []


def redirect() -> ModuleType:
    """Load the module that redirect.cpp makes, once in this process."""
    if not _kept:
        path = Path(os.environ["VCPO_FAKE_CUDA"]) / REDIRECT
        spec = importlib.util.spec_from_file_location("redirect", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _kept.append(module)
    return _kept[0]


def install() -> None:
    """Redirect the operations; called once in a process, after torch is imported."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    redirect().install(sorted(names - _TORCHS | {"copy_"}))
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda left, right, dtype: left.to(dtype) @ right.to(dtype), "CPU")
    library.impl("_fused_rms_norm", _rms_norm, "CPU")
    library.impl("_fused_rms_norm_backward", _rms_norm_backward, "CPU")
    library.impl("_flash_attention_forward", flash_attention.forward, "CPU")
    library.impl("_flash_attention_backward", flash_attention.backward, "CPU")
    sys.modules["vcpo.gradnorm.gram_kernel"] = None  # type: ignore[assignment]  # no GPU runs what Triton compiles
    _kept.append(library)  # a library that is collected takes back its kernels


def without_kernel() -> dict[str, int]:
    """Return the called operations that the CPU has no kernel for, each of which raised an error."""
    return redirect().without_kernel()


def attention_kernels() -> dict[str, int]:
    """Return this process's calls of scaled_dot_product_attention, by the kernel that torch would take on an H100."""
    return {torch.nn.attention.SDPBackend(kind).name: calls for kind, calls in redirect().attention().items()}


def _rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x / rms(x) * weight, 1 / rms(x)), over the last dimensions `shape`."""
    dims = tuple(range(-len(shape), 0))
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    inverse = (wide.square().mean(dims, keepdim=True) + eps).rsqrt()
    normalized = wide * inverse
    return (normalized if weight is None else normalized * weight).to(x.dtype), inverse


def _rms_norm_backward(
    of_output: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    inverse: torch.Tensor,
    weight: torch.Tensor | None,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the weight; empty where not wanted."""
    dims = tuple(range(-len(shape), 0))
    wide, upstream = x.to(inverse.dtype), of_output.to(inverse.dtype)
    normalized = wide * inverse
    of_x = of_weight = torch.empty(0)
    if wanted[0]:
        scaled = upstream if weight is None else upstream * weight
        of_x = (inverse * (scaled - normalized * (scaled * normalized).mean(dims, keepdim=True))).to(x.dtype)
    if wanted[1] and weight is not None:
        of_weight = (upstream * normalized).sum(tuple(range(x.dim() - len(shape)))).to(weight.dtype)
    return of_x, of_weight
