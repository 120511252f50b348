"""A runner of the lag-k trainer in the calling process (extends verl/trainer/main_ppo.py).

verl runs its trainer in a Ray actor. In the calling process the progress bar is on the terminal, an exception has an
ordinary traceback, and one process less imports the packages.
"""

import traceback
from collections.abc import Callable

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import get_trainer_cls

from verl_vcpo.loop.processes.actor_watch import ActorWatch
from verl_vcpo.loop.processes.end_of_queue import end_queue
from verl_vcpo.loop.trainer import LagKTrainer  # registers the trainer
from verl_vcpo.report.overview import finish
from verl_vcpo.user_code.reward import bound_custom_reward, without_workers


class LagKTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):
    """verl's task runner without its Ray actor."""

    def run(self, config: DictConfig, observe_processes: Callable[[], object] = lambda: None) -> None:
        """Train until `trainer.total_training_steps`. Ray is initialised; the configuration is validated.

        `observe_processes` is called when all processes of the run are up, and before a dead sampler is replaced.
        """
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        without_workers(config)
        bound_custom_reward(config)
        self.config = config
        tq.init(config.transfer_queue)
        succeeded, watch = False, ActorWatch()
        try:
            kind = get_trainer_cls(config.trainer.v1.trainer_mode)
            if issubclass(kind, LagKTrainer):
                self.trainer = kind(config, self.init_agent_loop_manager, observe_processes)
            else:
                self.trainer = kind(config=config)
            self.trainer.init()
            if self.agent_loop_manager is None:
                self.init_agent_loop_manager()
            watch.start()
            observe_processes()
            self.trainer.fit(self.agent_loop_manager)
            succeeded = True
        except KeyboardInterrupt:
            if watch.reason:
                raise RuntimeError(watch.reason) from None
            raise
        finally:
            watch.stop()
            try:
                finish(getattr(self.trainer, "logger", None), exit_code=0 if succeeded else 1)
            except Exception:
                if succeeded:
                    raise
                traceback.print_exc()  # the error of the run itself is the one to tell
            finally:
                end_queue()
