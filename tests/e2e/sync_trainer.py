"""verl's own synchronous trainer with our actor: `python -m tests.e2e.sync_trainer setting=value ...`, as main.py."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipe.fully_async_policy import main
from recipe.fully_async_policy.launch.session import ray_session
from tests.e2e.conftest import prepared

SYNC = ["trainer.v1.trainer_mode=sync_vcpo", "actor_rollout_ref.hybrid_engine=true"]
NAIVE = ["actor_rollout_ref.rollout.checkpoint_engine.backend=naive"]  # trainer and sampler share their device


def register_trainer_mode() -> None:
    """The trainer mode "sync_vcpo": verl's "sync" with the worker that builds our engine."""
    import ray
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.trainer.ppo.v1.trainer_base import register_trainer
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from verl_vcpo.actor.engine_workers import VCPOActorWorker
    from verl_vcpo.common.run_folder import in_run_folder

    class SyncActorWorker(VCPOActorWorker):
        """Sends weights by verl's own adapter, over the socket where our samplers look for it."""

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def init_model(self) -> None:
            super().init_model()
            self.rollout.zmq_handle = in_run_folder(self.rollout.zmq_handle)

    @register_trainer(SYNC[0].split("=")[1])
    class SyncTrainer(PPOTrainerSync):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.trainer_mode = "sync"  # what verl asks for

        def _init_resource_pool_mgr(self) -> None:
            super()._init_resource_pool_mgr()
            for role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(SyncActorWorker)

        def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            super()._compute_metrics(batch, metrics, *args, **kwargs)
            numbers = {name: float(value) for name, value in metrics.items() if hasattr(value, "__float__")}
            with open(Path(self.config.run_dir) / "metrics.jsonl", "a") as f:
                f.write(json.dumps({"step": self.global_steps, **numbers}) + "\n")


def train(overrides: list[str]) -> None:
    run_id, _ = prepared(overrides)
    config = main.compose(overrides)
    OmegaConf.set_struct(config, False)
    config.merge_with_dotlist([*SYNC, *NAIVE])  # afterwards: the lag-k trainer refuses these settings
    register_trainer_mode()
    from verl_vcpo.loop.main import LagKTaskRunner

    with ray_session(config, run_id) as run:
        LagKTaskRunner().run(config, observe_processes=run.observe)


if __name__ == "__main__":
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    train(sys.argv[1:])
