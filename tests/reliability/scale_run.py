"""One layout of `scale`, in a process of its own: the real control loop around engines that only count tokens.

Real: the trainer's feeding code and its own work on a batch, the replay buffer, TransferQueue, agent-loop and reward
workers, load balancer, the servers' gates and the keeper of the samplers. Stand-ins: vLLM's engine
(tests/kit/counting_engine.py) and Megatron's update, which is a pause.
"""

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from recipe.fully_async_policy import main as launcher
from recipe.fully_async_policy.launch.session import ray_session

launcher.prepare_environment(["hardware=cpu"])

import ray  # noqa: E402
import transfer_queue as tq  # noqa: E402
from omegaconf import open_dict  # noqa: E402
from verl.experimental.reward_loop import RewardLoopManager  # noqa: E402
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY  # noqa: E402
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode  # noqa: E402
from verl.workers.rollout.llm_server import LLMServerManager  # noqa: E402

from recipe.fully_async_policy.launch.processes import new_run_id  # noqa: E402
from recipe.fully_async_policy.settings.validate import validate  # noqa: E402
from tests.kit import counting_engine  # noqa: E402
from tests.reliability.scale_layouts import Responses, ScaleLayout, ScaleResult  # noqa: E402
from verl_vcpo.common.data_rows import DataRow, data_row  # noqa: E402
from verl_vcpo.common.whole_file import write_whole  # noqa: E402
from verl_vcpo.loop.main import LagKTaskRunner  # noqa: E402
from verl_vcpo.loop.trainer import TRAINER_MODE, LagKTrainer  # noqa: E402
from verl_vcpo.report.run_log import read_metrics  # noqa: E402

UPDATE_S, TRANSFER_S = 1.0, 0.2
MOST_REISSUED = 1024
_QUIET_S, _PROMPT_S = 600.0, 0.2


@dataclass
class Spent:
    """The seconds of the run, by activity."""

    updating: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    polls: list[float] = field(default_factory=list)
    submitting: float = 0.0
    training: float = 0.0
    own: float = 0.0
    """The processor time of the driver's process in its steps, without waiting for samples."""
    reissuing_busy: float = 0.0
    reissuing: float = 0.0
    beginning_again: float = 0.0


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return `call` with a clock, whose durations go to `seconds`."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return measured


class PausingActor:
    """A stand-in for the actor's workers: an update pauses `UPDATE_S`, then calls `in_an_update` with its number."""

    _dispatch_info: ClassVar = {"actor": [0]}

    def __init__(self, in_an_update: Callable[[int], object]) -> None:
        self._in_an_update, self._updates = in_an_update, 0

    def update_actor(self, batch: Any) -> dict[str, Any]:
        time.sleep(UPDATE_S)
        self._updates += 1
        self._in_an_update(self._updates)
        shown = ("ess_ratio", "lr_multiplier", "baseline", "kl_rollout_policy")  # on the console
        return {"metrics": {"mfu": [0.0], "grad_norm": [1.0], **{f"vcpo/{name}": [1.0] for name in shown}}}

    def stage_weights(self, version: int) -> None:
        """Do nothing: there are no weights."""


