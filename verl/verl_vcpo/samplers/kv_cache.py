"""The setting `async.kv_cache`, for the keys and values of unfinished responses when new weights arrive."""

from enum import StrEnum


class KVCache(StrEnum):
    """The treatment of the keys and values of an unfinished response when new weights arrive."""

    RECOMPUTE = "recompute"
    """The new weights compute them again: log-probs are exactly those of the old policy, then of the new policy."""
    KEEP = "keep"
    """The old ones stay: the update costs no computation, and later tokens come from a mixture of both policies."""
