"""What a training request may ask a sampler for: tokens drawn from the policy whose log-probs are trained on."""

from typing import Any

from verl_vcpo.user_code.errors import UserCodeError

_LENGTHS = ("max_tokens", "max_new_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos")
_OUTPUTS = ("logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens")
_FREE = {*_LENGTHS, *_OUTPUTS, "seed"}
"""Parameters that leave the distribution of each token as it is."""
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "repetition_penalty": (1,),
    **dict.fromkeys(("min_p", "min_tokens", "presence_penalty", "frequency_penalty"), (0,)),
}
"""Of the other parameters of vLLM that are numbers: the values without effect."""


def check_training_request(params: dict[str, Any], temperature: float) -> None:
    """Refuse sampling parameters with which tokens would be drawn from another distribution than the policy's.

    Args:
        params: of a request to a vLLM server, by vLLM's names.
        temperature: `rollout.temperature`, with which the trainer computes log-probs.

    Raises:
        UserCodeError: names the first such parameter.
    """
    for name, value in {"temperature": 1.0, **params}.items():
        allowed = (temperature,) if name == "temperature" else _NEUTRAL.get(name, ())
        if name not in _FREE and value is not None and value not in allowed:
            what = f"an agent loop asks a sampler for {name}={value}, which changes what is drawn in training"
            fix = f"give {name}={allowed[0]:g}" if allowed else f"leave {name} out"
            raise UserCodeError(what, f"{fix}, or ask another model for what is not trained on")
