"""The environment variables of a CPU run, which have to be set before Ray, vLLM and verl are imported."""

import os
import warnings

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # vLLM: a small KV cache, no pinning of threads (all processes share the cores), nothing compiled
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # no warnings that CUDA kernels, Apex and torchvision are missing: a CPU installation leaves them out
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    # one thread per process: on few cores more threads would only wait for each other
    "OMP_NUM_THREADS": "1",
    # freed memory is kept for the next tensor: mapping new pages would take half the time of a weight update
    "MALLOC_MMAP_THRESHOLD_": "1000000000",  # bytes
    "MALLOC_TRIM_THRESHOLD_": "4000000000",  # bytes
    # oneDNN keeps a product's code for each number of tokens: its 1,024 would take 0.4 GB of a sampler, and save 0.1 ms
    # of a forward pass of a small model
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # no network: models and data are local, and no statistics are sent
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's 15 would leave a run on a busy laptop hardly any processor time
    "RAY_worker_niceness": "0",
    # a package asks torch for CUDA architectures at import, which fails without a GPU
    "TORCH_CUDA_ARCH_LIST": "8.0",
}

_CHOICES_OF_DEVICES = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")


def apply() -> None:
    """Set the variables that the user has not set, and VERL_PLATFORM in any case.

    Variables that choose among a machine's GPUs are removed: Ray counts their entries, and its GPUs are logical here.
    """
    for name in _CHOICES_OF_DEVICES:
        os.environ.pop(name, None)
    if "PYTHONWARNINGS" not in os.environ:
        warnings.simplefilter("ignore")  # Python reads the variable at the start of a process only
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VERL_PLATFORM"] = ENVIRONMENT["VERL_PLATFORM"]
