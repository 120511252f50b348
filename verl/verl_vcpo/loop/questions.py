"""Whether samplers compute log-probs again (computed_again.py), and of how many tokens: settings alone decide that."""

from omegaconf import DictConfig

_TOKENS = 1024
"""The most tokens of a sequence with its prompt: vLLM has all logits of a sequence in memory."""
BYTES = 10
"""Per token and word of the vocabulary: logits in bfloat16, the same in float32, and their log-softmax."""


def asked_tokens(config: DictConfig) -> int:
    """Return the most tokens of a sequence whose log-probs are computed again; 0 where samplers are never asked.

    They are not where arithmetic cannot matter, or where the answers would say something else.
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
