"""What receives a sampler's weights, without vLLM (extends verl/checkpoint_engine/base.py).

The receiver hands weights to vLLM's worker through a socket, and calls nothing of vLLM. verl's module for that imports
`verl.third_party.vllm`, of which it needs a number; that module imports vLLM, for seconds of processor time and 200 MB.
"""

import sys
from types import ModuleType
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngineWorker

from verl_vcpo.common.run_folder import in_run_folder

_IMPORTS_VLLM = "verl.third_party.vllm"
SLEEP_LEVEL = 2
"""What verl takes from that module, for every vLLM from 0.18.0 on."""


class LagKCheckpointEngineWorker(CheckpointEngineWorker):
    """verl's receiver, in whose process vLLM is not imported, and whose socket is in the run's folder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stand_in = ModuleType(_IMPORTS_VLLM)
        stand_in.VLLM_SLEEP_LEVEL = SLEEP_LEVEL  # type: ignore[attr-defined]
        sys.modules.setdefault(_IMPORTS_VLLM, stand_in)
        super().__init__(*args, **kwargs)
        self.server_adapter.zmq_handle = in_run_folder(self.server_adapter.zmq_handle)
