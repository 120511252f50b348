"""Agent loops: what our workers and their manager depend on in verl's."""

from tests.upstream.reach import How, Place, Reach
from tests.upstream.trainer import BASE, LOOP

LOOPS = Place(
    "verl/verl_vcpo/samplers/agent_loop.py",
    "How `AgentLoopWorkerTQ._run_prompt` ends where its task is cancelled: nothing may be written of it afterwards.",
    (
        Reach("LagKAgentLoopWorker", How.SUBCLASSES, f"{LOOP}:AgentLoopWorkerTQ", "", "the class inside the Ray actor"),
        Reach(
            "LagKAgentLoopWorker.__init__", How.OVERRIDES, f"{LOOP}:AgentLoopWorkerTQ.__init__", "", "prompts by uid"
        ),
        Reach(
            "LagKAgentLoopWorker._run_prompt", How.OVERRIDES, f"{LOOP}:AgentLoopWorkerTQ._run_prompt", "", "keeps it"
        ),
        Reach(
            "LagKAgentLoopWorker._run_agent_loop",
            How.OVERRIDES,
            f"{LOOP}:AgentLoopWorkerTQ._run_agent_loop",
            "",
            "random seeds; why a prompt failed",
        ),
        Reach(
            "LagKAgentLoopWorker._run_agent_loop",
            How.NAMES,
            "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop.run",
            'kwargs["raw_prompt"]',
            "the prompt, where it failed",
        ),
        Reach("LagKAgentLoopWorker._check_score", How.USES, f"{LOOP}:AgentLoopWorkerTQ.tokenizer", "", "the response"),
        Reach(
            "LagKAgentLoopWorker._compute_score",
            How.OVERRIDES,
            f"{LOOP}:AgentLoopWorkerTQ._compute_score",
            "",
            "stores the reward beside the tokens; that of the last output is the reward of all",
        ),
        Reach(
            "LagKAgentLoopWorker.begin_again",
            How.USES,
            f"{LOOP}:AgentLoopWorkerTQ.background_tasks",
            "",
            "tasks that nobody awaits",
        ),
        Reach("begin_again", How.NAMES, LOOP, 'kwargs["global_steps"]', "the step in a trajectory's tag"),
        Reach(
            "begin_again",
            How.NAMES,
            "verl.experimental.agent_loop.agent_loop:get_trajectory_info",
            '"step"',
            "the step of a prompt's submission",
        ),
        Reach("LagKAgentLoopManager", How.SUBCLASSES, f"{LOOP}:AgentLoopManagerTQ", "", "stops, resubmits"),
        Reach("LagKAgentLoopManager.__init__", How.OVERRIDES, f"{LOOP}:AgentLoopManagerTQ.__init__", "", "our workers"),
        Reach(
            "LagKAgentLoopManager.generate_sequences",
            How.OVERRIDES,
            f"{LOOP}:AgentLoopManagerTQ.generate_sequences",
            "",
            "keeps the prompts of a validation",
        ),
        Reach(
            "LagKAgentLoopManager",
            How.USES,
            f"{LOOP}:AgentLoopManagerTQ.agent_loop_workers_class",
            "",
            "set after theirs has set it",
        ),
        Reach("LagKAgentLoopManager", How.USES, f"{LOOP}:AgentLoopManagerTQ.agent_loop_workers", "", "actors"),
        Reach(
            "LagKAgentLoopManager.resubmit",
            How.CALLS,
            f"{LOOP}:AgentLoopManagerTQ.generate_sequences",
            "prompts",
            "submits; does not wait",
        ),
        Reach("resubmit", How.NAMES, f"{BASE}._submit_batch_to_rollout", '"is_prompt": True', "the tag of a prompt"),
        Reach("resubmit", How.NAMES, f"{BASE}._submit_batch_to_rollout", '"status": "pending"', "the tag of a prompt"),
        Reach("resubmit", How.NAMES, f"{BASE}._submit_batch_to_rollout", 'partition_id="train"', "where prompts lie"),
        Reach("_run_agent_loop", How.NAMES, f"{LOOP}:AgentLoopWorkerTQ", "session_id=i", "the place of a sample"),
        Reach(
            "_run_agent_loop",
            How.NAMES,
            "verl.experimental.agent_loop.agent_loop:get_trajectory_info",
            '"sample_index"',
            "the place of a sample",
        ),
    ),
)

TOOLS = Place(
    "verl/verl_vcpo/user_code/tool_limits.py",
    "Which methods of a tool `ToolAgentLoop._call_tool` calls, and which errors of them it tells to the model.",
    (
        Reach(
            "LimitedFunctionTool",
            How.SUBCLASSES,
            "verl.tools.function_tool:FunctionTool",
            "",
            "name, fn, schema, async",
        ),
        Reach(
            "LimitedFunctionTool.call",
            How.OVERRIDES,
            "verl.tools.function_tool:FunctionTool.call",
            "",
            "calls the function in another process",
        ),
        *(
            Reach("_METHODS", How.USES, f"verl.tools.base_tool:BaseTool.{name}", "", "called in another thread")
            for name in ("create", "execute", "calc_reward", "release")
        ),
        Reach(
            "tool_function.py",
            How.USES,
            "verl.tools.function_tool:FUNCTION_TOOL_REGISTRY",
            "",
            "where a file has imported verl itself",
        ),
        Reach(
            "ToolFailure",
            How.NAMES,
            "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop._call_tool",
            "except Exception as e",
            "what it tells to the model",
        ),
        Reach(
            "LagKAgentLoopWorker.__init__",
            How.NAMES,
            "verl.experimental.agent_loop.agent_loop:AgentLoopWorker.__init__",
            "self.tools = load_all_tools(",
            "the worker's tools",
        ),
    ),
)

PLACES = (LOOPS, TOOLS)
