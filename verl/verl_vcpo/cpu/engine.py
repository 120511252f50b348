"""The Megatron engines on CPU, the patched actor and verl's critic: the GPU's classes, run inside the shims."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import DistributedOptimizer
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from verl_vcpo.cpu import bridge as bridge  # registers the CPU bridge with mbridge
from verl_vcpo.cpu.megatron_shims import TRANSFORMER_CONFIG, install, megatron_on_cpu, seed_everything
from verl_vcpo.workers.engine.megatron.transformer_impl import ENGINE_VENDOR, VCPOMegatronEngine


def _inside_shims(name: str) -> Any:
    def call(self: "_OnCPU", *args: Any, **kwargs: Any) -> Any:
        with megatron_on_cpu():
            return getattr(super(_OnCPU, self), name)(*args, **kwargs)

    return call


class _OnCPU(MegatronEngineWithLMHead):
    """Mixin that makes a Megatron engine run without a GPU: gloo, fp32, plain-torch layers. The first base class."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if not engine_config.vanilla_mbridge:
            raise ValueError(
                "actor_rollout_ref.actor.megatron.vanilla_mbridge=false needs a GPU: set it to true on CPU"
            )
        install()
        overrides = engine_config.override_transformer_config
        overrides.update({**TRANSFORMER_CONFIG, **overrides})
        with megatron_on_cpu():
            super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
            seed_everything(engine_config.seed)

    initialize = _inside_shims("initialize")
    optimizer_step = _inside_shims("optimizer_step")
    optimizer_zero_grad = _inside_shims("optimizer_zero_grad")
    lr_scheduler_step = _inside_shims("lr_scheduler_step")
    save_checkpoint = _inside_shims("save_checkpoint")

    @torch.no_grad()  # with fp32 parameters the distributed optimizer copies into views of leaf tensors
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        adams = [
            optimizer
            for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer])
            if isinstance(optimizer, DistributedOptimizer)
        ]
        with megatron_on_cpu():
            for adam in adams:
                # Megatron takes the step from Adam's state, which torch creates at the first step only.
                if not adam.optimizer.state:
                    adam._init_optimizer_states_with_dummy_values()
            super().load_checkpoint(*args, **kwargs)
        for adam in adams:  # Megatron loads the step into the parameter groups, where torch's Adam does not look
            for group in adam.optimizer.param_groups:
                step = group.pop("step")
                for parameter in group["params"]:
                    adam.optimizer.state[parameter]["step"] = torch.tensor(float(step))

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        """The weights under their Hugging Face names, gathered lazily."""
        with megatron_on_cpu():
            weights, peft_config = super().get_per_tensor_param(*args, **kwargs)
        return self._lazily_inside_shims(weights), peft_config

    @staticmethod
    def _lazily_inside_shims(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        # Between two items the consumer's code runs, which must not run inside the shims.
        weights = iter(weights)
        while True:
            with megatron_on_cpu():
                item = next(weights, None)
            if item is None:
                return
            yield item


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu", vendor=ENGINE_VENDOR)
class CPUVCPOMegatronEngine(_OnCPU, VCPOMegatronEngine):
    """The patched actor."""


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cpu", vendor=ENGINE_VENDOR)
class CPUValueEngine(_OnCPU, MegatronEngineWithValueHead):
    """verl's critic."""
