"""The trainer's Ray workers: verl's, with the engines of this package.

Extends verl/experimental/separation/engine_workers.py (actor) and verl/workers/engine_workers.py (critic).
"""

import importlib
import os
from pathlib import Path

import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from verl_vcpo.actor.model.hugging_face import write_folder
from verl_vcpo.actor.registration import ENGINES_OF
from verl_vcpo.actor.update.sequence_weights import SequenceWeight, Session


class VCPOActorWorker(DetachActorWorker):
    """verl's actor worker with `VCPOMegatronEngine` (on CPU its CPU form) instead of verl's Megatron engine."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        _choose_engines()
        super().init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def layers_for_norms(self) -> tuple[str, str | None, bool]:
        """Return (kind of the actor's layers, why packed norms are impossible or None, True with experts).

        Collective over the trainer: the first call taps the model.
        """
        engine = self.actor.engine
        return engine.packing.tap.layers, engine.packing.unpackable, bool(engine.tf_config.num_moe_experts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sequence_weights(self) -> dict[Session, SequenceWeight]:
        """Return the importance weights of this worker's sequences in the last batch."""
        return self.actor.engine.sequence_weights.of_sessions()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stage_weights(self, global_steps: int) -> None:
        """Export the weights while the samplers still sample, if the checkpoint engine can store weights in advance."""
        stage = getattr(self.checkpoint_engine, "stage_weights", None)
        if stage is not None:
            weights, _ = self.actor.engine.get_per_tensor_param()
            stage(weights, global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hugging_face(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder."""
        engine = self.actor.engine
        with torch.no_grad():
            write_folder(engine.write_policy, engine.files_beside_weights, Path(folder))


class VCPOCriticWorker(TrainingWorker):
    """verl's critic worker (`critic.enable=true`) with `ValueEngine`, on CPU its CPU form."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        _choose_engines()
        super().__init__(config)


def _choose_engines() -> None:
    """Register our engines with verl, by importing the module that has them."""
    engines = importlib.import_module(ENGINES_OF[get_device_name()])
    os.environ["VERL_ENGINE_VENDOR"] = engines.ENGINE_VENDOR
