"""Drawing responses: what several of them begin with is computed once."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lab.simulator.policy import KeysValues, Policy
from lab.simulator.task import TokenizedPrompts

_WORTH_PACKING = 0.75
"""Keys and values are copied where no more than this share of the prompts is left."""
_MOST_TOKENS = 2**32
"""No vocabulary has more."""
_BLOCK = 32
"""Tokens whose chances are summed first when one is drawn."""


def sample(
    policy: Policy,
    prompts: TokenizedPrompts,
    samples: int,
    max_tokens: int,
    generator: Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw `samples` responses per prompt at temperature 1; without a generator, the most likely ones.

    Args:
        policy: the one that draws.
        prompts: N of P tokens.
        samples: per prompt.
        max_tokens: of a response, with its end.
        generator: of the random numbers.

    Returns:
        response [B, T], log_prob [B, T], mask [B, T] (true up to and with the end token), of B = N * samples rows,
        those of a prompt adjacent; T is the longest response's.
    """
    response, log_prob, mask = _sample(policy, prompts, samples, max_tokens, generator)
    return response[0].clone(), log_prob[0].clone(), mask[0].clone()  # a loss refuses what inference mode made


@torch.inference_mode()  # faster than no_grad
def _sample(
    policy: Policy,
    prompts: TokenizedPrompts,
    samples: int,
    max_tokens: int,
    generator: Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `sample` returns, [1, B, T], as tensors of inference mode."""
    weights = policy.weights()
    hidden, lists = _begin(policy, weights, prompts, samples, max_tokens)
    row = torch.arange(len(prompts)).repeat_interleave(samples)[None]  # [1, B] of `hidden`
    alive = torch.ones(row.shape, dtype=torch.bool)
    response, log_probs, masks = list[Tensor](), list[Tensor](), list[Tensor]()
    while len(response) < max_tokens and alive.any():
        if response:
            row, token = lists.grow(row, response[-1], alive)
            position = lists.first + len(response) - 1
            hidden = policy.extend(weights, token, lists.listed, lists.place, position, lists.seen, lists.kept)
        log_prob = policy.head(weights, hidden).log_softmax(dim=-1)  # [1, W, V]
        if generator is None:
            drawn = log_prob.argmax(dim=-1).gather(1, row)
        else:
            drawn = draw(log_prob, row, torch.rand(alive.shape, dtype=torch.float64, generator=generator))
        taken = log_prob.flatten(1).gather(1, row * log_prob.shape[2] + drawn)
        response.append(drawn.masked_fill(~alive, policy.shape.pad_token))
        log_probs.append(taken.masked_fill(~alive, 0.0))
        masks.append(alive)
        alive = alive & (drawn != policy.shape.end_token)
    return torch.stack(response, dim=-1), torch.stack(log_probs, dim=-1), torch.stack(masks, dim=-1)


def draw(log_prob: Tensor, row: Tensor, chance: Tensor) -> Tensor:
    """[1, B] tokens, for `chance` [1, B] drawn uniformly from [0, 1), of the distributions [1, W, V] that `row` names.

    First a block of tokens, then one of its tokens: sums over the vocabulary are made once per distribution. Where
    log-probabilities are NaN, the last token.
    """
    size = log_prob.shape[2]
    blocks = F.pad(log_prob.exp(), (0, -size % _BLOCK)).unflatten(2, (-1, _BLOCK))  # [1, W, blocks, _BLOCK]
    of_row = (row + torch.arange(len(row))[:, None] * log_prob.shape[1]).flatten()  # among W
    sums = blocks.sum(dim=-1).flatten(0, 1).index_select(0, of_row)  # [B, blocks]
    ends = sums.cumsum(dim=-1, dtype=torch.float64)
    wanted = chance.view(-1, 1) * ends[:, -1:]
    block = torch.searchsorted(ends, wanted, right=True).clamp_(max=ends.shape[1] - 1)
    within = blocks.flatten(0, 2).index_select(0, of_row * ends.shape[1] + block[:, 0]).cumsum(-1, dtype=torch.float64)
    rest = (wanted - ends.gather(1, block)) / sums.gather(1, block) + 1  # the share of the block
    token = torch.searchsorted(within, rest * within[:, -1:], right=True).clamp_(max=_BLOCK - 1)
    return (block * _BLOCK + token).clamp_(max=size - 1).view_as(row)


@dataclass
class _Lists:
    """G lists, each of a prompt and the distinct beginnings of its responses that are still written.

    The newest tokens are W of each policy, and at most S of each list.
    """

    group: np.ndarray
    """[W] a token's list, in ascending order; on padding any."""
    place: Tensor
    """[1, W] of a token among G * S; on padding any."""
    listed: Tensor
    """[G, S] which of W; on padding any."""
    first: Tensor
    """[G, 1] the length of the prompt."""
    seen: Tensor
    """[G, S, L] true for the tokens before each of the newest, and for itself."""
    kept: list[KeysValues]
    """Of the prompts and what follows, [G, kv_heads, longest, d]; those of the newest are still to be written."""

    def grow(self, row: Tensor, token: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
        """Go on with what was drawn.

        Args:
            row: [1, B] after which of W tokens of its policy a response goes on.
            token: [1, B] how it goes on.
            alive: [1, B] false for finished responses.

        Returns:
            [1, B] `row` of the next tokens, and [1, W] the newest tokens.
        """
        (runs, width), length = self.place.shape, self.seen.shape[2]
        run, response = alive.numpy().nonzero()
        drawn = (run * width + row.numpy()[run, response]) * _MOST_TOKENS + token.numpy()[run, response]
        distinct, which = np.unique(drawn, return_inverse=True)
        before, newest = np.divmod(distinct, _MOST_TOKENS)
        ancestors = self.seen.flatten(0, 1).numpy()[self.place.numpy().ravel()[before]]
        group = self._of_those_left(self.group[before])
        of_run, lists = before // width, len(self.first)
        column, width = _number_within(of_run, runs)
        slot, most = _number_within(group, lists)
        at, place = of_run * width + column, group * most + slot
        seen = np.zeros((lists, most, length + most), bool)
        seen[group, slot, :length] = ancestors
        seen[:, np.arange(most), length + np.arange(most)] = True  # padding, too, has to see something
        self.seen, self.group = torch.from_numpy(seen), _filled(runs * width, at, group)
        self.place = torch.from_numpy(_filled(runs * width, at, place)).view(runs, width)
        self.listed = torch.from_numpy(_filled(lists * most, place, at)).view(lists, most)
        after = np.zeros(row.shape, int)
        after[run, response] = column[which]
        return torch.from_numpy(after), torch.from_numpy(_filled(runs * width, at, newest)).view(runs, width)

    def _of_those_left(self, group: np.ndarray) -> np.ndarray:
        """`group` numbered anew where keys and values of finished prompts are left out."""
        left = np.unique(group)
        if len(left) > _WORTH_PACKING * len(self.first):
            return group
        length, lists = self.seen.shape[2], torch.from_numpy(left)
        self.first = self.first[lists]

        def fewer(of: Tensor) -> Tensor:
            new = torch.empty(len(left), *of.shape[1:])
            new[:, :, :length] = of[:, :, :length].index_select(0, lists)
            return new

        self.kept = [(fewer(key), fewer(value)) for key, value in self.kept]
        return np.searchsorted(left, group)


def _number_within(of: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """Each one's number among those of its kind, of kinds 0 to count - 1 in ascending order; the most of a kind."""
    sizes = np.bincount(of, minlength=count)
    return np.arange(len(of)) - (sizes.cumsum() - sizes)[of], int(sizes.max())


def _filled(size: int, at: np.ndarray, value: np.ndarray) -> np.ndarray:
    """[size] `value` at `at`, elsewhere 0."""
    whole = np.zeros(size, int)
    whole[at] = value
    return whole


def _begin(
    policy: Policy, weights: dict[str, Tensor], prompts: TokenizedPrompts, samples: int, max_tokens: int
) -> tuple[Tensor, _Lists]:
    """[1, N, H] the states that the first tokens are drawn from, and the prompts' lists."""
    count, length = prompts.tokens.shape
    longest = length + (max_tokens - 1) * samples
    size = (count, policy.shape.kv_heads, longest, policy.shape.head_size)
    kept = [(torch.empty(size), torch.empty(size)) for _ in range(policy.shape.layers)]
    hidden, first = list[Tensor](), 0
    for tree in prompts.trees:
        state, read = policy.read(weights, tree)
        hidden.append(state)
        some = slice(first, first + state.shape[1])
        for layer, of in zip(kept, read, strict=True):
            for whole, part in zip(layer, of, strict=True):
                whole[some, :, :length] = part
        first = some.stop
    number = torch.arange(count)
    return torch.cat(hidden, dim=1), _Lists(
        group=number.numpy(),
        place=number[None],
        listed=number[:, None],
        first=prompts.mask.sum(dim=1, keepdim=True),
        seen=prompts.mask[:, None],
        kept=kept,
    )
