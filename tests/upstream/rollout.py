"""Samplers, clients, agent loops and the simulator: what they depend on in verl's."""

from tests.upstream.reach import How, Place, Reach

REPLICA = "verl.workers.rollout.replica:RolloutReplica"
ROLLOUT = "verl.workers.rollout.vllm_rollout"
SERVER, VLLM_REPLICA = f"{ROLLOUT}.vllm_async_server:vLLMHttpServer", f"{ROLLOUT}.vllm_async_server:vLLMReplica"
CLIENT, MANAGER = (f"verl.workers.rollout.llm_server:{name}" for name in ("LLMServerClient", "LLMServerManager"))
BALANCER = "verl.workers.rollout.router:GlobalRequestLoadBalancer"
AGENT = "verl.experimental.agent_loop.agent_loop"
V1 = "verl.trainer.ppo.v1"


SAMPLERS = Place(
    "verl/verl_vcpo/samplers/vllm_server.py",
    "`vLLMHttpServer.generate` and `abort_all_requests`: when a request has started, and what stops it.",
    (
        Reach("LagKvLLMHttpServer", How.SUBCLASSES, SERVER, "", "the sampler's server"),
        Reach("LagKvLLMHttpServer.__init__", How.OVERRIDES, f"{SERVER}.__init__", "", "versions by request"),
        Reach(
            "LagKvLLMHttpServer._get_worker_extension_cls",
            How.OVERRIDES,
            f"{SERVER}._get_worker_extension_cls",
            "",
            "ours",
        ),
        Reach("LagKvLLMHttpServer.run_server", How.OVERRIDES, f"{SERVER}.run_server", "", "wraps the engine's methods"),
        Reach(
            "LagKvLLMHttpServer.run_server",
            How.USES,
            "vllm.v1.engine.async_llm:AsyncLLM.logger_manager",
            "",
            "None with rollout.disable_log_stats=true",
        ),
        Reach(
            "LagKvLLMHttpServer._park_until_admitted",
            How.OVERRIDES,
            f"{SERVER}._park_until_admitted",
            "",
            "the version with which a request starts: no await follows theirs before the engine has it",
        ),
        Reach(
            "LagKvLLMHttpServer._admitting",
            How.NAMES,
            f"{SERVER}.abort_all_requests",
            "while self._admitting > 0:",
            "theirs counts requests until their first token; ours, until the engine has them",
        ),
        Reach("LagKvLLMHttpServer.generate", How.OVERRIDES, f"{SERVER}.generate", "", "`min_global_steps`"),
        Reach("LagKvLLMHttpServer", How.USES, f"{SERVER}.engine", "", "vLLM's AsyncLLM"),
        Reach("LagKvLLMHttpServer", How.USES, f"{SERVER}.global_steps", "", "the policy version"),
        Reach("LagKvLLMHttpServer", How.USES, f"{SERVER}.node_rank", "", "which server has the engine"),
        Reach("LagKvLLMHttpServer", How.USES, f"{SERVER}.config", "", "`custom`"),
        Reach("_salted", How.NAMES, f"{SERVER}.generate", "prompt=prompt,", "the engine is called by keyword"),
        Reach(
            "_pausing",
            How.NAMES,
            f"{SERVER}.abort_all_requests",
            "self.engine.pause_generation(",
            "what it is called for",
        ),
        Reach("LagKvLLMReplica", How.SUBCLASSES, VLLM_REPLICA, "", "its servers"),
        Reach("LagKvLLMReplica.__init__", How.OVERRIDES, f"{VLLM_REPLICA}.__init__", "", "our server"),
        Reach(
            "LagKvLLMReplica.release_kv_cache", How.OVERRIDES, f"{VLLM_REPLICA}.release_kv_cache", "", "kv_cache=keep"
        ),
        Reach("LagKvLLMReplica.resume_kv_cache", How.OVERRIDES, f"{REPLICA}.resume_kv_cache", "", "kv_cache=keep"),
        Reach(
            "LagKvLLMReplica.get_ray_class_with_init_args",
            How.OVERRIDES,
            f"{REPLICA}.get_ray_class_with_init_args",
            "",
            "our receiver of weights",
        ),
        Reach(
            "LagKvLLMReplica.max_concurrency",
            How.OVERRIDES,
            f"{REPLICA}.max_concurrency",
            "",
            "control calls never wait for requests",
        ),
        Reach(
            "LagKvLLMHttpServer.drop_requests", How.CALLS, "vllm.v1.engine.async_llm:AsyncLLM.abort", "request_id", ""
        ),
        Reach("LagKvLLMReplica", How.USES, f"{VLLM_REPLICA}.server_class", "", "set after theirs has set it"),
        Reach(
            "keeps_kv_cache", How.USES, "verl.workers.config:RolloutConfig.custom", "= None", "carries async.kv_cache"
        ),
    ),
)

