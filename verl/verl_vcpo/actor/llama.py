"""Llama's bridge.

mbridge looks for `rope_scaling`, which transformers 5 keeps under another name: it would build the positions of Llama
3.1 and later without their scaling, and the trainer's log-probs would not be those of the samplers.
"""

from typing import Any

from mbridge.models.llama import LLaMABridge

from verl_vcpo.actor.rotary import scaling


class LlamaBridge(LLaMABridge):
    """Llama <-> Megatron, with scaled positions: `linear` and `llama3`."""

    hf_config: Any

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return super()._get_gptmodel_args() | scaling(self.hf_config.rope_parameters)
