"""The lag-k trainer (extends verl/trainer/ppo/v1/trainer_separate_async.py). One knob: `async.lag`.

    before step 1     submit k batches to the samplers
    each step         submit one more batch; wait for the oldest finished one that the bound allows;
                      one optimizer step; send the samplers the new weights

k+1 batches are on their way at any time, and the replay buffer keeps `lag <= k` for every trajectory.
k = 0 is synchronous training: nothing is on its way while the trainer steps.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

from verl_vcpo.trainer.ppo.v1 import checkpoint, token_baseline
from verl_vcpo.trainer.ppo.v1.agent_loop import REASON
from verl_vcpo.trainer.ppo.v1.deadlines import OnDeadline
from verl_vcpo.trainer.ppo.v1.group_replay import ReplayedGroups
from verl_vcpo.trainer.ppo.v1.mini_batches import whole_groups_order
from verl_vcpo.trainer.ppo.v1.replay_buffer import LagKReplayBuffer, prompt_of
from verl_vcpo.trainer.ppo.v1.run_log import RunLog, say
from verl_vcpo.trainer.ppo.v1.trajectory_metrics import trajectory_metrics
from verl_vcpo.workers.engine_workers import VCPOActorWorker, VCPOCriticWorker
from verl_vcpo.workers.rollout.llm_client import ResumingLLMClient
from verl_vcpo.workers.rollout.sampler_keeper import SamplerKeeper

TRAINER_MODE = "lag_k"

# Upstream calls logger.info(..., flush=True), which raises unless that level is off.
logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async").setLevel(logging.WARNING)


@register_trainer(TRAINER_MODE)
class LagKTrainer(PPOTrainerSeparateAsync):
    """Trainer and samplers on their own devices, the samplers at most `async.lag` policy versions behind."""

    def __init__(self, config: DictConfig) -> None:
        self.lag: float = config["async"].lag
        scales = config.vcpo.enable and config.vcpo.step_size_rule != "none"
        self.run_log = RunLog(config.run_dir, scales_step_size=scales)
        self.observe_processes: Callable[[], object] = lambda: None  # called while all processes of the run are there
        self._has_token_baseline = config.actor_rollout_ref.actor.calculate_sum_pi_squared
        replays = config.actor_rollout_ref.actor.policy_loss.loss_mode == "tba"
        self._replayed = ReplayedGroups(config.data.seed) if replays else None
        self._row_of: dict[str, int] = {}  # a prompt's uid -> `extra_info.index` of its row in the data
        with _one_mini_batch(config):
            super().__init__(config)

    def _build_replay_buffer(self) -> LagKReplayBuffer:
        sampler = self.config.trainer.v1.sampler
        return LagKReplayBuffer(
            lag=self.lag,
            reissue_fn=self._reissue,
            reason_fn=self._why_failed,
            on_deadline=OnDeadline(self.config["async"].on_deadline),
            exact=self.config["async"].exact_lag,
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.separate_async,
            max_off_policy_threshold=None,
            max_off_policy_strategy="wait",
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
            filter_groups_metric=self._resolve_filter_groups_metric(),
        )

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping.keys() & {Role.Actor, Role.RefPolicy}:
            self.role_worker_mapping[role] = ray.remote(VCPOActorWorker)
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = ray.remote(VCPOCriticWorker)
        say("Starting the trainer (Megatron) ...")

    def _load_checkpoint(self) -> None:
        trainer = self.config.trainer
        if trainer.resume_mode == "auto":
            folder, complaints = checkpoint.newest_whole(Path(trainer.default_local_dir))
            for line in complaints:
                say(line)
            trainer.resume_mode = "disable" if folder is None else "resume_path"
            trainer.resume_from_path = None if folder is None else str(folder.absolute())
        elif trainer.resume_mode == "resume_path":
            wrong = checkpoint.damage(Path(trainer.resume_from_path))
            if wrong:
                raise RuntimeError(
                    f"trainer.resume_from_path={trainer.resume_from_path}: {wrong}; give a whole checkpoint"
                )
        super()._load_checkpoint()
        if self.global_steps:
            self._take_over_buffer()
            if self._replayed:
                self._replayed.resume()
            say(f"Resumed from {trainer.resume_from_path}, after step {self.global_steps}.")
        self.run_log.resume(self.global_steps)
        say("Starting the samplers (vLLM) ...")

    def _take_over_buffer(self) -> None:
        """Know the prompts that the checkpoint's buffer holds, and drop the trajectories of its last, trained batch."""
        tags = (tq.kv_list("train") or {}).get("train", {})
        prompts = {key for key, tag in tags.items() if tag.get("is_prompt")}
        trained = [key for key in tags if prompt_of(key) not in prompts]
        if trained:
            tq.kv_clear(keys=trained, partition_id="train")
        if prompts:
            self._note_submitted(
                tq.kv_batch_get(keys=list(prompts), partition_id="train", select_fields=["uid", "index"])
            )

    def _save_checkpoint(self) -> None:
        trainer = self.config.trainer
        root, keep = Path(trainer.default_local_dir), trainer.get("max_actor_ckpt_to_keep")
        trainer.default_local_dir, trainer.max_actor_ckpt_to_keep = str(checkpoint.staging(root)), None
        try:
            super()._save_checkpoint()
            checkpoint.publish(root, self.global_steps)
        except Exception as error:
            raise RuntimeError(checkpoint.why_not_written(root, self.global_steps, error)) from error
        finally:
            trainer.default_local_dir, trainer.max_actor_ckpt_to_keep = str(root), keep
        checkpoint.prune(root, keep)

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        self._note_submitted(batch)
        return super()._submit_batch_to_rollout(batch)

    def _note_submitted(self, batch: TensorDict) -> None:
        uids = [str(uid) for uid in batch["uid"]]
        self.replay_buffer.note_submitted(uids)
        self._row_of.update(zip(uids, (int(row) for row in batch["index"]), strict=True))

    def on_init_end(self) -> None:
        super().on_init_end()
        self._served_version = self.global_steps
        self.replay_buffer.sleep = self._sleep_and_mend
        self.sampler_keeper = SamplerKeeper(
            self.standalone_server_manager, self.standalone_checkpoint_manager, self.config["async"].sampler_timeout_s
        )
        say("The samplers serve the trainer's weights.")

    def get_llm_client(self) -> ResumingLLMClient:
        return self.standalone_server_manager.get_client(client_cls=ResumingLLMClient)

    def on_train_begin(self) -> None:
        self._add_async_warmup_batches(self.lag)

    def on_step_end(self) -> None:
        if self.config["async"].exact_lag:
            # What still runs would be finished by newer weights: younger than k.
            self.replay_buffer.wait_until_finished(self.global_steps, "train")
        self.sampler_keeper.take_out_the_dead()  # an update would wait for them for ever
        self._mend()
        self._served_version = self.global_steps
        with marked_timer("stage_weights", self.timing_raw):
            self.actor_rollout_wg.stage_weights(self.global_steps)
        try:
            super().on_step_end()
        except ray.exceptions.RayError:
            self.sampler_keeper.take_out_the_dead()
            if not self._mend():
                raise

    def _sleep_and_mend(self, seconds: float) -> None:
        time.sleep(seconds)
        self._mend()

    def _mend(self) -> int:
        """Replace the samplers that died; how many that were."""
        broken = self.sampler_keeper.broken()
        if broken:
            say("A sampler died: starting another one in its place ...")
            self.observe_processes()
            self.sampler_keeper.replace(broken, self._served_version)
            say(f"{len(broken)} sampler(s) restarted, with policy version {self._served_version}.")
        return len(broken)

    def _reissue(self, uids: list[str], partition_id: str) -> None:
        """Sample these prompts again from the start, as if submitted at this step."""
        self.agent_loop_manager.cancel(uids)
        known, again = tq.kv_list(partition_id)[partition_id], set(uids)
        stale = [key for key, tag in known.items() if not tag.get("is_prompt") and prompt_of(key) in again]
        if stale:
            tq.kv_clear(keys=stale, partition_id=partition_id)
        if partition_id == "val":  # verl does not store its prompts
            prompts = self.agent_loop_manager.prompts_in_validation(uids)
        else:
            prompts = tq.kv_batch_get(keys=uids, partition_id=partition_id)
        tu.assign_non_tensor_data(prompts, "global_steps", self.global_steps)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.global_steps} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id=partition_id, tags=tags)
        self.agent_loop_manager.generate_sequences(prompts)

    def _why_failed(self, uids: list[str], partition_id: str) -> list[str]:
        tags = tq.kv_list(partition_id)[partition_id]
        return [tags[uid].get(REASON, "for a reason that is in the agent loop workers' logs") for uid in uids]

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        if self.global_steps == 0:
            self.run_log.write(0, metrics)
        return metrics

    def _balance_batch(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> KVBatchMeta:
        if self._replayed:
            batch = self._replayed.mix(batch)
        batch = super()._balance_batch(batch, *args, **kwargs)
        actor = self.config.actor_rollout_ref.actor
        mini_batch_size = actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        if ranks > 1 or len(batch) > mini_batch_size:
            prompts = [prompt_of(key) for key in batch.keys]
            lengths = [tag["seq_len"] for tag in batch.tags]
            batch.reorder(whole_groups_order(prompts, lengths, mini_batch_size, ranks))
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        asked_for = token_baseline.asked_for(batch) if self._has_token_baseline else contextlib.nullcontext()
        with asked_for:  # the parent would copy the model, for steps that do not end in a weight update: here all do
            return PPOTrainer._compute_old_log_prob(self, batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        given = token_baseline.given_to_estimator(batch) if self._has_token_baseline else contextlib.nullcontext()
        with given:
            return super()._compute_advantage(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        oldest = min(tag["min_global_steps"] for tag in batch.tags if not tag.get("is_padding"))
        batch.extra_info["lag"] = self.global_steps - 1 - oldest  # vcpo.base_ess_ratio=auto measures the freshest
        return super()._update_actor(batch, metrics)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        balancer = self.standalone_server_manager.global_load_balancer
        metrics["vcpo/tokens_per_s"] = metrics["perf/total_num_tokens"] / timing_raw["step"]
        metrics["vcpo/trainer_idle_share"] = timing_raw["gen"] / timing_raw["step"]
        metrics["vcpo/weight_sync_share"] = timing_raw["update_weights"] / timing_raw["step"]
        metrics["vcpo/sampler_idle_share"] = ray.get(balancer.take_idle_share.remote())
        metrics |= trajectory_metrics(batch)
        ages = self.replay_buffer.ages
        rows = sorted(self._row_of.pop(uid) for uid in {prompt_of(key) for key in batch.keys} if uid in self._row_of)
        tables = {"buffer_ages": {str(age): ages[age] for age in sorted(ages)}, "trained_rows": rows}
        self.run_log.write(global_steps, metrics | tables)


@contextlib.contextmanager
def _one_mini_batch(config: DictConfig) -> Iterator[None]:
    """Upstream's constructor wants a weight sync after every mini-batch; here one follows all those of a batch."""
    actor = config.actor_rollout_ref.actor
    mini_batch_size = actor.ppo_mini_batch_size
    actor.ppo_mini_batch_size = config.data.train_batch_size
    try:
        yield
    finally:
        actor.ppo_mini_batch_size = mini_batch_size
