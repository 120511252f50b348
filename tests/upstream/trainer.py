"""The driver: what our trainer, replay buffer and launcher depend on in verl's."""

from tests.upstream.reach import How, Place, Reach

V1 = "verl.trainer.ppo.v1"
BASE, ASYNC = f"{V1}.trainer_base:PPOTrainer", f"{V1}.trainer_separate_async:PPOTrainerSeparateAsync"
BUFFER, BUFFER_ASYNC = f"{V1}.replay_buffer:ReplayBuffer", f"{V1}.replay_buffer:ReplayBufferAsync"
LOOP = f"{V1}.agent_loop_tq"
CORR = "verl.trainer.ppo.rollout_corr_helper"
SYNC = "trainer.v1.separate_async"

TRAINER = Place(
    "verl/verl_vcpo/loop/trainer.py",
    "The order of calls in `PPOTrainer.fit` and `_step_once`, and `on_step_end` of the separate-async trainer.",
    (
        Reach("LagKTrainer", How.SUBCLASSES, ASYNC, "", "the trainer with samplers on devices of their own"),
        Reach("LagKTrainer", How.REGISTERS, f"{V1}.trainer_base:register_trainer", "name", "trainer_mode=lag_k"),
        Reach("LagKTrainer.__init__", How.OVERRIDES, f"{ASYNC}.__init__", "", "settings of ours; several mini-batches"),
        Reach("LagKTrainer._build_replay_buffer", How.OVERRIDES, f"{BASE}._build_replay_buffer", "", "our buffer"),
        Reach(
            "LagKTrainer._init_resource_pool_mgr",
            How.OVERRIDES,
            f"{ASYNC}._init_resource_pool_mgr",
            "",
            "our workers in `role_worker_mapping`",
        ),
        Reach("LagKTrainer._setup", How.OVERRIDES, f"{ASYNC}._setup", "", "weight updates have a limit"),
        Reach("LagKTrainer._init_dataloader", How.OVERRIDES, f"{BASE}._init_dataloader", "", "several files; shares"),
        Reach("LagKTrainer._load_checkpoint", How.OVERRIDES, f"{BASE}._load_checkpoint", "", "whole checkpoints only"),
        Reach(
            "LagKTrainer._end_unused_balancer",
            How.USES,
            "verl.workers.rollout.llm_server:LLMServerManager.create_empty",
            "",
            "`llm_server_manager.global_load_balancer`, started for no sampler: ended",
        ),
        Reach("LagKTrainer._save_checkpoint", How.OVERRIDES, f"{BASE}._save_checkpoint", "", "written aside, sealed"),
        Reach("LagKTrainer.fit", How.OVERRIDES, f"{BASE}.fit", "", "writes the trained model afterwards"),
        Reach("LagKTrainer.step", How.OVERRIDES, f"{BASE}.step", "", "its batch and metrics, for the checkpoint"),
        Reach("LagKTrainer._metrics_so_far", How.USES, f"{BASE}._compute_metrics", "", "before the weight update"),
        Reach(
            "LagKTrainer._next_train_batch",
            How.OVERRIDES,
            f"{BASE}._next_train_batch",
            "",
            "withheld prompts of a checkpoint come first",
        ),
        Reach(
            "LagKTrainer._submit_batch_to_rollout",
            How.OVERRIDES,
            f"{BASE}._submit_batch_to_rollout",
            "",
            "remembers the order of submission",
        ),
        Reach(
            "LagKTrainer.on_init_end", How.OVERRIDES, f"{ASYNC}.on_init_end", "", "watches the samplers from here on"
        ),
        Reach("LagKTrainer.get_llm_client", How.OVERRIDES, f"{ASYNC}.get_llm_client", "", "our client"),
        Reach("LagKTrainer.on_train_begin", How.OVERRIDES, f"{ASYNC}.on_train_begin", "", "k batches ahead"),
        Reach("LagKTrainer.on_step_end", How.OVERRIDES, f"{ASYNC}.on_step_end", "", "stages weights; dead samplers"),
        Reach("LagKTrainer._validate", How.OVERRIDES, f"{BASE}._validate", "", "line 0 of metrics.jsonl"),
        Reach("LagKTrainer._validate", How.USES, f"{BASE}.val_dataset", "", "its length: how many answers"),
        Reach("LagKTrainer._balance_batch", How.OVERRIDES, f"{BASE}._balance_batch", "", "prompt groups stay whole"),
        Reach(
            "LagKTrainer._compute_old_log_prob",
            How.OVERRIDES,
            f"{ASYNC}._compute_old_log_prob",
            "",
            "not with VCPO; calls the grandparent: the parent copies the model for updates that do not follow a step",
        ),
        Reach(
            "LagKTrainer._compute_old_log_prob",
            How.CALLS,
            f"{BASE}._compute_old_log_prob",
            "batch, metrics",
            "as above",
        ),
        Reach("LagKTrainer._compute_advantage", How.OVERRIDES, f"{BASE}._compute_advantage", "", "otb; not with VCPO"),
        Reach("LagKTrainer._update_actor", How.OVERRIDES, f"{BASE}._update_actor", "", "tells the engine the lag"),
        Reach("LagKTrainer._compute_metrics", How.OVERRIDES, f"{BASE}._compute_metrics", "", "our metrics and log"),
        Reach(
            "LagKTrainer.on_train_begin",
            How.CALLS,
            f"{BASE}._add_async_warmup_batches",
            "num_warmup_batches",
            "feeds k",
        ),
        Reach(
            "LagKTrainer._build_replay_buffer", How.CALLS, f"{BASE}._add_prompts_to_generate", "num_prompts", "refill"
        ),
        Reach(
            "LagKTrainer._build_replay_buffer", How.CALLS, f"{BASE}._resolve_filter_groups_metric", "", "DAPO's filter"
        ),
        Reach(
            "(order of a step)", How.CALLS, f"{BASE}.fit", "agent_loop_manager", "one weight update after every step"
        ),
        Reach(
            "(order of a step)", How.CALLS, f"{BASE}._step_once", "metrics, timing_raw, sample_batch_size", "its hooks"
        ),
        Reach("(order of a step)", How.CALLS, f"{BASE}.prepare_step", "", "one new batch for each step"),
        Reach("LagKTrainer", How.USES, f"{BASE}.global_steps", "", "the step; the version is the step before"),
        Reach("LagKTrainer", How.USES, f"{BASE}.total_training_steps", "", "the length of the progress bar"),
        Reach("LagKTrainer", How.USES, f"{BASE}.trainer_mode", "", "anything but `sync`: data go to TransferQueue"),
        Reach("LagKTrainer", How.USES, f"{BASE}.replay_buffer", "", "ours"),
        Reach("LagKTrainer", How.USES, f"{BASE}.agent_loop_manager", "", "ours; `resubmit` is not theirs"),
        Reach("LagKTrainer", How.USES, f"{BASE}.actor_rollout_wg", "", "our worker's own methods"),
        Reach("LagKTrainer", How.USES, f"{BASE}.role_worker_mapping", "", "our workers"),
        Reach("LagKTrainer", How.USES, f"{BASE}.timing_raw", "", "seconds by name"),
        Reach("LagKTrainer", How.USES, f"{ASYNC}.standalone_server_manager", "", "the samplers"),
        Reach("LagKTrainer", How.USES, f"{ASYNC}.standalone_checkpoint_manager", "", "their weights"),
        Reach(
            "LagKTrainer._balance_batch",
            How.USES,
            "verl.single_controller.ray.base:RayWorkerGroup._dispatch_info",
            "",
            "data-parallel size: the largest rank of the mesh `actor`",
        ),
        Reach("LagKTrainer", How.USES, "verl.trainer.ppo.utils:Role.Actor", "", "a key of `role_worker_mapping`"),
        Reach("LagKTrainer", How.USES, "verl.trainer.ppo.utils:Role.RefPolicy", "", "as above"),
        Reach("LagKTrainer", How.USES, "verl.trainer.ppo.utils:Role.Critic", "", "as above"),
        Reach("LagKTrainer.on_step_end", How.CALLS, "verl.utils.debug:marked_timer", "name, timing_raw", "times"),
        Reach(
            "on_step_end", How.NAMES, f"{ASYNC}.on_step_end", '"update_weights", self.timing_raw', "seconds of a sync"
        ),
        Reach(
            "_compute_metrics", How.NAMES, f"{BASE}._step_once", '"gen", timing_raw', "the trainer waits for rollouts"
        ),
        Reach("_compute_metrics", How.NAMES, f"{BASE}.fit", '"step", self.timing_raw', "seconds of the whole step"),
        Reach(
            "(module)",
            How.NAMES,
            f"{ASYNC}._setup",
            "flush=True",
            "their logger raises at level INFO; ours sets it to WARNING. Gone: remove our line",
        ),
        Reach(
            "_one_mini_batch",
            How.NAMES,
            f"{ASYNC}.__init__",
            "parameter_sync_step * ppo_mini_batch_size",
            "an assertion",
        ),
        Reach("_one_mini_batch", How.SETTING, f"{SYNC}.parameter_sync_step", "", "1"),
        Reach(
            "_compute_old_log_prob", How.SETTING, "algorithm.rollout_correction.bypass_mode", "", "what is recomputed"
        ),
        Reach("_update_actor", How.NAMES, f"{LOOP}:AgentLoopWorkerTQ", '"min_global_steps"', "the tag of a trajectory"),
        Reach(
            "_update_actor",
            How.NAMES,
            "verl.trainer.ppo.padding_utils",
            "is_padding=True",
            "the tag of a filled-in row",
        ),
    ),
)

