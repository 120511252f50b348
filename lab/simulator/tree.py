"""Sequences as a tree of tokens: a beginning that several of them share is there once, and computed once.

The responses of a group begin with the same prompt, and many of them go on with the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """A tree of M nodes, each a token after its ancestors; N lists of L nodes that attend to each other.

    The first C nodes belong to prompts, and no response token comes next after them. A list is of one prompt: its nodes
    but for the last, padded on the left to P - 1; then its last node and those of the responses, padded on the right.
    """

    token: Tensor
    """[1, M]"""
    context: int
    """C."""
    prompt_length: int
    """P."""
    listed: Tensor
    """[1, N, L] which of all M nodes; on padding any."""
    place: Tensor
    """[1, M] where the node is listed, among all N * L places."""
    position: Tensor
    """[1, N, L] the number of a node's ancestors."""
    filled: Tensor
    """[1, N, L] false on padding."""
    seen: Tensor
    """[1, N, L, L] true for a node's ancestors and itself."""
    parent: Tensor
    """[1, B, T] after which of the M - C other nodes a response token comes; on padding any."""

    @property
    def place_after(self) -> Tensor:
        """[1, M - C] where the nodes after C are listed, were there only the L - P + 1 last places of each list."""
        place, length, first = self.place[:, self.context :], self.listed.shape[2], self.prompt_length - 1
        return place - (place // length + 1) * first

    @classmethod
    def of(
        cls, prompt: Tensor, prompt_mask: Tensor, response: Tensor, mask: Tensor, shared: bool = True
    ) -> "TokenTree":
        """The tree of these sequences.

        Args:
            prompt: [N, P] padded on the left; N divides B, the responses to a prompt are adjacent.
            prompt_mask: [N, P] false on padding.
            response: [B, T] padded on the right; the last token of each is predicted only.
            mask: [B, T] false on padding.
            shared: whether prompts share their beginnings.
        """
        prompts = [row[-size:] for row, size in zip(prompt.tolist(), prompt_mask.sum(dim=1).tolist(), strict=True)]
        responses = [row[: size - 1] for row, size in zip(response.tolist(), mask.sum(dim=1).tolist(), strict=True)]
        samples = len(responses) // len(prompts)
        context = _Branches.of([row[:-1] for row in prompts], shared)
        groups = [
            _Branches.of([row[-1:] + answer for answer in responses[n * samples : (n + 1) * samples]])
            for n, row in enumerate(prompts)
        ]
        sizes = np.array([len(group.token) for group in groups])
        before, after = prompt_mask[:, :-1].numpy(), np.arange(sizes.max()) < sizes[:, None]
        own, filled = before.sum(axis=1), np.concatenate([before, after], axis=1)
        path, depth, way = np.zeros(before.shape, int), np.zeros(after.shape, int), np.zeros(mask.shape, int)
        path[before] = [node for row in context.ways for node in row]
        depth[after] = [steps for group in groups for steps in group.depth]
        way[mask.numpy()] = [node for group in groups for row in group.ways for node in row]
        start = sizes.cumsum() - sizes  # of each group's nodes, after C
        nodes = np.arange(sizes.sum())
        after_nodes = np.zeros(after.shape, int)
        after_nodes[after] = len(context.token) + nodes
        listed = np.concatenate([path, after_nodes], axis=1)
        place = np.zeros(len(context.token) + len(nodes), int)
        place[listed[filled]] = filled.ravel().nonzero()[0]
        position = np.concatenate([(before.cumsum(axis=1) - 1).clip(min=0), own[:, None] + depth], axis=1)
        return cls(
            token=torch.tensor([context.token + [token for group in groups for token in group.token]]),
            context=len(context.token),
            prompt_length=prompt.shape[1],
            listed=torch.from_numpy(listed)[None],
            place=torch.from_numpy(place)[None],
            position=torch.from_numpy(position)[None],
            filled=torch.from_numpy(filled)[None],
            seen=torch.from_numpy(_seen(before, way, mask.numpy(), after.shape[1]))[None],
            parent=torch.from_numpy(start.repeat(samples)[:, None] + way)[None],
        )


@dataclass(frozen=True)
class _Branches:
    """Rows of tokens by their distinct beginnings, each a node."""

    token: list[int]
    """The last one of each beginning."""
    depth: list[int]
    """How many come before it."""
    ways: list[list[int]]
    """Of each row, the nodes of its tokens."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], shared: bool = True) -> "_Branches":
        branches, known = cls([], [], []), dict[tuple[int, int], int]()
        for number, row in enumerate(rows):
            node, way = -1 if shared else -1 - number, list[int]()
            for token in row:
                step = (node, token)
                if step not in known:
                    known[step] = len(branches.token)
                    branches.token.append(token)
                    branches.depth.append(len(way))
                node = known[step]
                way.append(node)
            branches.ways.append(way)
        return branches


def _seen(before: np.ndarray, way: np.ndarray, mask: np.ndarray, width: int) -> np.ndarray:
    """[N, L, L] of where prompts have nodes [N, P - 1], and which of `width` others responses go through [B, T]."""
    prompts, context = before.shape
    seen = np.zeros((prompts, context + width, context + width), bool)
    diagonal = np.arange(context + width)
    seen[:, :context, :context] = before[:, None] & np.tri(context, dtype=bool)
    seen[:, context:, :context] = before[:, None]
    seen[:, diagonal, diagonal] = True  # padding, too, has to see something
    later, earlier = np.tril_indices(way.shape[1])
    row, step = mask[:, later].nonzero()
    samples = len(way) // prompts
    seen[row // samples, context + way[row, later[step]], context + way[row, earlier[step]]] = True
    return seen
