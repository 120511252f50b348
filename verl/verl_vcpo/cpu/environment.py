"""Environment variables of a CPU run. They have to be set before Ray, vLLM and verl are imported."""

import os
import warnings

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # vLLM: a small KV cache, no pinning (all processes share the cores), nothing compiled
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # what is missing here (CUDA kernels, Apex, torchvision) is missing on purpose: no warnings about it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    # one thread per process: on few cores they would only wait for each other
    "OMP_NUM_THREADS": "1",
    # freed memory is kept for the next tensor: new pages are what half a weight update would wait for
    "MALLOC_MMAP_THRESHOLD_": "1000000000",  # bytes
    "MALLOC_TRIM_THRESHOLD_": "4000000000",  # bytes
    # a laptop run talks to nobody
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # some package asks torch for CUDA architectures at import, and fails to find any
    "TORCH_CUDA_ARCH_LIST": "8.0",
}


def apply() -> None:
    """Set what the user has not set. VERL_PLATFORM is ours to decide, whatever it was."""
    if "PYTHONWARNINGS" not in os.environ:
        warnings.simplefilter("ignore")  # this process has read the variable already
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VERL_PLATFORM"] = ENVIRONMENT["VERL_PLATFORM"]
