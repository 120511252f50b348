"""A receiver of a sampler's weights that does not import vLLM (extends verl/checkpoint_engine/base.py).

The receiver hands weights to vLLM's worker through a socket, and calls nothing of vLLM. verl's receiver imports one
number from `verl.third_party.vllm`, which imports vLLM: seconds of processor time, and 200 MB.
"""

import sys
from functools import partial
from types import ModuleType
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.utils.megatron_peft_utils import build_peft_config_for_vllm

from verl_vcpo.common.run_folder import in_run_folder

_IMPORTS_VLLM = "verl.third_party.vllm"
SLEEP_LEVEL = 2  # the number that verl imports, for every vLLM from 0.18.0 on


class LagKCheckpointEngineWorker(CheckpointEngineWorker):
    """verl's receiver without an import of vLLM, and with its socket in the run's folder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stand_in = ModuleType(_IMPORTS_VLLM)
        stand_in.VLLM_SLEEP_LEVEL = SLEEP_LEVEL  # type: ignore[attr-defined]
        sys.modules.setdefault(_IMPORTS_VLLM, stand_in)
        super().__init__(*args, **kwargs)
        self.server_adapter.zmq_handle = in_run_folder(self.server_adapter.zmq_handle)
        lora = self.model_config.lora
        if lora.get("rank") and not lora.get("merge"):
            adapters = {"peft_config": build_peft_config_for_vllm(lora), "base_sync_done": True}
            self.server_adapter.update_weights = partial(self.server_adapter.update_weights, **adapters)
