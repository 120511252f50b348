"""Transformer Engine's Python package on a CPU: plain torch stands in for its compiled extension.

The module is for tests only. scripts/install.sh puts the package into a folder of its own, apart from the environment's
packages, because Megatron uses any Transformer Engine that it finds. `install` makes `import transformer_engine` find
the package in this process, and comes before the import of Megatron.

The functions that Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm and FusedAdam call in float32 and bfloat16
have stand-ins. Any other name of the extension exists, so that the package can be imported, and raises when called.
Transformer Engine's own Python runs, not its kernels.
"""

import contextlib
import enum
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = "VCPO_TE_PYTHON"
"""The environment variable that names another folder than .venv/te-python."""


class DType(enum.IntEnum):
    """The extension's enum of number formats."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


_TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: None,
    out_dtype: DType | None,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: None = None,
    comm_type: Any = None,
    extra_output: None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Compute op(b) op(a) of row-major matrices, as cuBLAS does with column-major ones.

    Returns:
        (product, gradient of the bias where `grad`, None, None).
    """
    assert quantizer is None and not gelu and comm_overlap is None and not bulk_overlap and alpha == 1.0
    left, right = b.detach().reshape(-1, b.shape[-1]), a.detach().reshape(-1, a.shape[-1])
    product = (left.T if transpose_b else left) @ (right.T if transpose_a else right)
    of_bias = None
    if bias is not None and bias.numel():
        if grad:
            of_bias = left.sum(0)
        else:
            product = product + bias.detach()
    if not transpose_b:
        product = product.view(*b.shape[:-1], -1)
    if out is None:
        return product.to(a.dtype if out_dtype is None else _TORCH[out_dtype]), of_bias, None, None
    out.add_(product) if accumulate else out.copy_(product)
    return out, of_bias, None, None


def te_general_grouped_gemm(
    a: list[Tensor],
    transpose_a: bool,
    b: list[Tensor],
    transpose_b: bool,
    out: list[Tensor],
    out_dtype: DType,
    splits: list[int],
    bias: list[Tensor],
    bias_dtype: DType,
    single_output: bool,
    gelu_in: list[Tensor],
    grad: bool,
    workspaces: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    """Compute op(b) op(a) of each pair into `out`; with `single_output` all results are rows of one tensor.

    Returns:
        The biases, which are empty.
    """
    assert not any(part.numel() for part in bias), "no stand-in for biases"
    outputs = out[0].split(splits) if single_output else out
    for left, right, into in zip(b, a, outputs, strict=True):
        left, right = left.detach(), right.detach()
        product = (left.T if transpose_b else left) @ (right.T if transpose_a else right)
        into.add_(product) if accumulate else into.copy_(product)
    return bias


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.detach().float() + float(zero_centered)


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: None,
    quantizer: None,
    out_dtype: DType,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, None, Tensor]:
    """Return (output [T, d], None, 1 / root mean square [T])."""
    wide = x.detach().float()
    rsigma = torch.rsqrt(wide.square().mean(1) + eps)
    return (wide * rsigma[:, None] * _gamma(weight, zero_centered)).to(_TORCH[out_dtype]), None, rsigma


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [T, d] and of the weight [d]."""
    normalized, g = x.float() * rsigma[:, None], dy.float() * _gamma(weight, zero_centered)
    dx = rsigma[:, None] * (g - normalized * (g * normalized).mean(1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * normalized).sum(0).to(weight.dtype)


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: None,
    quantizer: None,
    out_dtype: DType,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output [T, d], mean [T], 1 / standard deviation [T])."""
    wide = x.detach().float()
    mean = wide.mean(1)
    rsigma = torch.rsqrt((wide - mean[:, None]).square().mean(1) + eps)
    y = (wide - mean[:, None]) * rsigma[:, None] * _gamma(weight, zero_centered) + bias.detach().float()
    return y.to(_TORCH[out_dtype]), mean, rsigma


def layernorm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x [T, d], of the weight [d] and of the bias [d]."""
    normalized = (x.float() - mean[:, None]) * rsigma[:, None]
    g = dy.float() * _gamma(weight, zero_centered)
    dx = rsigma[:, None] * (g - g.mean(1, keepdim=True) - normalized * (g * normalized).mean(1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * normalized).sum(0).to(weight.dtype), dy.float().sum(0).to(weight.dtype)


def multi_tensor_adam(
    chunk_size: int,
    skip: Tensor,
    lists: list[list[Tensor]],
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take a step of AdamW on lists of gradients, parameters, and first and second moments."""
    assert decoupled and bias_correction and not skip.item()
    for gradient, parameter, first, second in zip(*lists, strict=True):
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (second / (1 - beta2**step)).sqrt_().add_(eps)
        parameter.sub_(first / (1 - beta1**step) / size + weight_decay * parameter, alpha=rate)


