"""Squared gradient norms of each sequence of a packed micro-batch, from one backward.

A backward over packed sequences leaves, per layer, the inputs `x` [T, in] and the output gradients `dy` [T, out] of all
tokens; the gradient of one sequence is a sum over the tokens of that sequence. Read in this order: `segments` (which
tokens belong to which sequence), `linear` and `sums` (norms and sums of the gradients of linear layers), `gram_kernel`
(the same norms in one kernel, on a GPU), `vectors` (biases, norm weights, embeddings, and tied embeddings).
"""

from vcpo.gradnorm.segments import Segments, add_rows
from vcpo.gradnorm.sums import WeightedSums, squared_norms
from vcpo.gradnorm.vectors import embedding_squared_norms, sequence_sums, tied_rows

__all__ = [
    "Segments",
    "WeightedSums",
    "add_rows",
    "embedding_squared_norms",
    "sequence_sums",
    "squared_norms",
    "tied_rows",
]