CLIENTS = Place(
    "verl/verl_vcpo/samplers/client.py",
    "`FullyAsyncLLMServerClient.generate`, which `ResumingLLMClient` stands in for: what it joins of two outputs.",
    (
        Reach("ResumingLLMClient", How.SUBCLASSES, CLIENT, "", "the samplers' client"),
        Reach("ResumingLLMClient.__init__", How.OVERRIDES, f"{CLIENT}.__init__", "", "servers by request, admission"),
        Reach("ResumingLLMClient.generate", How.OVERRIDES, f"{CLIENT}.generate", "", "goes on where an update aborted"),
        Reach(
            "ResumingLLMClient._acquire_server", How.OVERRIDES, f"{CLIENT}._acquire_server", "", "waits for a server"
        ),
        Reach(
            "ResumingLLMClient._release_server",
            How.OVERRIDES,
            f"{CLIENT}._release_server",
            "",
            "a response keeps its server over weight updates",
        ),
        Reach(
            "ResumingLLMClient._vllm_request_id",
            How.OVERRIDES,
            f"{CLIENT}._vllm_request_id",
            "",
            "remembers the id, to end the request",
        ),
        Reach("ResumingLLMClient", How.USES, f"{CLIENT}._load_balancer", "", "takes out a server that failed"),
        Reach("_acquire_server", How.NAMES, BALANCER, '"No available servers in load balancer"', "a message"),
        Reach("_ABORTED", How.NAMES, SERVER, 'stop_reason = "aborted"', "a stop reason"),
        Reach("generate", How.NAMES, CLIENT, '"min_global_steps"', "a field of the output"),
        Reach(
            "_joined",
            How.CALLS,
            "verl.workers.rollout.replica:TokenOutput",
            "token_ids, log_probs, routed_experts, stop_reason, num_preempted, extra_fields",
            "all its fields: a new one has to be joined",
        ),
        Reach("generate", How.CALLS, "verl.utils.tokenizer:normalize_token_ids", "tokenized_output", ""),
        Reach("LagKTrainer", How.CALLS, f"{MANAGER}.get_client", "client_cls", "our client"),
    ),
)

ROUTER = Place(
    "verl/verl_vcpo/samplers/router.py",
    "How verl builds a balancer from `router.yaml`, and which of its methods clients call.",
    (
        Reach("IdleTimeLoadBalancer", How.SUBCLASSES, BALANCER, "", "the balancer, with clocks"),
        Reach("IdleTimeLoadBalancer.__init__", How.OVERRIDES, f"{BALANCER}.__init__", "", "clocks"),
        Reach("IdleTimeLoadBalancer.acquire_server", How.OVERRIDES, f"{BALANCER}.acquire_server", "", "clocks"),
        Reach("IdleTimeLoadBalancer.release_server", How.OVERRIDES, f"{BALANCER}.release_server", "", "clocks"),
        Reach("IdleTimeLoadBalancer.add_servers", How.OVERRIDES, f"{BALANCER}.add_servers", "", "clocks"),
        Reach("IdleTimeLoadBalancer.remove_servers", How.OVERRIDES, f"{BALANCER}.remove_servers", "", "clocks"),
        Reach("IdleTimeLoadBalancer", How.USES, f"{BALANCER}._inflight_requests", "", "who is idle"),
        Reach("IdleTimeLoadBalancer", How.USES, f"{BALANCER}._servers", "", "who is in the pool"),
        Reach("router.yaml", How.NAMES, "verl.workers.rollout.router", '"router_class"', "the key of our class"),
    ),
)