STORED = Place(
    "verl/verl_vcpo/loop/checkpoint.py, run_log.py, prompt_groups.py, actor_watch.py",
    "Names of metrics and files; how the driver's rows are dealt out to ranks and mini-batches.",
    (
        Reach(
            "TRACKER", How.NAMES, f"{BASE}._save_checkpoint", '"latest_checkpointed_iteration.txt"', "verl's pointer"
        ),
        Reach(
            "checkpoints",
            How.NAMES,
            f"{BASE}._save_checkpoint",
            'f"global_step_{self.global_steps}"',
            "a folder's name",
        ),
        Reach("HEADLINES", How.NAMES, "verl.trainer.ppo.metric_utils", '"critic/score/mean"', "`reward`"),
        Reach("HEADLINES", How.NAMES, BASE, "training/off_policy/trajectory_staleness_worst/max", "`lag_max`"),
        Reach(
            "HEADLINES", How.NAMES, "verl.trainer.ppo.metric_utils", 'f"timing_s/{name}"', "`weight_sync_s`, `step_s`"
        ),
        Reach("SAVE_S", How.NAMES, BASE, 'marked_timer("save_checkpoint"', "which steps have written a checkpoint"),
        Reach("HEADLINES", How.NAMES, "verl.trainer.ppo.metric_utils", '"perf/total_num_tokens"', "`tokens_per_s`"),
        Reach("HEADLINES", How.NAMES, f"{BASE}._update_actor", '"actor/"', "the prefix of the engine's metrics"),
        Reach("held_out_accuracies", How.NAMES, BASE, '"val-core"', "`val_accuracies`, and `val_accuracy`, their mean"),
        Reach(
            "_shares",
            How.CALLS,
            "verl.utils.seqlen_balancing:get_seqlen_balanced_partitions",
            "seqlen_list, k_partitions, equal_size",
            "as many tokens on every rank",
        ),
        Reach(
            "whole_groups_order",
            How.NAMES,
            "verl.workers.engine_workers:TrainingWorker.train_mini_batch",
            "mini_batch_size // self.engine.get_data_parallel_size()",
            "a mini-batch is the next slice of every rank's rows",
        ),
        Reach("keep_groups_whole", How.NAMES, f"{LOOP}:AgentLoopWorkerTQ", '"seq_len"', "the tag of a trajectory"),
        Reach("_REPLACEABLE", How.USES, "verl.checkpoint_engine.base:CheckpointEngineWorker", "", "the class's name"),
    ),
)