_STAND_INS = (
    generic_gemm,
    te_general_grouped_gemm,
    rmsnorm_fwd,
    rmsnorm_bwd,
    layernorm_fwd,
    layernorm_bwd,
    multi_tensor_adam,
)


class _AnyEnum(type):
    """The type of a class in which every member exists: 0, 1, 2, ... in the order of first use."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        value = sum(not known.startswith("__") for known in vars(cls))
        setattr(cls, name, value)
        return value


class _Names(types.ModuleType):
    """A module in which every name exists: names with a capital are enums, other names raise when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} has no stand-in on a CPU")

        value = _AnyEnum(name, (), {}) if name[0].isupper() else missing
        setattr(self, name, value)
        return value


def folder() -> Path:
    """Return the folder of the Python package.

    Raises:
        FileNotFoundError: there is no package; the message says how to install it.
    """
    path = Path(os.environ.get(FOLDER) or Path(sys.prefix) / "te-python")
    if not (path / "transformer_engine").is_dir():
        raise FileNotFoundError(f"{path} has no transformer_engine: run scripts/install.sh, or set {FOLDER}")
    return path


def install() -> None:
    """Make `import transformer_engine.pytorch` work in this process and its forks. Idempotent.

    Raises:
        RuntimeError: there is a GPU; or Megatron is imported already, without Transformer Engine.
    """
    if "transformer_engine_torch" in sys.modules:
        return
    if torch.cuda.is_available():
        raise RuntimeError("tests.kit.te_on_cpu stands in for kernels that this machine's GPU would run")
    if "megatron.core.extensions.transformer_engine" in sys.modules:
        raise RuntimeError(
            "tests.kit.te_on_cpu.install() comes too late: Megatron is imported, without Transformer Engine"
        )
    sys.path.insert(0, str(folder()))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # transformer_engine.common then loads no CUDA library
    extension = _Names("transformer_engine_torch")
    for stand_in in (DType, *_STAND_INS):
        setattr(extension, stand_in.__name__, stand_in)
    extension.get_num_cublas_streams = lambda: 1  # type: ignore[attr-defined]
    sys.modules["transformer_engine_torch"] = extension
    onnx = "transformer_engine.pytorch.onnx_extensions"  # the real module needs one more package
    sys.modules[onnx] = _Names(onnx)
    _import_package()
    _accept_cpu()


def _import_package() -> None:
    """Import transformer_engine without executing its `__init__`, which would load compiled libraries."""
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    package: Any = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    package.common = importlib.import_module("transformer_engine.common")
    package.common.load_framework_extension = lambda framework: None
    package.__version__ = importlib.metadata.version("transformer_engine")
    package.pytorch = importlib.import_module("transformer_engine.pytorch")


def _accept_cpu() -> None:
    """Let modules be built and called with tensors on the CPU."""
    from transformer_engine.pytorch import optimizers, utils
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module import base, grouped_linear, layernorm_linear, linear

    for kernel in ("multi_tensor_l2norm", "multi_tensor_scale"):
        delattr(optimizers, kernel)  # Megatron uses its own where these are missing
    optimizers.FusedSGD = torch.optim.SGD
    gemm.get_cublas_workspace = lambda device, ub, grouped: [torch.empty(1)] if grouped else torch.empty(1)
    gemm.get_sm_count = lambda: 1
    gemm._empty_tensor = utils._empty_tensor = torch.Tensor  # upstream's is on the GPU
    torch.cuda.is_current_stream_capturing = lambda: False
    for module in (base, linear, layernorm_linear, grouped_linear):
        module.get_dummy_wgrad = _dummy_gradient
    layer = base.TransformerEngineBaseModule
    build, prepare = layer.__init__, layer.prepare_forward

    def build_on_cpu(self: Any) -> None:
        with _attribute(torch.cuda, "is_available", lambda: True):
            build(self)

    @contextlib.contextmanager
    def prepare_on_cpu(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        with contextlib.ExitStack() as stack:
            with _attribute(torch.Tensor, "is_cuda", property(lambda tensor: True)):
                ready = stack.enter_context(prepare(self, x, *args, **kwargs))
            yield ready

    layer.__init__, layer.prepare_forward = build_on_cpu, prepare_on_cpu


def _dummy_gradient(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return a layer's result after it has added its gradient to `main_grad`: NaN, so that a use is noticed."""
    return torch.full(shape, 0.0 if zero else torch.nan, dtype=dtype)


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give `owner` an attribute for the block."""
    inherited = name not in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
