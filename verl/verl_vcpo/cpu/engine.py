"""The Megatron engines on CPU, the patched actor and verl's critic: the GPU's classes, run inside the shims."""

from typing import Any

from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from verl_vcpo.actor.megatron_actor import ENGINE_VENDOR, ValueEngine, VCPOMegatronEngine
from verl_vcpo.cpu.megatron_shims import TRANSFORMER_CONFIG, install, megatron_on_cpu, seed_everything

DEVICE_REASONS = {
    "_OnCPU.__init__": "layers without CUDA kernels; Megatron's random streams would be CUDA's",
    "_OnCPU.initialize": 'Megatron builds the model and its optimizer with device="cuda", and asserts CUDA tensors',
    "_OnCPU.optimizer_step": 'Megatron sums the gradient norm in a tensor with device="cuda", and asserts CUDA tensors',
}
"""The reason why the device needs a method, by `Class.attribute`; other code belongs to the overridden class."""


class _OnCPU(MegatronEngineWithLMHead):
    """Mixin that makes a Megatron engine run without a GPU: gloo, fp32, plain-torch layers. The first base class."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        install()
        overrides = engine_config.override_transformer_config
        overrides.update({**TRANSFORMER_CONFIG, **overrides})
        with megatron_on_cpu():
            super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
            seed_everything(engine_config.seed)

    def initialize(self) -> None:
        with megatron_on_cpu():
            super().initialize()

    def optimizer_step(self) -> Any:
        with megatron_on_cpu():
            return super().optimizer_step()


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu", vendor=ENGINE_VENDOR)
class CPUVCPOMegatronEngine(_OnCPU, VCPOMegatronEngine):
    """The patched actor."""


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cpu", vendor=ENGINE_VENDOR)
class CPUValueEngine(_OnCPU, ValueEngine):
    """verl's critic."""