REPLAY = Place(
    "verl/verl_vcpo/loop/replay_buffer.py",
    "`ReplayBufferAsync.wait_for_sampleable` and `sample`: which of the overridden methods they call, and when.",
    (
        Reach("LagKReplayBuffer", How.SUBCLASSES, BUFFER_ASYNC, "", "reads TransferQueue's tags"),
        Reach("LagKReplayBuffer.__init__", How.OVERRIDES, f"{BUFFER}.__init__", "", "k, and the rule at a deadline"),
        Reach(
            "LagKReplayBuffer._select_prompt_uids", How.OVERRIDES, f"{BUFFER}._select_prompt_uids", "", "oldest first"
        ),
        Reach(
            "LagKReplayBuffer._materialize_batch", How.OVERRIDES, f"{BUFFER}._materialize_batch", "", "in that order"
        ),
        Reach(
            "LagKReplayBuffer._has_enough_samples",
            How.OVERRIDES,
            f"{BUFFER_ASYNC}._has_enough_samples",
            "",
            "the bound",
        ),
        Reach(
            "LagKReplayBuffer._terminal_eviction_reasons",
            How.OVERRIDES,
            f"{BUFFER_ASYNC}._terminal_eviction_reasons",
            "",
            "what failed is sampled again, not replaced by another prompt",
        ),
        Reach("LagKReplayBuffer._clear_groups", How.OVERRIDES, f"{BUFFER}._clear_groups", "", "forgets them too"),
        Reach("LagKReplayBuffer.sample", How.OVERRIDES, f"{BUFFER_ASYNC}.sample", "", "metrics"),
        Reach(
            "LagKReplayBuffer._wait_for_next_poll",
            How.OVERRIDES,
            f"{BUFFER}._wait_for_next_poll",
            "",
            "often; dead samplers",
        ),
        Reach(
            "LagKReplayBuffer._sync_metadata_from_transfer_queue",
            How.OVERRIDES,
            f"{BUFFER}._sync_metadata_from_transfer_queue",
            "",
            "asks for what can have changed; verl lists all keys",
        ),
        Reach("LagKReplayBuffer", How.USES, f"{BUFFER}.finished_keys", "", "prompts by partition"),
        Reach("LagKReplayBuffer", How.USES, f"{BUFFER}.partitions", "", "the trajectories' tags by partition and key"),
        Reach("LagKReplayBuffer", How.USES, f"{BUFFER}.filter_groups_metric", "", "None: no group filtering"),
        Reach("sessions_of", How.NAMES, LOOP, '"__rollout_n__"', "a prompt's own number of sessions"),
        Reach(
            "LagKReplayBuffer.wait_until_finished",
            How.CALLS,
            f"{BUFFER}._sync_metadata_from_transfer_queue",
            "",
            "polls",
        ),
        Reach("LagKReplayBuffer", How.USES, f"{BUFFER}.pending_keys", "", "prompts by partition"),
        Reach("LagKReplayBuffer", How.USES, f"{BUFFER}.running_keys", "", "as above"),
        Reach("LagKReplayBuffer", How.USES, f"{BUFFER}.failure_keys", "", "as above"),
        Reach("LagKReplayBuffer", How.USES, f"{BUFFER}.prompt_global_steps", "", "the step of a prompt's submission"),
        Reach("LagKReplayBuffer", How.USES, f"{BUFFER}.poll_interval", "", "seconds"),
        Reach("prompt_of", How.NAMES, BUFFER, 'key.split("_")[0]', "a trajectory's key is uid_session_index"),
    ),
)

