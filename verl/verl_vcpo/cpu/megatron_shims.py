"""Stand-ins for Megatron-Core's hard-coded CUDA calls, which go to the CPU.

In order of preference: configuration flags (no patching); process-wide stubs for calls that take no device; a
`TorchFunctionMode` for the literals `device="cuda"`, entered around initialisation and optimizer steps. The mode adds
work to every torch call, so it is not entered in forward and backward passes: the literals there, in the pipeline
schedules and in rotary embeddings, are redirected by replacing the name `torch` in those modules.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

# Settings of TransformerConfig without which Megatron would build or compile CUDA kernels, or use a CUDA generator.
TRANSFORMER_CONFIG: dict[str, Any] = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "batch_p2p_sync": False,
    "deallocate_pipeline_outputs": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_token_dispatcher_type": "alltoall",  # "allgather" refuses variable sequence lengths, even for dense models
}


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CUDALiteralsMeanCPU(TorchFunctionMode):
    """A mode in which device="cuda" means "cpu", and `Tensor.type()` says "torch.cuda.*", as Megatron asserts."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run Megatron code of the block on the CPU. The mode is per thread, so every engine method enters a block."""
    with _CUDALiteralsMeanCPU():
        yield


class _TorchOnCPU:
    """The module torch, except that `zeros(..., device="cuda")` is on the CPU and `tensor` pins no memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, device=CPU if _is_cuda(device) else device, **kwargs)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)


def _stay(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _splits_on_cpu(
    self: MoEAlltoAllTokenDispatcher, point: str, tokens_per_expert: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Turn splits into numbers: `_maybe_dtoh_and_synchronize` without its copy from a device."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits"):
            splits = getattr(self, name)
            if isinstance(splits, torch.Tensor):
                setattr(self, name, splits.tolist())
    return tokens_per_expert


_gather, _reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


def _lengthened(rows: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def _gather_uneven(
    input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """Gather parts of unequal sizes: `_gather_along_first_dim` for gloo, which gathers equal sizes only."""
    if output_split_sizes is None:
        return _gather(input_, group, None, use_global_buffer)
    longest = max(output_split_sizes)
    parts = _gather(_lengthened(input_, longest), group).split(longest)
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])


def _reduce_scatter_uneven(
    input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """Scatter parts of unequal sizes: `_reduce_scatter_along_first_dim` for gloo, which scatters equal sizes only."""
    if input_split_sizes is None:
        return _reduce_scatter(input_, group, None, use_global_buffer)
    longest = max(input_split_sizes)
    parts = [_lengthened(part, longest) for part in input_.split(input_split_sizes)]
    return _reduce_scatter(torch.cat(parts), group)[: input_split_sizes[group.rank()]]


def _no_synchronize(*args: Any, **kwargs: Any) -> None:
    return None


class _NoStream:
    """A CUDA stream of a CPU, which does one thing after the other."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""


def install() -> None:
    """Install process-wide stubs for the CUDA calls that a function mode does not see. Idempotent.

    Raises:
        RuntimeError: the machine has a GPU, and the stubs would break CUDA calls.
    """
    if torch.cuda.is_available():
        raise RuntimeError("VERL_PLATFORM=cpu on a machine with a GPU: unset it, or run with hardware=gpu")
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = _no_synchronize
    torch.cuda.Stream = torch.cuda.current_stream = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]
    torch.Tensor.cuda = torch.Tensor.pin_memory = _stay  # type: ignore[assignment,method-assign]
    schedules.torch = rope_utils.torch = _TorchOnCPU()
    moe_utils.te_general_gemm = None  # upstream leaves it undefined without Transformer Engine
    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = _gather_uneven, _reduce_scatter_uneven
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()  # unused; for None Megatron would create a CUDA stream
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_on_cpu
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


class _CPURNGStatesTracker(megatron_random.CudaRNGStatesTracker):
    """Megatron's named random streams over torch's CPU generator."""

    def add(self, name: str, seed: int) -> None:
        self._is_initialized = True
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"random stream {name!r} or seed {seed} already exists")
        self.seeds_.add(seed)
        outer = torch.get_rng_state()
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outer)

    @contextlib.contextmanager
    def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's random streams, which are CUDA's without `_CPURNGStatesTracker`."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    megatron_random._CUDA_RNG_STATE_TRACKER = _CPURNGStatesTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
