"""What we depend on in vLLM, Ray, TransferQueue and torch."""

from tests.upstream.reach import How, Place, Reach

VLLM = Place(
    "verl/verl_vcpo/samplers (vLLM)",
    "What a pause does to requests on their way, and whether prefixes are still shared by `cache_salt` only.",
    (
        Reach("_pausing", How.REPLACES, "vllm.v1.engine.async_llm:AsyncLLM.pause_generation", "", "kv_cache=keep"),
        Reach(
            "_pausing",
            How.CALLS,
            "vllm.v1.engine.async_llm:AsyncLLM.pause_generation",
            "mode, clear_cache",
            "pause, not abort",
        ),
        Reach(
            "_salted",
            How.CALLS,
            "vllm.v1.engine.async_llm:AsyncLLM.generate",
            "prompt, sampling_params, request_id",
            "replaced: salts every prompt with the policy version",
        ),
        Reach(
            "_counted",
            How.CALLS,
            "vllm.v1.engine.async_llm:AsyncLLM.add_request",
            "request_id, prompt, params",
            "replaced: the engine has the request once it returns; `generate` calls it",
        ),
        Reach(
            "answered_or_dead",
            How.CALLS,
            "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async",
            "method",
            "replaced: control calls of an engine that dies fail; vLLM lets them wait",
        ),
        Reach("answered_or_dead", How.USES, "vllm.v1.engine.async_llm:AsyncLLM.errored", "", "the engine is dead"),
        Reach("answered_or_dead", How.USES, "vllm.v1.engine.async_llm:AsyncLLM.dead_error", "", "what it raises"),
        Reach("_salted", How.USES, "vllm.inputs:TokensPrompt.cache_salt", "", "a key of the prompt"),
        Reach(
            "probe", How.CALLS, "vllm.v1.engine.async_llm:AsyncLLM.is_sleeping", "", "any call that the engine answers"
        ),
        Reach("is_server_failure", How.USES, "vllm.v1.engine.exceptions:EngineDeadError", "", "by its name"),
        Reach("is_server_failure", How.USES, "vllm.v1.engine.exceptions:EngineGenerateError", "", "by its name"),
        Reach("LagKvLLMHttpServer", How.NAMES, "vllm.envs", "VLLM_RPC_BASE_PATH", "its sockets' folder"),
        Reach("ray_access", How.NAMES, "vllm.envs", "VLLM_HOST_IP", "loopback"),
        Reach("cpu/environment", How.NAMES, "vllm.envs", "VLLM_CPU_KVCACHE_SPACE", "GiB"),
        Reach("cpu/environment", How.NAMES, "vllm.envs", "VLLM_CPU_OMP_THREADS_BIND", "no pinning"),
        Reach(
            "config/hardware/gpu.yaml",
            How.USES,
            "verl.checkpoint_engine.nccl_checkpoint_engine",
            "",
            "nccl",
            only="cupy",
        ),
    ),
)