DATASET = "verl.utils.dataset.rl_dataset"
ROWS = Place(
    "verl/verl_vcpo/loop/dataset.py",
    "`RLHFDataset`: what it does with `dataframe`, and the order of reading, drawing and filtering.",
    (
        Reach("FilesDataset", How.SUBCLASSES, f"{DATASET}:RLHFDataset", "", "each file stays a table"),
        Reach(
            "FilesDataset._read_files_and_tokenize",
            How.OVERRIDES,
            f"{DATASET}:RLHFDataset._read_files_and_tokenize",
            "",
            "called for each file",
        ),
        Reach(
            "FilesDataset._read_files_and_tokenize",
            How.CALLS,
            f"{DATASET}:RLHFDataset.maybe_filter_out_long_prompts",
            "dataframe",
            "for each file",
        ),
        Reach("FilesDataset._drawn", How.NAMES, f"{DATASET}:RLHFDataset", "rng.choice(total, size=", "the same rows"),
        Reach("keep_files_apart", How.SETTING, "data.custom_cls.path", "= None", "the dataset's class"),
        Reach(
            "with_shares", How.NAMES, f"{BASE}._init_dataloader", "sampler=create_rl_sampler(", "the order, replaced"
        ),
    ),
)

METHODS = Place(
    "verl/verl_vcpo/actor/policy_losses.py, own_loss.py, rollout_corr_helper.py, "
    "actor/token_baseline.py, loop/tba_replay.py, report/trajectory_metrics.py, report/batch_totals.py",
    "Whether the two faults that ours repairs are still there: a zero mask, and `sum_pi_squared` in the V1 trainer.",
    (
        Reach("_policy_loss", How.REGISTERS, "verl.trainer.ppo.core_algos:register_policy_loss", "name", "our losses"),
        Reach(
            "PASSED",
            How.NAMES,
            "verl.workers.utils.losses:ppo_loss",
            "rollout_is_weights=rollout_is_weights",
            "what a loss of the user's own is called with, by keyword",
        ),
        Reach("oapl_advantages", How.REGISTERS, "verl.trainer.ppo.core_algos:register_adv_est", "name_or_enum", "ours"),
        Reach("oapl_advantages", How.NAMES, "verl.trainer.ppo.ray_trainer", 'adv_kwargs["index"]', "the prompts"),
        Reach(
            "_policy_loss",
            How.CALLS,
            "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla",
            "old_log_prob, log_prob, advantages, response_mask, loss_agg_mode='token-mean', config, rollout_is_weights",
            "the signature of a policy loss; ours has the same",
        ),
        Reach(
            "_policy_loss",
            How.CALLS,
            "verl.trainer.ppo.core_algos:agg_loss",
            "loss_mat, loss_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor",
            "the mean over the global mini-batch",
        ),
        Reach(
            "_policy_loss", How.USES, "verl.workers.config:ActorConfig.global_batch_info", "", "sizes for `agg_loss`"
        ),
        Reach(
            "rollout_corr_helper", How.REPLACES, f"{CORR}:compute_is_metrics", "", "divides by zero; defined at import"
        ),
        Reach(
            "passed_to_estimator",
            How.REPLACES,
            f"{V1}.trainer_base:compute_advantage_for_multi_trajectories",
            "",
            "the estimator sees `sum_pi_squared`; for one call",
        ),
        Reach(
            "requested",
            How.NAMES,
            "verl.workers.engine.megatron.transformer_impl",
            'key="calculate_sum_pi_squared"',
            "asks",
        ),
        Reach("FIELD", How.NAMES, "verl.trainer.ppo.core_algos", "sum_pi_squared", "what the estimator looks for"),
        Reach(
            "passed_to_estimator",
            How.CALLS,
            "verl.workers.utils.padding:response_from_nested",
            "tensor, response_mask",
            "whole sequences to responses",
        ),
        Reach("passed_to_estimator", How.USES, "verl:DataProto.batch", "", "what estimators read"),
        Reach("_policy_loss", How.SETTING, "algorithm.adv_estimator", "", "an estimator of verl's by name"),
        Reach(
            "in_place_of_tokens",
            How.REPLACES,
            f"{V1}.trainer_base:get_metric_data_with_optional_routed_experts",
            "",
            "replaced for the time of a call",
        ),
        Reach("_Totals", How.NAMES, f"{BASE}._compute_metrics", "data.to_padded_tensor()", "what is called of it"),
        Reach("_Lengths", How.NAMES, f"{BASE}._compute_metrics", 'data["prompts"].offsets().diff()', "the lengths"),
        Reach(
            "_Lengths.placeholder",
            How.NAMES,
            "verl.trainer.ppo.metric_utils",
            'batch.batch["responses"].shape[-1]',
            "the longest response",
        ),
    ),
)

