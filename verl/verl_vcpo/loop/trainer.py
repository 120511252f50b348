"""The lag-k trainer (extends verl/trainer/ppo/v1/trainer_separate_async.py). One knob: `async.lag`.

    before step 1   on_train_begin                      submit k batches of prompts to the samplers
    each step       _submit_batch_to_rollout            submit one more batch
                    replay_buffer.sample                wait for the oldest finished batch that the bound allows
                    _balance_batch ... _update_actor    train on that batch
                    on_step_end                         send the samplers the new weights

k+1 batches are submitted and not yet trained on at any time; the replay buffer keeps `lag <= k` for every trajectory.
k = 0 is synchronous training: nothing is sampled while the trainer steps.

verl's `PPOTrainer` calls the methods of `LagKTrainer` in the order of this file.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

import verl_vcpo.actor.policy_losses  # noqa: F401  # registers the advantages of one of our methods
from verl_vcpo.actor.engine_workers import VCPOActorWorker, VCPOCriticWorker
from verl_vcpo.actor.norms_settings import norms_in_words
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.common import console, held_folders
from verl_vcpo.common.run_id import run_in
from verl_vcpo.common.truncated import TRUNCATED, Truncated
from verl_vcpo.dataset.curriculum import Curriculum
from verl_vcpo.dataset.files import gone_on_with, keep_files_apart, with_shares
from verl_vcpo.loop import checkpoint
from verl_vcpo.loop.computed_again import ComputedAgain
from verl_vcpo.loop.held_out import HeldOutTrainer
from verl_vcpo.loop.processes.long_work import tell_of_long_work, telling
from verl_vcpo.loop.processes.worker_group import kept_port
from verl_vcpo.loop.prompts import withheld_prompts
from verl_vcpo.loop.prompts.deadlines import OnDeadline
from verl_vcpo.loop.prompts.dropped import mask_dropped
from verl_vcpo.loop.prompts.failed_prompts import FailedPrompts
from verl_vcpo.loop.prompts.prompt_groups import first_mini_batch, keep_groups_whole, mini_batch_size, one_mini_batch
from verl_vcpo.loop.prompts.replay_buffer import LagKReplayBuffer
from verl_vcpo.loop.prompts.tba_replay import TBAReplay
from verl_vcpo.report import batch_totals
from verl_vcpo.report.advice import Advisor
from verl_vcpo.report.overview import Overview
from verl_vcpo.report.run_log import ANSWERS, MODEL_FOLDER, VAL_SKIPPED, WEIGHTS_FOLDER, RunLog, how_answered
from verl_vcpo.report.sample_log import SampleLog, samples_of
from verl_vcpo.report.trajectory_metrics import FewFields, few_fields, trajectory_metrics
from verl_vcpo.samplers.agent_loop import failures
from verl_vcpo.samplers.client import ResumingLLMClient
from verl_vcpo.samplers.early_start import early_start
from verl_vcpo.samplers.keeper import SamplerKeeper
from verl_vcpo.weights.manager import BoundedCheckpointEngineManager

TRAINER_MODE = "lag_k"

# Upstream calls logger.info(..., flush=True), which raises unless that level is off.
logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async").setLevel(logging.WARNING)


@register_trainer(TRAINER_MODE)
class LagKTrainer(HeldOutTrainer):
    """A trainer whose samplers are on devices of their own, at most `async.lag` policy versions behind."""

    standalone_checkpoint_manager: Any
    _model_saved = False
    standalone_server_manager: Any
    train_dataloader: Any
    train_dataloader_it: Any
    curriculum: Curriculum | None = None
    """The levels of `data.levels`; None: there are none."""
    _arithmetic: float | None = None
    """The ESS ratio of arithmetic alone in the last update; None before the first one."""
    _stored: Callable[[], FewFields]  # of the step's batch: one fetch for levels, checkpoint and metrics

    # Start: the parts of the run, each created once.

    def __init__(
        self,
        config: DictConfig,
        start_agent_loops: Callable[[], object] = lambda: None,
        observe_processes: Callable[[], object] = lambda: None,
    ) -> None:
        """Make the parts that need no process.

        Args:
            start_agent_loops: what starts the agent loops; called while the samplers start.
            observe_processes: called before a dead sampler is replaced.
        """
        self._start_agent_loops, self._observe_processes = start_agent_loops, observe_processes
        actor = config.actor_rollout_ref.actor
        vcpo = VCPOSettings.of(config.vcpo)
        advisor = Advisor(config["async"].lag, shares_cores=config.trainer.device == "cpu")
        answered = how_answered(config.actor_rollout_ref.rollout.val_kwargs)
        self.run_log = RunLog(config.run_dir, vcpo.scales_step_size, advisor, answered, vcpo.ess_part == "lag")
        self.sample_log = SampleLog(config.run_dir, config.samples_every)
        self.tba_replay = TBAReplay(config.data.seed) if actor.policy_loss.loss_mode == "tba" else None
        # VCPO's engine reads the samplers' log-probs and the rewards where they are stored. So the driver fetches the
        # tokens of a few sequences at most, and its work for a step does not grow with the batch.
        self.engine_reads_batch: bool = config.vcpo.enable and config.algorithm.rollout_correction.bypass_mode
        with one_mini_batch(config):
            super().__init__(config)

    def _build_replay_buffer(self) -> LagKReplayBuffer:
        settings = self.config["async"]
        return LagKReplayBuffer(
            lag=settings.lag,
            samples=self.config.actor_rollout_ref.rollout.n,
            reissue_fn=self._resubmit,
            sleep=self._sleep,
            failed_prompts=FailedPrompts(self.config, failures, lambda *of: self.agent_loop_manager.prompts_of(*of)),
            on_deadline=OnDeadline(settings.on_deadline),
            exact=settings.exact_lag,
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.separate_async,
            max_off_policy_threshold=None,
            max_off_policy_strategy="wait",
            sampler_kwargs=self.config.trainer.v1.sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
            filter_groups_metric=self._resolve_filter_groups_metric(),
        )

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping.keys() & {Role.Actor, Role.RefPolicy}:
            self.role_worker_mapping[role] = ray.remote(VCPOActorWorker)
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = ray.remote(VCPOCriticWorker)
        console.screen().stage("Starting the trainer (Megatron) and the samplers (vLLM)")

    def _setup(self) -> None:
        with kept_port(), early_start(self.config, self._has_devices) as samplers:
            self.standalone_server_manager = samplers
            with telling("Starting the trainer and the samplers"):
                super()._setup()
        tell_of_long_work(self)
        weights = self.standalone_checkpoint_manager
        self.standalone_checkpoint_manager = BoundedCheckpointEngineManager(
            weights.config, weights.actor_wg, weights.replicas, self.config["async"].weight_update_timeout_s
        )
        if (vcpo := VCPOSettings.of(self.config.vcpo)).needs_gradient_norms:
            layers, obstacle, experts = self.actor_rollout_wg.layers_for_norms()[0]
            console.print_line(norms_in_words(vcpo.norms.how, layers, obstacle, experts))

    def _init_dataloader(self) -> None:
        data = self.config.data
        keep_files_apart(data)
        super()._init_dataloader()
        if data.shares:
            self.train_dataloader = loader = with_shares(self.train_dataloader, data)
            if data.levels:
                self.curriculum = Curriculum(loader.dataset.dataframe.tables, loader.sampler, data)

    def _has_devices(self) -> bool:
        """Return True if Ray has given each of verl's pools, which verl makes in `_setup`, its devices."""
        manager = getattr(self, "resource_pool_manager", None)
        pools = manager.resource_pool_dict.values() if manager else ()
        return bool(pools) and all(pool.pgs is not None for pool in pools)

    def _load_checkpoint(self) -> None:
        self._end_unused_balancer()
        checkpoint.choose(self.config.trainer)
        with telling("Reading the checkpoint"):
            super()._load_checkpoint()
        if self.global_steps:
            self._restored_tq_prompt_count = self.replay_buffer.resume(
                self.global_steps + 1, self.config.data.train_batch_size
            )
            if self.tba_replay:
                self.tba_replay.resume()
            if self.curriculum:
                self.curriculum.resume(Path(self.config.trainer.resume_from_path))
            self.train_dataloader_it = gone_on_with(self.train_dataloader)
            console.print_line(f"Resumed from {self.config.trainer.resume_from_path}, after step {self.global_steps}.")
        self.run_log.resume(self.global_steps, self.config.trainer.resume_from_path)
        self.sample_log.resume(self.global_steps)
        self.replay_buffer.failed_prompts.resume(self.global_steps)
        self._start_agent_loops()
        console.screen().stage("Waiting for the samplers (vLLM)")

    def _end_unused_balancer(self) -> None:
        """End verl's load balancer for samplers on the trainer's devices: a lag-k run has no samplers there."""
        ray.kill(self.llm_server_manager.global_load_balancer)

    def on_init_end(self) -> None:
        super().on_init_end()
        self.sampler_keeper = SamplerKeeper(
            self.standalone_server_manager,
            self.standalone_checkpoint_manager,
            timeout_s=self.config["async"].sampler_timeout_s,
            version=self.global_steps,
            before_restart=self._observe_processes,
        )
        self.computed_again = ComputedAgain(self.standalone_server_manager, self.config)

    def _sleep(self, seconds: float) -> None:
        """Pause between two looks of the replay buffer at the samples. Raise the error that keeps samples away."""
        self.agent_loop_manager.raise_errors()
        self.agent_loop_manager.raise_blocked()
        self.sampler_keeper.sleep(seconds)

    def get_llm_client(self) -> ResumingLLMClient:
        return self.standalone_server_manager.get_client(client_cls=ResumingLLMClient)

    def _validate(self) -> dict[str, float]:
        self._save_model_of_last_step()
        with console.screen().busy("Measuring the held-out accuracy"):
            metrics = super()._validate()
        if self.config.trainer.val_only:
            self.run_log.append(self.global_steps, metrics)
        elif self.global_steps == 0:
            self.run_log.write(0, metrics)
        self.overview.evaluation(self.global_steps, metrics)
        return metrics

    def _val_metrics_update(self, *answers: Any, expected_acc_counts: dict[Any, int] | None = None) -> dict[str, float]:
        """Return verl's metrics, for which an expected answer that is missing is wrong: skipped prompts have none."""
        answered, skipped = self.replay_buffer.failed_prompts.without_skipped(expected_acc_counts or {})
        metrics = super()._val_metrics_update(*answers, expected_acc_counts=answered)
        return metrics | {ANSWERS: sum(answered.values()), VAL_SKIPPED: skipped}

    @functools.cached_property
    def overview(self) -> Overview:
        return Overview(self.logger)  # verl makes the loggers in `fit`

    def on_train_begin(self) -> None:
        console.screen().training(self.total_training_steps, self.global_steps - 1)
        self._add_async_warmup_batches(self.config["async"].lag)

    # Each step, in order, and what follows the last one.

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        start = time.perf_counter()
        batch = super().step(metrics, timing_raw)
        self._trained = batch, metrics, start
        self._stored = functools.cache(functools.partial(few_fields, batch))
        if self.curriculum:  # as with samples: the step's checkpoint has the levels after this step
            stored, row_of = self._stored(), self.replay_buffer.row_of
            answers = zip(stored.prompts, stored.right(), strict=True)
            for line in self.curriculum.look_at((row_of[uid], right) for uid, right in answers if uid in row_of):
                console.print_line(line)
        if self.sample_log.is_due(self.global_steps):
            # Before the step's checkpoint is written: a run that resumes there keeps the samples up to this step.
            of_workers = self.actor_rollout_wg.sequence_weights()
            weights = {session: weight for part in of_workers for session, weight in part.items()}
            samples = samples_of(batch, self.global_steps, weights, self.tokenizer)
            self.sample_log.write(samples)
            self.overview.samples(self.global_steps, samples)
        return batch

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch_size = self.config.data.train_batch_size
        size = num_prompts or batch_size
        whole_fetches = size % (self.config.data.get("gen_batch_size") or batch_size) == 0
        if whole_fetches and not withheld_prompts.count():
            return super()._next_train_batch(num_prompts)
        batch = withheld_prompts.next_batch(size, super()._next_train_batch)
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        return batch

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        self.replay_buffer.note_submitted(batch)
        return super()._submit_batch_to_rollout(batch)

    def _balance_batch(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> KVBatchMeta:
        if self.tba_replay:
            batch = self.tba_replay.mix(batch)
        batch = super()._balance_batch(batch, *args, **kwargs)
        keep_groups_whole(batch, mini_batch_size(self.config), self._ranks)
        # VCPO's engine itself leaves the masked ones out: their weights and norms are parts of baselines.
        treatment, by_verl = self.config["async"].truncated, not self.config.vcpo.enable
        if treatment == Truncated.DROP or (treatment == Truncated.MASK and by_verl):
            mask_dropped(batch, by_verl)
        return batch

    @property
    def _ranks(self) -> int:
        """The number of data-parallel ranks of the trainer."""
        return max(self.actor_rollout_wg._dispatch_info["actor"]) + 1

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.engine_reads_batch:
            return batch
        return PPOTrainer._compute_old_log_prob(self, batch, metrics)  # without the copy for parameter_sync_step > 1

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.engine_reads_batch:
            return batch
        return super()._compute_advantage(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch.extra_info[TRUNCATED] = self.config["async"].truncated
        batch.extra_info["policy_version"] = self.global_steps - 1
        with marked_timer("computed_again", self.timing_raw):
            first = first_mini_batch(len(batch), mini_batch_size(self.config), self._ranks)
            self.computed_again.ask(batch, first, self.global_steps, self._arithmetic)
        batch = super()._update_actor(batch, metrics)
        self._arithmetic = metrics.get("actor/vcpo/ess/arithmetic")
        return batch

    def _wait_if_exact(self) -> None:
        """With `async.exact_lag` wait for all samples: newer weights would give an unfinished one a lag below k."""
        if self.config["async"].exact_lag:
            with console.screen().busy("Waiting for samples in flight"), marked_timer("wait_finished", self.timing_raw):
                self.replay_buffer.wait_until_finished(self.global_steps, "train", self._trained[1])

    def _save_checkpoint(self) -> None:
        self._wait_if_exact()  # a resumed run samples what is unfinished with the weights of the checkpoint
        with (
            console.screen().busy("Writing a checkpoint"),
            checkpoint.written_whole(self.config.trainer, self.global_steps, run_in(self.config.run_dir)) as folder,
        ):
            super()._save_checkpoint()
            checkpoint.check_written_by_workers(folder)
            self.run_log.keep(self.global_steps, self._metrics_so_far(), folder)
            if self.curriculum:
                self.curriculum.write(folder)
        if self.config.save_weights:
            self._save_hugging_face(f"{WEIGHTS_FOLDER}/step_{self.global_steps}")

    def _save_hugging_face(self, folder: str) -> None:
        """Write the policy to `folder` in the run's folder, on the node of the trainer's first worker."""
        self.actor_rollout_wg.save_hugging_face(str(held_folders.checked(self.config.run_dir) / folder))

    def _metrics_so_far(self) -> dict[str, Any]:
        """Return the step's metrics when its checkpoint is written: without the weight update and a validation."""
        batch, metrics, start = self._trained
        timing = {**self.timing_raw, "step": time.perf_counter() - start}
        metrics, epoch = dict(metrics), (self.global_steps - 1) // self.steps_per_epoch
        self._verls_metrics(batch, metrics, timing, self.global_steps, epoch)
        return self._with_own_metrics(metrics, timing)

    def _stage_weights(self) -> None:
        with marked_timer("stage_weights", self.timing_raw):
            self.actor_rollout_wg.stage_weights(self.global_steps)

    def on_step_end(self) -> None:
        # The trainer now has the weights of this step, and a sampler that replaces a dead one gets these weights.
        self.sampler_keeper.version = self.global_steps
        self._wait_if_exact()
        self.sampler_keeper.replace_dead()  # a weight update would wait for a dead sampler until its time is over
        self._stage_weights()
        start = time.perf_counter()
        try:
            super().on_step_end()
        except ray.exceptions.RayError:  # a sampler that replaces a dead one gets the weights with the replacement
            if not self.sampler_keeper.replace_dead():
                raise
        self.timing_raw.setdefault("update_weights", time.perf_counter() - start)  # verl notes none where it raised

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        self._save_model_of_last_step()
        self._verls_metrics(batch, metrics, timing_raw, global_steps, epoch)
        balancer = self.standalone_server_manager.global_load_balancer
        metrics["vcpo/weight_sync_share"] = timing_raw["update_weights"] / timing_raw["step"]
        metrics["vcpo/sampler_idle_share"] = ray.get(balancer.take_idle_share.remote())
        self._record(global_steps, metrics, self._with_own_metrics(metrics, timing_raw))

    def _record(self, step: int, metrics: dict[str, Any], line: dict[str, Any]) -> None:
        """Write the `line` of a step, and show the step's `metrics`, which verl logs too."""
        self.overview.step(step, metrics, self.run_log.write(step, line))

    def _verls_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *when: Any) -> None:
        of_experts = self.config.actor_rollout_ref.rollout.get("moe_load_balance_metrics_interval", 0) > 0
        tokens_stay = self.engine_reads_batch and not of_experts  # the load of experts is counted by token
        totals = batch_totals.in_place_of_tokens
        with totals(batch, self._stored(), metrics) if tokens_stay else contextlib.nullcontext():
            super()._compute_metrics(batch, metrics, *when)

    def _with_own_metrics(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> dict[str, Any]:
        """Add our metrics to `metrics`; return them with the tables of the step's line, which verl must not log."""
        metrics["vcpo/tokens_per_s"] = metrics["perf/total_num_tokens"] / timing_raw["step"]
        idle_s = timing_raw["gen"] + timing_raw.get("wait_finished", 0)
        metrics["vcpo/trainer_idle_share"] = idle_s / timing_raw["step"]
        metrics |= trajectory_metrics(self._stored(), self.config["async"].truncated)
        levels = {"levels": self.curriculum.levels} if self.curriculum else {}
        ages = {str(age): count for age, count in sorted(self.replay_buffer.ages.items())}
        return metrics | levels | {"buffer_ages": ages, "trained_rows": self.replay_buffer.data_rows}

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and write the policy as a Hugging Face folder; with `trainer.val_only` evaluate once."""
        super().fit(agent_loop_manager)
        self._save_model()

    def _save_model_of_last_step(self) -> None:
        """Write the policy before the last evaluation and the loggers, which may fail."""
        if self.global_steps >= self.total_training_steps:
            self._save_model()

    def _save_model(self) -> None:
        if self.config.save_model and not self.config.trainer.val_only and not self._model_saved:
            with console.screen().busy("Writing the trained model"):
                self._save_hugging_face(MODEL_FOLDER)
            self._model_saved = True

    # When a prompt fails or is late. `SamplerKeeper` replaces samplers that die, in `on_step_end` and in `_sleep`.

    def _resubmit(self, uids: list[str], partition_id: str) -> None:
        self.agent_loop_manager.resubmit(uids, partition_id, self.global_steps)