KEEPER = Place(
    "verl/verl_vcpo/samplers/keeper.py",
    "How `LLMServerManager` starts replicas, and what else has come to hold them: a replacement has to be in all.",
    (
        Reach("SamplerKeeper", How.USES, f"{MANAGER}.global_load_balancer", "", "a Ray actor"),
        Reach("SamplerKeeper", How.CALLS, f"{BALANCER}.get_all_servers", "", "who is in the pool"),
        Reach("SamplerKeeper", How.USES, f"{MANAGER}.rollout_replicas", "", "set"),
        Reach("SamplerKeeper", How.USES, f"{MANAGER}.rollout_replica_class", "", "for a replacement"),
        Reach("SamplerKeeper", How.USES, f"{MANAGER}.rollout_config", "", "as above"),
        Reach("SamplerKeeper", How.USES, f"{MANAGER}.model_config", "", "as above"),
        Reach(
            "SamplerKeeper",
            How.CALLS,
            VLLM_REPLICA,
            "replica_rank, config, model_config, gpus_per_node",
            "a replacement",
        ),
        Reach("SamplerKeeper", How.CALLS, f"{REPLICA}.init_standalone", "", "starts it"),
        Reach("SamplerKeeper", How.USES, "verl.checkpoint_engine.base:CheckpointEngineManager.replicas", "", "set"),
        Reach(
            "SamplerKeeper",
            How.CALLS,
            "verl.checkpoint_engine.base:CheckpointEngineManager.update_weights",
            "global_steps",
            "of all samplers, also those that are alive",
        ),
        *(
            Reach("SamplerKeeper", How.USES, f"{VLLM_REPLICA}.{name}", "", "what is left of a dead sampler")
            for name in ("_server_address", "_server_handle", "servers", "workers", "replica_rank", "resource_pool")
        ),
        Reach("SamplerKeeper", How.USES, f"{VLLM_REPLICA}.world_size", "", "the devices of a sampler"),
        Reach("_remove", How.USES, "verl.single_controller.ray.base:RayResourcePool.pgs", "", "placement groups"),
        Reach("_free_devices", How.CALLS, "verl.plugin.platform:get_platform", "", "Ray's name of the devices"),
    ),
)

WEIGHTS = Place(
    "verl/verl_vcpo/samplers/vllm_worker.py",
    "Which socket vLLM's worker takes weights from, and who waits for whom there.",
    (
        Reach(
            "LagKWorkerExtension",
            How.SUBCLASSES,
            f"{ROLLOUT}.utils:vLLMColocateWorkerExtension",
            "",
            "in vLLM's worker",
        ),
        Reach(
            "LagKWorkerExtension._get_zmq_handle",
            How.OVERRIDES,
            f"{ROLLOUT}.utils:vLLMColocateWorkerExtension._get_zmq_handle",
            "",
            "in the run's folder",
        ),
        Reach(
            "_get_zmq_handle", How.NAMES, f"{ROLLOUT}.utils:vLLMColocateWorkerExtension", 'f"ipc:///', "a path on disk"
        ),
        Reach(
            "_get_zmq_handle",
            How.NAMES,
            f"{ROLLOUT}.bucketed_weight_transfer:BucketedWeightSender._init_socket",
            "self.socket.bind(",
            "the sender makes the socket",
        ),
    ),
)