PLUGIN = Place(
    "verl/verl_vcpo/plugin.py, recipe/fully_async_policy/main.py and session.py",
    "That verl still loads the entry point in every process, and which errors it keeps to itself.",
    (
        Reach("verl/pyproject.toml", How.NAMES, "verl", 'group="verl.plugins"', "the entry point's group"),
        Reach(
            "CPU_REQUESTED", How.NAMES, "verl.plugin.platform.platform_manager", '"VERL_PLATFORM"', "asks for a CPU run"
        ),
        Reach("prepare_environment", How.NAMES, f"{V1}.trainer_base", '"VERL_LOGGING_LEVEL"', "quiet"),
        Reach("prepare_environment", How.NAMES, "transfer_queue.utils.logging_utils", "TQ_LOGGING_LEVEL", "quiet"),
        Reach(
            "check",
            How.CALLS,
            "verl.utils.config:validate_config",
            "config, use_reference_policy, use_critic",
            "verl's own checks; they raise AssertionError or ValueError",
        ),
        Reach("check", How.CALLS, "verl.trainer.ppo.utils:need_critic", "config", "an argument of it"),
        Reach("check", How.CALLS, "verl.trainer.ppo.utils:need_reference_policy", "config", "an argument of it"),
        Reach(
            "ray_session",
            How.CALLS,
            "verl.trainer.constants_ppo:get_ppo_ray_runtime_env",
            "config",
            "the workers' environment",
        ),
        Reach("compose", How.SETTING, "actor_rollout_ref.rollout.router_config_path", "= None", "our balancer"),
        Reach(
            "compose", How.SETTING, "actor_rollout_ref.rollout.agent.agent_loop_config_path", "= None", "agent loops"
        ),
    ),
)

PLACES = (TRAINER, REPLAY, STORED, ROWS, METHODS, PLUGIN)
