"""Squared gradient norms of each sequence of a packed micro-batch, from one backward.

A backward over packed sequences leaves, per layer, the inputs `x` [T, in] and the output gradients `dy` [T, out] of all
tokens; a sequence's share of a parameter's gradient is a sum over its own tokens. Read in this order: `segments` (whose
tokens are whose), `linear` (weights of linear layers), `vectors` (biases, norm weights, embeddings, tied embeddings).
"""

from vcpo.gradnorm.linear import add_weighted, add_weighted_per_sequence, squared_norms
from vcpo.gradnorm.segments import Segments
from vcpo.gradnorm.vectors import embedding_squared_norms, sequence_sums, tied_rows

__all__ = [
    "Segments",
    "add_weighted",
    "add_weighted_per_sequence",
    "embedding_squared_norms",
    "sequence_sums",
    "squared_norms",
    "tied_rows",
]