TASKS = Place(
    "recipe/tasks/tool_use/agent_loop.py",
    "`ToolAgentLoop.run`: what an agent loop has to hand back.",
    (
        Reach("SimpleTIRAgentLoop", How.SUBCLASSES, f"{AGENT}:AgentLoopBase", "", "an agent loop"),
        Reach("SimpleTIRAgentLoop", How.REGISTERS, f"{AGENT}:register", "agent_name", "simpletir"),
        Reach("SimpleTIRAgentLoop.__init__", How.OVERRIDES, f"{AGENT}:AgentLoopBase.__init__", "", "settings of ours"),
        Reach("SimpleTIRAgentLoop.run", How.OVERRIDES, f"{AGENT}:AgentLoopBase.run", "", "one trajectory"),
        Reach("run", How.CALLS, f"{AGENT}:AgentLoopBase.ct_build_initial_tokens", "messages", "the prompt's tokens"),
        Reach("run", How.USES, f"{AGENT}:AgentLoopBase.server_manager", "", "our client"),
        Reach("run", How.USES, f"{AGENT}:AgentLoopBase.tokenizer", "", ""),
        Reach("run", How.USES, f"{AGENT}:AgentLoopBase.rollout_config", "", "`response_length`"),
        Reach(
            "_output",
            How.CALLS,
            f"{AGENT}:AgentLoopOutput",
            "prompt_ids, response_ids, response_mask, response_logprobs, routed_experts, multi_modal_data, num_turns, "
            "metrics, extra_fields",
            "the trajectory",
        ),
        Reach("run", How.CALLS, "verl.utils.profiler:simple_timer", "name, timing_raw", ""),
        Reach("run", How.CALLS, "verl.utils.rollout_trace:rollout_trace_op", "func", ""),
        Reach("agent_loop.yaml", How.SETTING, "actor_rollout_ref.rollout.agent.default_agent_loop", "", "simpletir"),
    ),
)

SIMULATOR = Place(
    "lab/simulator, lab",
    "Signatures of losses and estimators.",
    (
        Reach("LossMethod", How.CALLS, "verl.trainer.ppo.core_algos:get_policy_loss_fn", "name", "verl's losses"),
        Reach(
            "LossMethod",
            How.CALLS,
            "verl.trainer.ppo.core_algos:get_adv_estimator_fn",
            "name_or_enum",
            "its estimators",
        ),
        Reach(
            "LossMethod",
            How.CALLS,
            "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_rejection_mask",
            "old_log_prob, rollout_log_prob, response_mask, rollout_is, rollout_is_threshold, "
            "rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold",
            "its corrections",
        ),
        Reach(
            "ActorCritic",
            How.CALLS,
            "verl.trainer.ppo.core_algos:compute_gae_advantage_return",
            "token_level_rewards, values, response_mask, gamma, lam",
            "method a2c",
        ),
        Reach(
            "ActorCritic",
            How.CALLS,
            "verl.trainer.ppo.core_algos:compute_value_loss",
            "vpreds, returns, values, response_mask, cliprange_value, loss_agg_mode",
            "method a2c",
        ),
        Reach(
            "order_of_rows",
            How.CALLS,
            "verl.trainer.ppo.utils:create_rl_sampler",
            "data_config, dataset",
            "order of rows",
        ),
    ),
)

CONTROL_LOOP = Place(
    "tests/reliability/simulated_loop.py",
    "What `PPOTrainer._setup` and `PPOTrainerSeparateAsync._setup` give the trainer; the order of calls in `fit`.",
    (
        Reach(
            "SimulatedTrainer.__init__", How.OVERRIDES, f"{V1}.trainer_base:PPOTrainer.__init__", "", "parts to inject"
        ),
        Reach("SimulatedTrainer._setup", How.OVERRIDES, f"{V1}.trainer_base:PPOTrainer._setup", "", "no processes"),
        Reach(
            "SimulatedTrainer._init_dataloader",
            How.OVERRIDES,
            f"{V1}.trainer_base:PPOTrainer._init_dataloader",
            "",
            "endless data",
        ),
        Reach(
            "SimulatedTrainer._save_checkpoint",
            How.OVERRIDES,
            f"{V1}.trainer_base:PPOTrainer._save_checkpoint",
            "",
            "kept in memory",
        ),
        Reach(
            "SimulatedTrainer._step_once", How.OVERRIDES, f"{V1}.trainer_base:PPOTrainer._step_once", "", "no update"
        ),
        Reach(
            "SimulatedTrainer._compute_metrics",
            How.OVERRIDES,
            f"{V1}.trainer_base:PPOTrainer._compute_metrics",
            "",
            "no tokens to measure",
        ),
        Reach(
            "SimulatedTrainer._setup",
            How.USES,
            f"{V1}.trainer_separate_async:HybridEngineMode.TRAINER",
            "",
            "as without colocated samplers",
        ),
        Reach("_in_memory", How.REPLACES, f"{V1}.trainer_base:tq", "", "TransferQueue in memory"),
        Reach("_in_memory", How.REPLACES, f"{V1}.replay_buffer:tq", "", "as above"),
        *(
            Reach("_in_memory", How.REPLACES, f"{V1}.trainer_base:{name}", "", "`fit` shows and tracks nothing")
            for name in ("SkipManager", "Tracking", "OmegaConf", "tqdm", "pprint")
        ),
    ),
)

