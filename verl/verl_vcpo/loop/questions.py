"""Whether samplers compute log-probs again (computed_again.py), and of how many tokens: settings alone decide that."""

from omegaconf import DictConfig

_TOKENS = 1024
"""The most tokens of a sequence with its prompt: vLLM has the logits of a whole sequence in memory."""
BYTES = 10
"""Bytes per token and word of the vocabulary in vLLM 0.24 (V1 runner): logits in bfloat16, their float32 copy, and its
log-softmax, of one sequence at a time and whole on each rank. The V2 runner needs less."""


def asked_tokens(config: DictConfig) -> int:
    """Return the most tokens of a sequence whose log-probs are computed again; 0 where samplers are never asked.

    Samplers are not asked where arithmetic cannot matter, or where their answers would say something else.
    """
    actor, rollout, model = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "model"))
    # vLLM's log-probs of a prompt are those of the whole vocabulary at temperature 1, by experts of its own choice.
    # With adapters alone vLLM's logits of a prompt may fail (punica's metadata has a row for each request).
    comparable = (
        (rollout.temperature, rollout.top_p) == (1.0, 1.0)
        and rollout.top_k in (-1, 0)
        and not rollout.enable_rollout_routing_replay
        and not (model.lora.rank and not model.lora.merge)
    )
    exact = {rollout.dtype, actor.megatron.dtype} == {"float32"}
    if not comparable or exact or config["async"].lag == 0:
        return 0
    return min(_TOKENS, (rollout.max_model_len or rollout.prompt_length + rollout.response_length) - 1)
