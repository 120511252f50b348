"""Scaled rotary positions, as transformers describes them and as Megatron has them."""

from typing import Any

_OF_MEGATRON = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of the scaling `llama3` in Megatron, which are those of Llama 3.1, 3.2 and 3.3."""


def kind_of(positions: dict[str, Any]) -> str:
    """Return the kind of scaling, from transformers' `rope_parameters` or the older `rope_scaling`."""
    return str(positions.get("rope_type", positions.get("type", "default")))


def lost_scaling(positions: dict[str, Any]) -> str | None:
    """Return why Megatron would scale positions of type `llama3` otherwise than transformers; None if it would not."""
    if kind_of(positions) != "llama3" or all(positions.get(name) == value for name, value in _OF_MEGATRON.items()):
        return None
    return f"Megatron does not scale rotary positions by {positions}; llama3 needs {_OF_MEGATRON}"
