"""The columns of the data that mean something to a run, whatever they mean to the user."""

KEPT = ("uid", "session_id", "global_steps", "index", "data_source", "reward_model", "extra_info", "raw_prompt")
"""What of a prompt goes with its responses to the reward and to the trainer. Every other column ends at the agent loop:
verl stores a prompt's columns over the agent loop's output, and the trainer's engine takes names for its settings."""

AGENT_LOOP = "agent_name"
GREEDY = "__do_sample__"

OF_THE_LOOP = (
    *(AGENT_LOOP, GREEDY, "validate", "uid", "session_id", "global_steps"),
    *("self", "trajectory", "trace", "sampling_params", "priority", "output"),
)
"""Columns that verl's workers would take for their own arguments. The dataset leaves these out."""

OF_THE_ROW = {
    "index": "extra_info.index",
    "tools_kwargs": "extra_info.tools_kwargs",
    "interaction_kwargs": "extra_info.interaction_kwargs",
    "raw_prompt": "data.prompt_key",
}
"""Columns that verl's dataset writes itself, and what it writes them from."""

OF_A_RESPONSE = (
    *("prompts", "responses", "response_mask", "attention_mask", "input_ids", "position_ids", "loss_mask"),
    *("rm_scores", "reward_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "log_probs", "entropy"),
    *("values", "advantages", "returns", "token_level_scores", "token_level_rewards", "rollout_is_weights"),
    *("routed_experts", "teacher_ids", "teacher_logprobs", "multi_modal_data", "multi_modal_inputs"),
    *("num_turns", "metrics", "extra_fields", "mm_processor_kwargs", "mm_processor_output", "dummy_tensor"),
)
"""Names of what a run makes for a response. A column of such a name stays with the agent loop, as every other does."""

OF_THE_REWARD = (
    *("num_turns", "rollout_reward_scores", "turn_scores", "tool_rewards", "global_steps", "min_global_steps"),
    *("max_global_steps", "num_cached_tokens", "truncated", "tool_use"),
)
"""Keys of `extra_info` that are the response's own by the time the reward gets them."""
