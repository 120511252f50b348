"""What others call a setting or a method: the published repository, verl's other trainers, vLLM, other packages."""

import re
import unicodedata

METHODS = {
    "grpo": "its gradient is method=none (no correction), tis_seq or tis_token (truncated weights), or ppo (its clip)",
    "rloo": "give method=none algorithm.adv_estimator=rloo",
    "reinforce": "it is method=none",
    "reinforce++": "give method=none algorithm.adv_estimator=reinforce_plus_plus",
    "reinforce_plus_plus": "give method=none algorithm.adv_estimator=reinforce_plus_plus",
    "dr_grpo": "give method=none algorithm.norm_adv_by_std_in_grpo=false",
    "dapo": "give method=ppo actor_rollout_ref.actor.clip_ratio_high=0.28 algorithm.filter_groups.enable=true",
    "tis": "it is method=tis_seq (weights of sequences) or tis_token (of tokens)",
    "is": "it is method=tis_seq (weights of sequences) or tis_token (of tokens)",
    "areal": "it is method=decoupled_ppo",
    "opob": "it is method=vcpo_opob",
    "ess": "it is method=vcpo_ess",
    "half_mean": "it is method=vcpo_half_mean",
}
"""Names of methods in the field, and what gives them here."""
WORDS = {
    "learning_rate": "lr",
    "batch_size": "train_batch_size",
    "max_steps": "total_training_steps",
    "total_steps": "total_training_steps",
    "num_steps": "total_training_steps",
    "num_train_epochs": "total_epochs",
    "num_generations": "n",
    "max_new_tokens": "max_response_length",
    "max_completion_length": "max_response_length",
}
"""What other trainers call a setting: last part -> ours."""
_ALWAYS = "always so here; leave it out"
_BOTH = "true in both sections is method=vcpo_published, the paper's formulas are method=vcpo vcpo.ess_part=whole"
_NOT_OFFERED = "not offered here; leave it out"
PUBLISHED = {
    "async_training.staleness_threshold": "give async.lag={value}",
    "async_training.trigger_parameter_sync_step": "always 1 here: samplers get every update; leave it out",
    "async_training.require_batches": "give data.train_batch_size: {value} times ppo_mini_batch_size",
    "async_training.compute_prox_log_prob": "true is method=decoupled_ppo; leave it out",
    "async_training.bsz_per_dp_rank": "give actor_rollout_ref.rollout.max_num_seqs: {value} times rollout.n",
    **dict.fromkeys(
        (
            *("async_training.partial_rollout", "async_training.save_queue_state", "use_rollout_log_probs"),
            *("async_training.skip_recompute_old_log_prob", "grad_baselining.use_is_weights"),
        ),
        _ALWAYS,
    ),
    "async_training": "async.lag, async.on_deadline and async.kv_cache take its place",
    "ess_scaling.enable": f"{_BOTH}; alone method=vcpo_ess; false is method=vcpo_opob",
    "ess_scaling.scaling_rule": "give vcpo.step_size_rule={value}",
    "ess_scaling.base_ess_ratio": "give vcpo.base_ess_ratio={value}",
    "ess_scaling": "method=vcpo scales the step; give vcpo.step_size_rule, vcpo.base_ess_ratio or vcpo.ess_part",
    "grad_baselining.enable": f"{_BOTH}; alone method=vcpo_opob; false is method=vcpo_ess",
    "grad_baselining.scope": "give vcpo.opob_scope={value}",
    "grad_baselining.norm_by_std": "give vcpo.norm_by_std={value}",
    **dict.fromkeys(
        (
            *("ess_scaling.use_clipped", "grad_baselining.agg_mode", "grad_baselining.use_clipped_is_ratios"),
            "grad_baselining.normalize_by_length",
        ),
        _NOT_OFFERED,
    ),
    "grad_baselining": "method=vcpo has the baseline; give vcpo.opob_scope or vcpo.opob_weights",
    "update_policy_per_traj": "vcpo.norms.how says how each trajectory's gradient is measured; leave it out",
    "megatron.grad_offload": "give actor_rollout_ref.actor.megatron.param_offload: gradients go with the weights",
    "rollout.nnodes": "give actor_rollout_ref.rollout.nnodes={value}",
    "rollout.n_gpus_per_node": "give actor_rollout_ref.rollout.n_gpus_per_node={value}",
    "rollout.total_rollout_steps": "give trainer.total_training_steps: {value} prompts / data.train_batch_size",
    "rollout.total_epochs": "trainer.total_training_steps ends a run; leave it out",
    "rollout.test_freq": "give trainer.test_freq={value}",
    "wandb_entity": "set WANDB_ENTITY={value} in the environment",
    "wandb_group": "set WANDB_RUN_GROUP={value} in the environment",
    "env_vars.SANDBOX_PORT": "give tool_use.sandbox_url=http://127.0.0.1:{value}",
}
"""Settings or sections of the published repository, by the end of a name, and what to do here: differences.md."""
WITH_VCPO = {
    "algorithm.rollout_correction.rollout_is_threshold": "vcpo.truncation takes its place",
    "algorithm.rollout_correction.rollout_is": "a whole sequence has one weight",
    **dict.fromkeys(
        ("algorithm.rollout_correction.rollout_rs", "algorithm.rollout_correction.rollout_rs_threshold"),
        "no sequence is rejected",
    ),
}
"""Settings of the published repository, verl's too, that VCPO's update does not read, and why."""
_ALL_TOKENS = "samplers draw from all tokens of the policy, whose log-probs are trained on; leave it out"
_SETTINGS = {
    **PUBLISHED,
    "wandb_project": "give trainer.project_name={value}",
    "runtime_env.env_vars": "set it in the environment of the command",
    **dict.fromkeys((f"rollout.{name}" for name in ("min_p", "min_tokens", "bad_words", "logit_bias")), _ALL_TOKENS),
    **dict.fromkeys((f"rollout.{name}_penalty" for name in ("presence", "frequency")), _ALL_TOKENS),
    "rollout.stop": "an agent loop of your own can stop at a text; leave it out",
}
"""Settings or sections of others, by the end of a name, and what to do here."""
_OF_HYDRA = {
    "--config-name": "leave it out: +task=NAME chooses a preset, of your own with --config-dir DIR",
    "--config-path": "give --config-dir DIR",
    "-cd": "give --config-dir DIR",
    "--cfg": "give --print-config",
    "--multirun": "one command starts one run",
    **dict.fromkeys(("-cn", "-cp"), "leave it out: +task=NAME chooses a preset, of your own with --config-dir DIR"),
    "-m": "one command starts one run",
}
"""Options of Hydra's own command line, and what to do instead."""
_TYPED = str.maketrans("\u2212\u2010\u2011\u2012\u2013\u2014\u201c\u201d\u201e\u2018\u2019", '------"""\'\'')
"""What word processors and pages make of a minus sign, a hyphen and quotes."""


def of_another(name: str, value: str) -> str | None:
    """What gives here what others call `name`, in words with the user's value; None where no name is known."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):  # the whole name first, then the sections around
        above = ".".join(parts[:depth])
        for known, words in _SETTINGS.items():
            if f".{above}".endswith(f".{known}"):
                return words.format(value=value)
    return None


def card(gigabytes: int) -> str:
    """What to give for a GPU that is sold with so much memory."""
    if gigabytes == 80:
        return "a card of 80 GB is what the plan takes by default; leave it out"
    return f"give what torch says of the card's memory, about gpu_memory_gib={0.985 * gigabytes:.1f}"


def of_hydra(option: str) -> str | None:
    """What to do instead of an option of Hydra's command line; None for another option."""
    return _OF_HYDRA.get(re.split(r"[= ]", option)[0])


def typed(text: str) -> str | None:
    """A text with the characters that a keyboard has; None where it has no others that look like these."""
    plain = unicodedata.normalize("NFKC", text.translate(_TYPED))
    return None if plain == text else plain
