"""Weight updates: what our checkpoint engine and its manager depend on in verl's, in Ray's and in cupy's."""

from tests.upstream.reach import How, Place, Reach

BASE = "verl.checkpoint_engine.base"
ENGINE, MANAGER = f"{BASE}:CheckpointEngine", f"{BASE}:CheckpointEngineManager"
NCCL = "verl.checkpoint_engine.nccl_checkpoint_engine"
VERLS = f"{NCCL}:NCCLCheckpointEngine"
COLLECTIVE = "ray.util.collective"

UPDATES = Place(
    "verl/verl_vcpo/weights/manager.py",
    "`CheckpointEngineManager.update_weights`: every wait in it, those in the methods that it calls included.",
    (
        Reach("BoundedCheckpointEngineManager", How.SUBCLASSES, MANAGER, "", "whose waits have a limit"),
        Reach("BoundedCheckpointEngineManager.__init__", How.OVERRIDES, f"{MANAGER}.__init__", "", "the limit"),
        Reach(
            "BoundedCheckpointEngineManager.update_weights", How.OVERRIDES, f"{MANAGER}.update_weights", "", "in all"
        ),
        *(
            Reach(f"BoundedCheckpointEngineManager.{name}", How.OVERRIDES, f"{MANAGER}.{name}", "", "names who is late")
            for name in (
                *("abort_replicas", "release_kv_cache_replicas", "resume_kv_cache_replicas"),
                "resume_generation_replicas",
            )
        ),
        *(
            Reach("_all_replicas", How.CALLS, f"verl.workers.rollout.replica:RolloutReplica.{name}", shape, "")
            for name, shape in (
                ("abort_all_requests", "reject_request"),
                *(("release_kv_cache", ""), ("resume_kv_cache", ""), ("resume_generation", "")),
            )
        ),
        Reach("_bounded_ray_get", How.REPLACES, f"{BASE}:ray", "", "`ray.get`, with a limit; for one update"),
        Reach("_bounded_ray_get", How.NAMES, f"{MANAGER}.build_process_group", "ray.get(", "what is bounded"),
        Reach("_bounded_ray_get", How.NAMES, f"{MANAGER}.update_weights", "ray.get(", "as above"),
        Reach("update_weights", How.CALLS, "verl.utils.ray_utils:auto_await", "func", "as theirs"),
        Reach("_names_of_workers", How.USES, "verl.single_controller.ray.base:RayWorkerGroup.workers", "", "actors"),
        Reach("_names_of_workers", How.USES, "ray.actor:ActorHandle._actor_id", "", "whose call a reference is of"),
        Reach("_get", How.CALLS, "ray:ObjectRef.task_id", "", "as above"),
        Reach("_get", How.CALLS, "ray:wait", "ray_waitables, num_returns, timeout", "who has answered"),
        Reach("_get", How.USES, "ray.exceptions:GetTimeoutError", "", "the limit"),
        Reach("LagKTrainer._setup", How.USES, f"{MANAGER}.config", "", "for ours"),
        Reach("LagKTrainer._setup", How.USES, f"{MANAGER}.actor_wg", "", "for ours"),
        Reach("update_weights", How.USES, f"{MANAGER}.backend_cls", "", "the checkpoint engine, for `give_up`"),
    ),
)

