"""The start of a run: what our driver depends on in how verl starts queue, trainer, samplers and agent loops."""

from tests.upstream.reach import How, Place, Reach

BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
BALANCER = "verl.workers.rollout.router:GlobalRequestLoadBalancer"
MANAGER = "verl.workers.rollout.llm_server:LLMServerManager"

LAUNCH = Place(
    "verl/verl_vcpo/loop/main.py",
    "`TaskRunnerV1.run`, of which `LagKTaskRunner.run` is a copy that does not need its Ray actor.",
    (
        Reach(
            "LagKTaskRunner", How.SUBCLASSES, "verl.trainer.main_ppo:TaskRunnerV1", "", "the class inside the Ray actor"
        ),
        Reach("LagKTaskRunner.run", How.OVERRIDES, "verl.trainer.main_ppo:TaskRunnerV1.run", "", "in the driver"),
        Reach(
            "LagKTaskRunner.run",
            How.CALLS,
            "verl.trainer.main_ppo:TaskRunnerV1.init_agent_loop_manager",
            "",
            "our manager",
        ),
        Reach(
            "LagKTaskRunner.run",
            How.USES,
            "verl.trainer.main_ppo:TaskRunnerV1.agent_loop_manager",
            "",
            "None until they are started",
        ),
        Reach("LagKTaskRunner.run", How.CALLS, "verl.trainer.ppo.v1:get_trainer_cls", "name", "trainer_mode=lag_k"),
        Reach("LagKTaskRunner.run", How.CALLS, f"{BASE}.init", "", "starts all workers"),
        Reach("LagKTaskRunner.run", How.USES, f"{BASE}.logger", "", "`finish` at the end"),
        Reach("LagKTaskRunner.run", How.SETTING, "transfer_queue.enable", "", "set to true"),
        Reach(
            "_start_queue",
            How.CALLS,
            "verl.workers.rollout.replica:get_rollout_replica_class",
            "rollout",
            "imports what `replica.py` has registered",
        ),
    ),
)

REPLICAS = Place(
    "verl/verl_vcpo/samplers/replica.py",
    "That verl calls the loader of a registered class when it needs the class, and no sooner.",
    (
        Reach(
            "register",
            How.REGISTERS,
            "verl.workers.rollout.replica:RolloutReplicaRegistry.register",
            "name, loader",
            "`rollout.name=vllm` is ours",
        ),
    ),
)

EARLY_START = Place(
    "verl/verl_vcpo/samplers/early_start.py",
    "What `PPOTrainerSeparateAsync._setup` does before it creates its servers, and whether it still creates them last.",
    (
        Reach("BalancerFirst", How.SUBCLASSES, MANAGER, "", "the samplers' manager"),
        Reach("BalancerFirst.__init__", How.OVERRIDES, f"{MANAGER}.__init__", "", "its balancer comes first"),
        Reach("BalancerFirst.__init__", How.CALLS, f"{MANAGER}._init_global_load_balancer", "", "without servers"),
        Reach("BalancerFirst.start", How.CALLS, f"{MANAGER}._initialize_llm_servers", "start_rank=None", "from rank 0"),
        Reach("BalancerFirst.start", How.CALLS, f"{BALANCER}.add_servers", "servers", "as an elastic replica's"),
        Reach(
            "EarlyStart",
            How.REPLACES,
            "verl.trainer.ppo.v1.trainer_separate_async:LLMServerManager",
            "",
            "in `_setup`: `create` returns the samplers that are starting",
        ),
        Reach(
            "has_devices",
            How.USES,
            "verl.single_controller.ray.base:RayResourcePool.pgs",
            "",
            "set once Ray has given the devices",
        ),
    ),
)

WORKER_GROUP = Place(
    "verl/verl_vcpo/loop/worker_group.py",
    "Which range of ports `RayWorkerGroup` looks through, and when the port is bound.",
    (
        Reach(
            "KeptPortWorkerGroup",
            How.SUBCLASSES,
            "verl.single_controller.ray.base:RayWorkerGroup",
            "",
            "of the trainer",
        ),
        Reach(
            "KeptPortWorkerGroup.__init__",
            How.OVERRIDES,
            "verl.single_controller.ray.base:RayWorkerGroup.__init__",
            "",
            "a range of ports",
        ),
        Reach(
            "KeptPortWorkerGroup", How.NAMES, "verl.single_controller.ray.base", '"master_port_range"', "an argument"
        ),
        Reach("kept_port", How.REPLACES, "verl.trainer.ppo.v1.trainer_base:RayWorkerGroup", "", "in `_setup`"),
    ),
)

SKIPPED = Place(
    "verl/verl_vcpo/common/skipped_imports.py",
    "Whether `hccl_checkpoint_engine.py` still imports vLLM before it looks for an NPU.",
    (
        Reach(
            "ENGINE_OF_NPUS",
            How.NAMES,
            "verl.checkpoint_engine",
            "from .hccl_checkpoint_engine import HCCLCheckpointEngine",
            "an import that may fail",
        ),
    ),
)

PLACES = (LAUNCH, REPLICAS, WORKER_GROUP, EARLY_START, SKIPPED)