COUNTING_RUN = Place(
    "tests/reliability/scale_run.py",
    "As of the simulated loop; what `_setup` reads of the worker group that the pausing actor stands in for.",
    (
        Reach("CountingTrainer._setup", How.OVERRIDES, f"{V1}.trainer_base:PPOTrainer._setup", "", "no Megatron"),
        Reach(
            "CountingTrainer.on_init_end", How.OVERRIDES, f"{V1}.trainer_base:PPOTrainer.on_init_end", "", "measures"
        ),
        Reach(
            "CountingTrainer.on_train_begin",
            How.OVERRIDES,
            f"{V1}.trainer_base:PPOTrainer.on_train_begin",
            "",
            "measures",
        ),
        Reach(
            "CountingTrainer._submit_batch_to_rollout",
            How.OVERRIDES,
            f"{V1}.trainer_base:PPOTrainer._submit_batch_to_rollout",
            "",
            "counts",
        ),
        Reach("CountingTrainer.fit", How.OVERRIDES, f"{V1}.trainer_base:PPOTrainer.fit", "", "measures"),
        Reach(
            "CountingTrainer._setup",
            How.CALLS,
            "verl.experimental.reward_loop:RewardLoopManager",
            "config, rm_resource_pool",
            "the real rewards",
        ),
        Reach("measure", How.REPLACES, f"{V1}.trainer_base:TRAINER_REGISTRY", "", "the trainer of this benchmark"),
    ),
)

COUNTING_ENGINE = Place(
    "tests/kit/counting_engine.py",
    "What verl's server calls of vLLM's AsyncLLM, and reads of its outputs.",
    (
        Reach("TokenCountingvLLMHttpServer.launch_server", How.OVERRIDES, f"{SERVER}.launch_server", "", "no vLLM"),
        Reach("TokenCountingReplica.launch_servers", How.OVERRIDES, f"{VLLM_REPLICA}.launch_servers", "", "no workers"),
        Reach(
            "TokenCountingReplica.init_standalone", How.OVERRIDES, f"{VLLM_REPLICA}.init_standalone", "", "no devices"
        ),
    ),
)

SLOW_TOOL = Place(
    "lab/cost/slow_tool.py",
    "As `recipe/tasks/tool_use/agent_loop.py`.",
    (
        Reach(
            "SlowToolAgentLoop",
            How.SUBCLASSES,
            "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop",
            "",
            "a tool that sleeps",
        ),
        Reach(
            "SlowToolAgentLoop.run",
            How.OVERRIDES,
            "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop.run",
            "",
            "sleeps first",
        ),
    ),
)

LONG_RESPONSES = Place(
    "tests/reliability/long_responses.py",
    "As `recipe/tasks/tool_use/agent_loop.py`.",
    (
        Reach(
            "LongResponses.run",
            How.OVERRIDES,
            "verl.experimental.agent_loop.agent_loop:AgentLoopBase.run",
            "",
            "answers at once",
        ),
        Reach(
            "LongResponses.run",
            How.USES,
            "verl.experimental.agent_loop.agent_loop:AgentLoopMetrics",
            "",
            "a field of the output",
        ),
    ),
)

MAKING = Place(
    "verl/verl_vcpo/samplers/agent_loop_class.py",
    "What `AgentLoopWorker._run_agent_loop` gives `hydra.utils.instantiate`, and whether it still does for each.",
    (Reach("make_without_copies", How.REPLACES, "verl.experimental.agent_loop.agent_loop:hydra", "", "our `make`"),),
)


PLACES = (
    SAMPLERS,
    CLIENTS,
    ROUTER,
    KEEPER,
    WEIGHTS,
    TASKS,
    SIMULATOR,
    CONTROL_LOOP,
    COUNTING_RUN,
    COUNTING_ENGINE,
    SLOW_TOOL,
    LONG_RESPONSES,
    MAKING,
)