GROUP = Place(
    "verl/verl_vcpo/weights/nccl.py",
    "`NCCLCheckpointEngine.init_process_group`: when the group is formed, and what keeps it; Ray's `NCCLGroup`.",
    (
        Reach("RegroupingNCCLCheckpointEngine", How.SUBCLASSES, ENGINE, "", "where cupy is missing"),
        Reach(
            "RegroupingNCCLCheckpointEngine", How.SUBCLASSES, VERLS, "", "the group follows its members", only="cupy"
        ),
        Reach(
            "RegroupingNCCLCheckpointEngine",
            How.REGISTERS,
            f"{BASE}:CheckpointEngineRegistry.register",
            "backend",
            "backend nccl, in place of verl's",
        ),
        *(
            Reach(f"RegroupingNCCLCheckpointEngine.{name}", How.OVERRIDES, f"{ENGINE}.{name}", "", "")
            for name in ("prepare", "build_topology", "init_process_group", "send_weights", "receive_weights")
        ),
        Reach("_UPSTREAM", How.USES, "verl.checkpoint_engine:NCCLCheckpointEngine", "", "None where cupy is missing"),
        *(
            Reach(f"RegroupingNCCLCheckpointEngine.{name}", How.CALLS, f"{VERLS}.{name}", shape, "theirs", only="cupy")
            for name, shape in (
                ("prepare", ""),
                ("build_topology", "actor_wg_world_size, rollout_world_size, metadata"),
                ("init_process_group", "rank, world_size, master_metadata, num_senders"),
                ("send_weights", "weights, global_steps"),
                ("receive_weights", "global_steps"),
            )
        ),
        *(
            Reach("RegroupingNCCLCheckpointEngine", How.USES, f"{VERLS}.{name}", "", why, only="cupy")
            for name, why in (
                *(("group_name", "set"), ("send_buf", "set to None"), ("recv_buf", "set to None")),
                *(("socket", "set"), ("topic", "subscribed to"), ("ip", "set"), ("listen_port", "set")),
                *(("num_senders", "the others are subscribers"), ("world_size", "as above")),
            )
        ),
        *(
            Reach(f"RegroupingNCCLCheckpointEngine.{name}", How.OVERRIDES, f"{VERLS}.{name}", "", why, only="cupy")
            for name, why in (
                ("_start_zmq_server", "sees who subscribes"),
                ("_connect_zmq_client", "in the process's one context"),
            )
        ),
        Reach("_connect_zmq_client", How.USES, f"{NCCL}:MasterMetadata.zmq_ip", "", "and `zmq_port`", only="cupy"),
        Reach(
            "_Messages",
            How.NAMES,
            f"{NCCL}:BroadcastOperation._run",
            "self.socket.recv_pyobj()",
            "all it calls",
            only="cupy",
        ),
        Reach("_start_zmq_server", How.CALLS, "verl.utils.net_utils:is_valid_ipv6_address", "address", "as theirs"),
        Reach("_start_zmq_server", How.CALLS, "ray.util:get_node_ip_address", "", "as theirs"),
        Reach(
            "init_process_group",
            How.NAMES,
            f"{VERLS}.init_process_group",
            "not collective.is_group_initialized(self.group_name)",
            "a group of another name is formed",
            only="cupy",
        ),
        Reach("build_topology", How.NAMES, f"{VERLS}.build_topology", '"rank": actor_ranks', "its length", only="cupy"),
        Reach("_leave_group", How.CALLS, f"{COLLECTIVE}:is_group_initialized", "group_name", ""),
        Reach("_leave_group", How.CALLS, f"{COLLECTIVE}:destroy_collective_group", "group_name", ""),
        Reach("_abort", How.CALLS, f"{COLLECTIVE}.collective:get_group_handle", "group_name", "Ray's `NCCLGroup`"),
        Reach(
            "_abort",
            How.USES,
            "ray.util.collective.collective_group.nccl_collective_group:NCCLGroup._dev_comm_map",
            "",
            "its communicators",
            only="cupy",
        ),
        Reach(
            "_abort", How.USES, "cupy.cuda.nccl:NcclCommunicator.abort", "", "called; it has no signature", only="cupy"
        ),
        Reach("give_up", How.CALLS, "ray.experimental.internal_kv:_internal_kv_put", "key, value", "to all processes"),
        Reach("_abort_when_given_up", How.CALLS, "ray.experimental.internal_kv:_internal_kv_exists", "key", "as above"),
    ),
)

RECEIVER = Place(
    "verl/verl_vcpo/weights/receiver.py",
    "What `vllm_rollout.py` takes from `verl.third_party.vllm`, whose place is taken there.",
    (
        Reach("LagKCheckpointEngineWorker", How.SUBCLASSES, f"{BASE}:CheckpointEngineWorker", "", "the receiver"),
        Reach(
            "LagKCheckpointEngineWorker.__init__",
            How.OVERRIDES,
            f"{BASE}:CheckpointEngineWorker.__init__",
            "",
            "before theirs imports its client of the server",
        ),
        Reach(
            "LagKCheckpointEngineWorker.__init__",
            How.NAMES,
            "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter",
            'self.zmq_handle = f"ipc:///',
            "a path on disk, moved to the run's folder",
        ),
        Reach(
            "LagKvLLMReplica.get_ray_class_with_init_args",
            How.USES,
            "verl.single_controller.ray:RayClassWithInitArgs.cls",
            "",
            "the actor's class: set",
        ),
        Reach("SLEEP_LEVEL", How.USES, "verl.third_party.vllm:VLLM_SLEEP_LEVEL", "= 2", "the module imports vLLM"),
    ),
)

PLACES = (UPDATES, GROUP, RECEIVER)