RAY = Place(
    "recipe/fully_async_policy/launch/ray_access.py and others (Ray)",
    "Everything under `ray._private`, `ray._raylet` and `ray._common`: none of it is a promise.",
    (
        Reach("started", How.CALLS, "ray:init", "address, _temp_dir", ""),
        Reach("started", How.CALLS, "ray:shutdown", "", ""),
        Reach("code_of_interruption", How.NAMES, "ray._private.worker", "sys.exit(signum)", "its handler of SIGTERM"),
        Reach("(several files)", How.CALLS, "ray:get", "object_refs, timeout", ""),
        Reach("(several files)", How.CALLS, "ray:remote", "", "a decorator; `options` of what it makes"),
        Reach("(several files)", How.CALLS, "ray:kill", "actor", ""),
        Reach("started", How.NAMES, "ray.runtime_env.runtime_env", '"worker_process_setup_hook"', "by its path"),
        Reach("(several files)", How.CALLS, "ray:get_runtime_context", "", "`get_node_id`, `get_job_id`"),
        Reach(
            "_remove", How.CALLS, "ray.util:remove_placement_group", "placement_group", "frees a dead sampler's devices"
        ),
        Reach(
            "_remove",
            How.CALLS,
            "ray.util.scheduling_strategies:NodeAffinitySchedulingStrategy",
            "node_id, soft",
            "a node",
        ),
        Reach("(several files)", How.USES, "ray.exceptions:RayError", "", "the base of what Ray raises"),
        Reach("(several files)", How.USES, "ray.exceptions:RayActorError", "", "a dead actor"),
        Reach("is_server_failure", How.USES, "ray.exceptions:RayTaskError.cause", "", "what was raised over there"),
        Reach(
            "_given_token", How.CALLS, "ray.exceptions:AuthenticationError", "message", "raised for a bad token file"
        ),
        Reach("ActorWatch", How.CALLS, "ray._private.state:actors", "job_id", "all actors of the run"),
        Reach("ActorWatch", How.CALLS, "ray:JobID.from_hex", "hex_id", "of the run"),
        Reach(
            "_free_devices", How.CALLS, "ray._private.state:available_resources_per_node", "", "by node, then by name"
        ),
        Reach("RunOnNodes", How.CALLS, "ray:nodes", "", "`NodeID` and `Alive` of each"),
        Reach("RunOnNodes", How.CALLS, "ray:wait", "ray_waitables, num_returns, timeout", "for other nodes' clean-up"),
        Reach("WeightFileCheckpointEngine", How.CALLS, "ray.util:get_node_ip_address", "", "for an error's text"),
        *(
            Reach("ActorWatch", How.NAMES, "ray._private.state", f'"{name}"', "a key of an actor's row")
            for name in ("ActorClassName", "State", "Pid")
        ),
        Reach("ray_session", How.USES, "ray._private.worker:global_worker", "", "its `node`"),
        Reach("ray_session", How.CALLS, "ray._private.node:Node.get_logs_dir_path", "", "where the logs are"),
        Reach("started", How.REPLACES, "ray._private.ray_constants:ENABLE_RAY_CLUSTER", "", "loopback; restored"),
        Reach("_shut_down", How.REPLACES, "ray._private.node:Node.kill_all_processes", "", "SIGTERM has our handler"),
        Reach("started", How.CALLS, "ray._raylet:Config.initialize", "config_list", "reads the environment again"),
        Reach("started", How.CALLS, "ray._raylet:AuthenticationTokenLoader.instance", "", "the token"),
        Reach("started", How.USES, "ray._raylet:AuthenticationTokenLoader.reset_cache", "", "reads it again"),
        Reach("_given_token", How.USES, "ray._raylet:AuthenticationTokenLoader.has_token", "", "whether Ray finds one"),
        Reach("_given_token", How.USES, "ray._raylet:AuthenticationTokenLoader.get_raw_token", "", "the token"),
        Reach(
            "private_folder", How.CALLS, "ray._common.utils:get_default_system_temp_dir", "", "RAY_TMPDIR, TMPDIR, /tmp"
        ),
        Reach(
            "_check_cluster", How.CALLS, "ray._private.services:canonicalize_bootstrap_address", "addr", "an address"
        ),
        Reach("_status", How.CALLS, "ray._common.tls_utils:load_certs_from_env", "", "with RAY_USE_TLS"),
        Reach(
            "_status",
            How.USES,
            "ray.core.generated.gcs_service_pb2:CheckAliveRequest",
            "",
            "the question that is asked",
        ),
        Reach("_ONE_MACHINE", How.NAMES, "ray._private.ray_constants", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "loopback"),
    ),
)

QUEUE = Place(
    "verl/verl_vcpo/trainer (TransferQueue)",
    "Whether tags of one key are still merged, and what a checkpoint of the queue holds.",
    (
        Reach("LagKTaskRunner.run", How.CALLS, "transfer_queue:init", "conf", "starts it"),
        Reach("end_queue", How.CALLS, "transfer_queue:close", "", "ends it"),
        Reach("end_queue", How.NAMES, "transfer_queue.client:TransferQueueClient", "self._loop", "runs its calls"),
        Reach("(several files)", How.CALLS, "transfer_queue:kv_list", "partition_id=None", "tags by key, by partition"),
        Reach("tags_of", How.CALLS, "transfer_queue:get_client", "", "for calls that the key-value interface lacks"),
        Reach(
            "tags_of",
            How.CALLS,
            "transfer_queue.client:TransferQueueClient.kv_retrieve_meta",
            "keys, partition_id, create",
            "of the stored ones of the keys, in their order",
        ),
        Reach(
            "tags_of",
            How.CALLS,
            "transfer_queue.client:TransferQueueClient.kv_retrieve_keys",
            "global_indexes, partition_id",
            "which ones these are",
        ),
        Reach("tags_of", How.USES, "transfer_queue:BatchMeta.size", "", "the number of stored keys"),
        Reach("tags_of", How.NAMES, "transfer_queue.metadata", "custom_meta", "the tags"),
        Reach("(several files)", How.CALLS, "transfer_queue:kv_clear", "keys, partition_id", ""),
        Reach(
            "(several files)", How.CALLS, "transfer_queue:kv_batch_get", "keys, partition_id, select_fields=None", ""
        ),
        Reach("(several files)", How.CALLS, "transfer_queue:kv_batch_put", "keys, partition_id, fields, tags", ""),
        Reach(
            "_run_agent_loop", How.CALLS, "transfer_queue:async_kv_put", "key, partition_id, tag", "why a prompt failed"
        ),
        Reach(
            "TBAReplay",
            How.CALLS,
            "transfer_queue:KVBatchMeta",
            "keys, tags, partition_id, fields, extra_info",
            "a batch",
        ),
        Reach("(several files)", How.CALLS, "transfer_queue:KVBatchMeta.reorder", "indexes", "the order of rows"),
    ),
)

