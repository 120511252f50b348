"""`async.kv_cache`: keys and values of unfinished responses when new weights arrive."""

from enum import StrEnum


class KVCache(StrEnum):
    """What happens to the keys and values of an unfinished response when new weights arrive."""

    RECOMPUTE = "recompute"
    """They are computed anew: log-probs are exactly those of the old policy, then those of the new policy."""
    KEEP = "keep"
    """They are kept: the update costs no computation, and later tokens come from a mixture of both policies."""
