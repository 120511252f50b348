"""The trainer's Ray worker: verl's, with the VCPO engine (extends verl/experimental/separation/engine_workers.py)."""

import importlib
import os

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name


class VCPOActorWorker(DetachActorWorker):
    """Builds `VCPOMegatronEngine` (its CPU form on CPU) where verl would build its own Megatron engine."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        on_cpu = get_device_name() == "cpu"
        engine = importlib.import_module(  # importing it registers the engine
            "verl_vcpo.cpu.engine" if on_cpu else "verl_vcpo.workers.engine.megatron.transformer_impl"
        )
        os.environ["VERL_ENGINE_VENDOR"] = engine.ENGINE_VENDOR
        super().init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stage_weights(self, global_steps: int) -> None:
        """Export the weights while the samplers still run, if the checkpoint engine has a place for them."""
        stage = getattr(self.checkpoint_engine, "stage_weights", None)
        if stage is not None:
            weights, _ = self.actor.engine.get_per_tensor_param()
            stage(weights, global_steps)
