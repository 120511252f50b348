"""A Megatron engine (actor or critic) that goes on from a checkpoint: at the saved step, with the current settings.

The optimizer is Megatron's distributed one, around Transformer Engine's Adam where that is installed, and else around
torch's. Both make their states in the first step, and a checkpoint without states cannot be loaded. Megatron writes one
step count into a checkpoint and loads it into Adam's parameter groups; torch's Adam counts in the state of each
parameter.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.optimizer import DistributedOptimizer, distrib_optimizer
from megatron.core.optimizer import optimizer as any_optimizer
from verl.utils.megatron_utils import get_hf_model_checkpoint_path, load_megatron_model_to_gpu
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from verl_vcpo.actor.model.hugging_face import write_weights
from verl_vcpo.common import model_files

# The entries of an optimizer's group that a checkpoint must not replace: Megatron's scheduler and Adam read them.
_NOT_FROM_CHECKPOINT = ("max_lr", "min_lr", "foreach")


@contextmanager
def _groups_of_any_rate() -> Iterator[None]:
    """Let Megatron pair an optimizer's groups with a checkpoint's whose run had another learning rate."""
    keys = any_optimizer.param_group_identifier_keys
    others = tuple(key for key in keys if key not in _NOT_FROM_CHECKPOINT)
    any_optimizer.param_group_identifier_keys = distrib_optimizer.param_group_identifier_keys = others
    try:
        yield
    finally:
        any_optimizer.param_group_identifier_keys = distrib_optimizer.param_group_identifier_keys = keys


class Resumable(MegatronEngineWithLMHead):
    """Mixin of Megatron engines, before verl's class."""

    def initialize(self) -> None:
        """Build the model; checkpoints have what `write_policy` writes, and the files beside the first model's weights.

        The files are read here, because a run may outlive the first model's folder.
        """
        super().initialize()
        if not self.engine_config.forward_only:
            tokenizer_class = type(self.model_config.tokenizer)
            of_tokenizer = getattr(tokenizer_class, "vocab_files_names", {}).values()
            self.files_beside_weights = model_files.read(self.model_config, of_tokenizer)
            self.checkpoint_mananager._save_hf_config_and_tokenizer = self._write_files_beside_weights
            self.checkpoint_mananager._save_model_as_hf_via_bridge = self.write_policy
            self.checkpoint_mananager._maybe_filter_peft_state_dict = self._trained_alone

    def whole_policy(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return (Hugging Face name, weight) of all weights, adapters merged. Collective; offloaded weights come back.

        `get_per_tensor_param` is what samplers get, which may be the adapters alone.
        """
        load_megatron_model_to_gpu(self.module, load_grad=False)
        return cast(Iterable[tuple[str, torch.Tensor]], self.bridge.export_hf_weights(self.module, show_progress=False))

    def write_policy(self, folder: str | Path) -> None:
        """Write all weights, adapters merged, and the adapter alone in PEFT's format. Collective: rank 0 writes."""
        write_weights(self.whole_policy(), Path(folder))
        if self.peft_cls is not None:
            self.bridge.save_hf_adapter(self.module, Path(folder) / "adapter", self.peft_cls, show_progress=False)

    def _write_files_beside_weights(self, checkpoint: str) -> None:
        if dist.get_rank() == 0:
            model_files.write(self.files_beside_weights, Path(get_hf_model_checkpoint_path(checkpoint)))

    def _trained_alone(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a sharded state without the weights that adapters leave as they are.

        Megatron-Bridge has the same function in a module that imports ModelOpt.
        """
        if self.peft_cls is None:
            return state
        keep = self.peft_cls.adapter_key_filter
        return {
            name: {key: value for key, value in part.items() if keep(key) and "_extra_state" not in key}
            if name.startswith("model")
            else part
            for name, part in state.items()
        }

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save verl's checkpoint, also before the optimizer's first step."""
        self._begin_states()
        super().save_checkpoint(local_path, *args, **kwargs)

    @torch.no_grad()  # of float32 parameters the optimizer loads views, which are leaves of autograd
    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint of this engine, or of verl's; the optimizer and the schedule go on at its step."""
        # The rates follow the schedule of the current settings: verl takes step and schedule from the checkpoint, or
        # starts another warm-up. The rates are in the optimizer's groups, which the checkpoint replaces.
        self.checkpoint_mananager.use_checkpoint_opt_param_scheduler = True
        groups = self.optimizer.param_groups
        rates = [{name: group[name] for name in _NOT_FROM_CHECKPOINT if name in group} for group in groups]
        self._begin_states()
        with _groups_of_any_rate():
            super().load_checkpoint(local_path, *args, **kwargs)
        self._put_steps_into_states()
        for group, of_settings in zip(self.optimizer.param_groups, rates, strict=True):
            group.update(of_settings)
        self.lr_scheduler.step(0)

    def _distributed(self) -> Iterator[DistributedOptimizer]:
        """Yield the distributed optimizers: that of the dense parameters, and that of the experts."""
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if isinstance(optimizer, DistributedOptimizer):
                yield optimizer

    def _begin_states(self) -> None:
        """Give each Adam that has made no step the state that its first step would make, at step 0."""
        for optimizer in self._distributed():
            adam = optimizer.optimizer
            if adam.state or optimizer.init_state_fn is None or optimizer.config.use_precision_aware_optimizer:
                continue  # a precision-aware Adam makes states of its own kinds, while it loads
            optimizer.init_state_fn(adam, optimizer.config)
            if isinstance(adam, torch.optim.Adam):
                for state in adam.state.values():
                    state["step"] = torch.tensor(0.0)

    def _put_steps_into_states(self) -> None:
        for optimizer in self._distributed():
            adam = optimizer.optimizer
            if not isinstance(adam, torch.optim.Adam):
                continue  # Transformer Engine's counts in its groups
            for group in adam.param_groups:
                step = group.pop("step", None)
                if step is None:
                    continue  # the checkpoint's optimizer was not to be loaded
                for parameter in group["params"]:
                    adam.state[parameter]["step"] = torch.tensor(float(step))
