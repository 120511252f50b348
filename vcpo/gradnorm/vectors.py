"""Parameters whose gradient is small per sequence: biases, norm weights, embeddings, and an embedding tied to the head.

The gradient of a bias or norm weight is one vector per sequence. Where a sequence's tokens lie on several ranks, the
caller sums these vectors over the ranks *before* squaring.
"""

import torch
from torch import Tensor

from vcpo.gradnorm.segments import Segments, add_rows


def sequence_sums(value: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Sum `value` [T, d] over each sequence's tokens: [n, d] float32.

    Args:
        value: [T, d] per token its contribution to the gradient.
        sequence: [T] the sequence of each token.
        sequences: n.
    """
    sums = torch.zeros(sequences, value.shape[1], dtype=torch.float32, device=value.device)
    add_rows(sums, sequence, value.float())
    return sums


def embedding_squared_norms(token: Tensor, dy: Tensor, segments: Segments) -> Tensor:
    """Compute ||dE_i||^2 of an embedding: the gradients of a sequence's equal tokens add up before squaring.

    Args:
        token: [T] rows of the table.
        dy: [T, d] gradients of the looked-up rows.
        segments: n sequences.

    Returns:
        [n] float32.
    """
    # One integer per pair (sequence, token): sorting the integers brings equal tokens of a sequence together.
    key = segments.sequence * (1 << 32) + token
    key, order = key.sort()
    new = torch.ones_like(key, dtype=torch.bool)
    new[1:] = key[1:] != key[:-1]
    run = new.cumsum(0) - 1  # [T] number of the pair; there are at most T pairs, so no shape depends on the data
    rows = torch.zeros(len(key), dy.shape[1], dtype=torch.float32, device=dy.device)
    add_rows(rows, run, dy[order].float())
    # Unused slots keep owner 0; their gradient rows are zero, so they add nothing.
    owner = torch.zeros_like(run).scatter_(0, run, segments.sequence[order])  # [T] the sequence of each pair
    return sequence_sums(rows.square().sum(1, keepdim=True), owner, len(segments))[:, 0]


def tied_rows(token: Tensor, x: Tensor, dy: Tensor, segments: Segments) -> Tensor:
    """Return the head's gradient at the vocabulary rows of each sequence's tokens, for tied weights' cross term.

    With weights shared by embedding and head, dW_i = dE_i + dH_i, and ||dW_i||^2 has the term 2 <dE_i, dH_i>. dE_i is
    zero outside the rows of the sequence's tokens, so the term is 2 sum_u <dy^E_u, dH_i[token_u]>, with dy^E the
    embedding's output gradients and dH_i[token_u] the returned rows.

    Args:
        token: [T] rows of the table, or of this rank's shard of it; negative where the row is another rank's.
        x: [T, d] inputs of the head.
        dy: [T, V] gradients of the logits, V the rows of the shard.
        segments: n sequences.

    Returns:
        [T, d] dH_i[token_u] for every token u of sequence i; 0 where the row is another rank's.
    """
    rows = torch.zeros(len(token), x.shape[1], dtype=torch.float32, device=x.device)
    for bucket in segments.padded(tuple(range(len(segments)))).buckets:
        tokens = token[bucket.tokens]  # [k, L]
        elsewhere = bucket.padding | (tokens < 0)
        columns = torch.where(elsewhere, 0, tokens)
        at_tokens = dy[bucket.tokens[:, :, None], columns[:, None, :]]  # [k, L, L] d logit_t[token_u]
        at_tokens = at_tokens.masked_fill_(elsewhere[:, None, :] | bucket.padding[:, :, None], 0.0)
        products = (at_tokens.mT @ bucket.gather(x)).float()  # [k, L, d]
        rows.index_add_(0, bucket.tokens.flatten(), products.masked_fill_(bucket.padding[..., None], 0.0).flatten(0, 1))
    return rows