class CountingTrainer(LagKTrainer):
    """The real trainer, set up with engines that count and an actor that pauses."""

    kill_in_step = 0

    def _setup(self) -> None:
        self.spent, self.restarted, self.reissued, self.held = Spent(), 0, 0, 0
        self.submitted: Counter[DataRow] = Counter()  # by the prompt's row in the data
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self._init_resource_pool_mgr()
        self.actor_rollout_wg = PausingActor(self._kill_sampler)
        self.reward_loop_manager = RewardLoopManager(config=self.config, rm_resource_pool=None)
        self.llm_server_manager = SimpleNamespace(rollout_replicas=[], server_addresses=[])
        self.standalone_server_manager = LLMServerManager.create(config=self.config)
        self._load_checkpoint()  # starts the agent loops, which are given the servers' manager
        replicas = self.standalone_server_manager.get_replicas()
        self.standalone_checkpoint_manager = counting_engine.CountingWeights(replicas, TRANSFER_S)
        self.current_mode = HybridEngineMode.TRAINER

    def _end_unused_balancer(self) -> None:
        """Do nothing: no balancer was started."""

    def _kill_sampler(self, step: int) -> None:
        if step == self.kill_in_step:
            ray.kill(self.standalone_server_manager.rollout_replicas[0].servers[0])

    def on_init_end(self) -> None:
        super().on_init_end()
        for owner, name, seconds in (
            (self.replay_buffer, "_sync_metadata_from_transfer_queue", self.spent.polls),
            (self.standalone_checkpoint_manager, "update_weights", self.spent.weights),
            (self.actor_rollout_wg, "update_actor", self.spent.updating),
        ):
            setattr(owner, name, timed(getattr(owner, name), seconds))
        self._leave_out_waiting()
        replace = self.sampler_keeper.replace_missing

        def counted() -> int:
            restarted = replace()
            self.restarted += restarted
            return restarted

        setattr(self.sampler_keeper, "replace_missing", counted)  # noqa: B010  # mypy takes no assignment to a method

    def _leave_out_waiting(self) -> None:
        """Subtract from `spent.own` the processor time from a call of the buffer's `sample` to its last sleep."""
        sample, sleep, waited = self.replay_buffer.sample, self.replay_buffer.sleep, [0.0]

        def slept(seconds: float) -> None:
            sleep(seconds)
            waited[0] = time.process_time()

        def sampled(*args: Any, **kwargs: Any) -> Any:
            waited[0] = start = time.process_time()
            batch = sample(*args, **kwargs)
            self.spent.own -= waited[0] - start
            return batch

        self.replay_buffer.sleep = slept
        setattr(self.replay_buffer, "sample", sampled)  # noqa: B010  # mypy takes no assignment to a method

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        self.submitted.update(map(data_row, batch["index"]))
        return super()._submit_batch_to_rollout(batch)

    def on_train_begin(self) -> None:
        start = time.perf_counter()
        super().on_train_begin()
        self.spent.submitting = time.perf_counter() - start
        self.spent.own = -time.process_time()

    def fit(self, agent_loop_manager: Any) -> None:
        ray.get([worker.__ray_ready__.remote() for worker in agent_loop_manager.agent_loop_workers])
        start = time.perf_counter()
        super().fit(agent_loop_manager)
        self.spent.training = time.perf_counter() - start - self.spent.submitting
        self.spent.own += time.process_time()
        self.replay_buffer._sync_metadata_from_transfer_queue()
        self.held = len(self.replay_buffer._submission_number.keys() & tq.kv_list("train")["train"].keys())
        late = sorted(self.replay_buffer._unfinished("train"))[: 2 * MOST_REISSUED]
        busy, idle = late[: len(late) // 2], late[len(late) // 2 :]
        self.reissued = len(idle)
        self.spent.reissuing_busy = self._reissue(busy)
        self._pause(agent_loop_manager)
        start = time.perf_counter()
        self.spent.reissuing = self._reissue(idle)
        ray.get(agent_loop_manager._handing_over)
        self.spent.beginning_again = time.perf_counter() - start

    def _reissue(self, late: list[str]) -> float:
        """Submit these prompts again, and return the seconds."""
        start = time.perf_counter()
        if late:
            self._resubmit(late, "train")
        return time.perf_counter() - start

    def _pause(self, manager: Any) -> None:
        """Stop the samplers, and wait until the agent-loop workers have finished all sampled responses."""
        replicas = self.standalone_server_manager.get_replicas()
        ray.get([replica.servers[0].abort_all_requests.remote() for replica in replicas])
        deadline = time.monotonic() + _QUIET_S
        while time.monotonic() < deadline:
            start = time.monotonic()
            manager.stop([])  # waits until the workers have all prompts that were submitted, and answer
            if time.monotonic() - start < _PROMPT_S:
                return
            time.sleep(1.0)
        raise TimeoutError(f"agent-loop workers have work left {_QUIET_S:.0f} s after the samplers stopped")


def account(trainer: CountingTrainer) -> dict[str, int]:
    """Count prompts lost and trained on twice, and steps with a lag above the bound."""
    steps = read_metrics(trainer.config.run_dir)
    trained = Counter(row for line in steps for row in line["trained_rows"])
    return {
        "lost": trainer.submitted.total() - trained.total() - trainer.held,
        "duplicated": (trained - trainer.submitted).total(),
        "lag_violations": sum(line["lag_max"] > trainer.replay_buffer.bound for line in steps),
    }


def measure(layout: ScaleLayout, responses: Responses, overrides: list[str], kill_in_step: int) -> ScaleResult:
    """Train in this layout, and return the counts and times."""
    run_id = new_run_id()
    config = launcher.compose(overrides)
    validate(config)  # not `launcher.check`, which refuses a lag beyond the run's few steps
    rollout = config.actor_rollout_ref.rollout
    with open_dict(rollout):
        rollout.custom = {**(rollout.custom or {}), "token_s": responses.token_s, "mean_tokens": responses.mean}
    TRAINER_REGISTRY[TRAINER_MODE], CountingTrainer.kill_in_step = CountingTrainer, kill_in_step
    with ray_session(config, run_id):
        counting_engine.register_engine()
        runner = LagKTaskRunner()
        runner.run(config)
    trainer, spent = runner.trainer, runner.trainer.spent
    steps, per_step = len(spent.updating), layout.batch_size * layout.samples
    return ScaleResult(
        script=layout.script,
        in_flight=layout.in_flight,
        trajectories_per_step=per_step,
        submit_s=spent.submitting,
        step_s=spent.training / steps,
        driver_s_per_step=spent.own / steps,
        poll_s=max(spent.polls),
        update_s=statistics.mean(spent.weights),
        reissue_s=spent.reissuing,
        reissue_busy_s=spent.reissuing_busy,
        begun_again_s=spent.beginning_again,
        reissued=trainer.reissued,
        trajectories_per_s=per_step * steps / spent.training,
        declared_dead=trainer.restarted,
        **account(trainer),
    )


def main() -> None:
    """Run with the arguments LAYOUT (JSON) RESPONSES (JSON) OUTPUT KILL_IN_STEP setting=value ..."""
    layout, responses, output, kill_in_step, *overrides = sys.argv[1:]
    emulated = ScaleLayout(**json.loads(layout)), Responses(**json.loads(responses))
    result = measure(*emulated, overrides, int(kill_in_step))
    write_whole(Path(output), json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
