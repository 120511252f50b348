"""The policy versions that sampled the tokens of a response, as runs of tokens in the response's order."""

from collections.abc import Mapping
from typing import Any

FIELD = "token_versions"
"""The extra field of a response that several requests have sampled: [version or None, number of tokens] for each run of
tokens; None where several versions sampled the run."""

SAMPLER = "sampler"
"""The extra field with the rank of the sampler that sampled a response, or the response's first tokens."""


def token_versions(fields: Mapping[str, Any], tokens: int) -> list[list[Any]]:
    """Return the runs of a response of `tokens` tokens, from the extra fields of its output.

    An agent loop that joins outputs may have kept the runs of one of them only: then they are as if not recorded.
    """
    recorded = fields.get(FIELD) or []
    if recorded and sum(run[1] for run in recorded) == tokens:
        return [list(run) for run in recorded]
    oldest, newest = fields.get("min_global_steps"), fields.get("max_global_steps")
    return [[newest if oldest == newest else None, tokens]]