SOCKETS = Place(
    "verl/verl_vcpo/common/queue_sockets.py",
    "Whether every connection of TransferQueue is one of `create_zmq_socket`, from a DEALER to a ROUTER.",
    (
        Reach(
            "encrypt",
            How.REPLACES,
            "transfer_queue.utils.zmq_utils:create_zmq_socket",
            "",
            "in every process of a run",
        ),
        Reach("_keys", How.CALLS, "ray._raylet:AuthenticationTokenLoader.instance", "", "the token, in every process"),
        Reach("_keys", How.USES, "ray._raylet:AuthenticationTokenLoader.has_token", "", "whether Ray finds one"),
        Reach("_keys", How.USES, "ray._raylet:AuthenticationTokenLoader.get_raw_token", "", "without its white space"),
    ),
)

TORCH = Place(
    "verl/verl_vcpo/common/distributed.py (torch)",
    "Where `torch.distributed` makes its store, in `rendezvous`.",
    (
        Reach(
            "keep_stores_on_loopback", How.NAMES, "torch.distributed.rendezvous", "TCPStore(", "a global of the module"
        ),
        Reach("_store", How.USES, "torch.distributed:TCPStore", "", "what ours makes, with `master_listen_fd`"),
        Reach(
            "_accept_repeated_gloo",
            How.CALLS,
            "torch.distributed.distributed_c10d:init_process_group",
            "backend",
            "replaced on a CPU: verl asks for gloo twice",
        ),
    ),
)

CHECKS = Place(
    "recipe/fully_async_policy/settings (verl)",
    "Which names there are to choose from, and how a reward is called.",
    (
        Reach(
            "consistency.py",
            How.USES,
            "verl.trainer.ppo.core_algos:ADV_ESTIMATOR_REGISTRY",
            "",
            "names of estimators, to suggest one",
        ),
        Reach(
            "reward.py",
            How.CALLS,
            "verl.utils.reward_score:default_compute_score",
            "data_source, solution_str, ground_truth, extra_info",
            "a run without a custom reward",
        ),
        Reach("logger.py", How.USES, "verl.utils.tracking:Tracking.supported_backend", "", "names of loggers"),
        Reach("_why_no_login", How.CALLS, "wandb.sdk.wandb_setup:singleton", "", "its `settings`, without a process"),
        Reach(
            "_why_no_login",
            How.CALLS,
            "wandb.sdk.lib.wbauth:authenticate_session",
            "host, source, prompt, update_session",
            "W&B's own search for a key",
        ),
        Reach(
            "consistency.py",
            How.NAMES,
            "megatron.core.models.common.language_module.language_module:LanguageModule._set_attention_backend",
            'check_and_set_env_variable("NVTE_FUSED_ATTN", 0, AttnBackend.flash)',
            "what the environment may say, for each backend",
        ),
    ),
)

METER = Place(
    "verl/verl_vcpo/samplers/meter.py",
    "vLLM's `StatLoggerBase`: what a logger is called for, and when an iteration is recorded.",
    (
        Reach(
            "SamplerMeter.record",
            How.NAMES,
            "vllm.v1.metrics.loggers:StatLoggerManager.record",
            "stat_logger.record(",
            "once for each iteration that has outputs",
        ),
        *(
            Reach("SamplerMeter", How.NAMES, f"vllm.v1.metrics.loggers:StatLoggerManager.{name}", call, "no effect")
            for name, call in (("record_sleep_state", "logger.record_sleep_state("), ("log", "logger.log()"))
        ),
        *(
            Reach("SamplerMeter.record", How.USES, f"vllm.v1.metrics.stats:{name}", "", "what an iteration did")
            for name in (
                "SchedulerStats.num_running_reqs",
                "SchedulerStats.num_waiting_reqs",
                "IterationStats.num_generation_tokens",
            )
        ),
    ),
)

PLACES = (VLLM, METER, RAY, QUEUE, SOCKETS, TORCH, CHECKS)
