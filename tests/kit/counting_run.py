"""A run without samplers' GPUs: `python -m tests.kit.counting_run setting=value ...`.

Everything is real (Ray, TransferQueue, agent loops, the trainer and its processes), except that samplers count tokens
(counting_engine.py), and get no weights.
"""

import sys
from typing import Any

from recipe.fully_async_policy import main as launcher
from recipe.fully_async_policy.launch.session import ray_session

TRANSFER_S = 0.1
SAMPLERS = {
    "token_s": 0.005,
    "mean_tokens": 12,
    # about the token's log-prob in the small model (small_run.py); otherwise all weights and gradients would be 0
    "log_prob": -9.3,
}


def main(overrides: list[str]) -> int:
    """Train. Return the exit code 0, or raise an exception."""
    from omegaconf import open_dict

    from recipe.fully_async_policy.launch.processes import new_run_id

    run_id = new_run_id()
    launcher.prepare_environment(overrides)
    config = launcher.compose(overrides)
    launcher.check(config)

    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from tests.kit import counting_engine
    from verl_vcpo.loop.main import LagKTaskRunner
    from verl_vcpo.loop.trainer import TRAINER_MODE, LagKTrainer

    class Trainer(LagKTrainer):
        def _setup(self) -> None:
            super()._setup()
            replicas: list[Any] = self.standalone_server_manager.get_replicas()
            self.standalone_checkpoint_manager = counting_engine.CountingWeights(replicas, TRANSFER_S)

    rollout = config.actor_rollout_ref.rollout
    with open_dict(rollout):
        rollout.custom = {**(rollout.custom or {}), **SAMPLERS}
    TRAINER_REGISTRY[TRAINER_MODE] = Trainer
    with ray_session(config, run_id) as run:
        counting_engine.register_engine()
        LagKTaskRunner().run(config, observe_processes=run.observe)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
