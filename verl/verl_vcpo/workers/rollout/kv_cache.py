"""`async.kv_cache`: what becomes of a response's keys and values when new weights arrive in the middle of it."""

from enum import StrEnum


class KVCache(StrEnum):
    """What becomes of a response's keys and values when new weights arrive."""

    RECOMPUTE = "recompute"
    """Computed anew: log-probs are exact on both sides of the update."""
    KEEP = "keep"
    """Kept: the update costs no computation; tokens after it come from a mixture of both policies."""
