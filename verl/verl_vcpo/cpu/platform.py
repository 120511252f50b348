"""verl's platform "cpu": one logical accelerator, which is the processor itself."""

import contextlib
import types
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform


class _CPUDevice(str):
    """A device name that also works as an index: verl uses the current device as "cpu" and in f"cpu:{index}"."""

    def __format__(self, spec: str) -> str:
        return "0"

    def __index__(self) -> int:
        return 0


CPU_DEVICE = _CPUDevice("cpu")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


class _DeviceModule(types.ModuleType):
    """The functions of torch.cuda that verl calls, for the CPU; functions without a replacement are torch.cpu's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name)


def _device_module() -> types.ModuleType:
    module = _DeviceModule("verl_vcpo.cpu.device")
    members: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), _zero),
        **dict.fromkeys(("empty_cache", "synchronize", "set_device", "ipc_collect"), _nothing),
        **dict.fromkeys(("reset_peak_memory_stats", "manual_seed", "manual_seed_all"), _nothing),
        "mem_get_info": lambda *args, **kwargs: (8 << 30, 16 << 30),
        "is_available": lambda: True,
        # 0, so that verl does not seed Megatron's CUDA generator: `seed_everything` seeds the CPU generators.
        "device_count": _zero,
        "current_device": lambda: CPU_DEVICE,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "get_device_name": lambda *args, **kwargs: "CPU",
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


class PlatformCPU(PlatformBase):
    """The processor as verl's accelerator. Ray counts it as a logical "GPU" (see config/hardware/cpu.yaml)."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = _device_module()

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return CPU_DEVICE

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # verl then moves weights through POSIX shared memory instead of CUDA IPC


def _accept_repeated_gloo() -> None:
    """Have torch take verl's backend "cpu:gloo,<device>:<backend>" where both are "cpu:gloo", which torch refuses."""
    init_process_group = dist.init_process_group

    def init(backend: str | None = None, **kwargs: Any) -> None:
        if backend and backend.count("cpu:") > 1:
            backend = "gloo"
        init_process_group(backend=backend, **kwargs)

    dist.init_process_group = cast(Any, init)  # after the backend it takes keywords only


def install() -> None:
    """Register the platform "cpu" and use it in this process."""
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    set_platform(PlatformCPU())
    _accept_repeated_gloo()
