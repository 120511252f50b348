"""Drawing responses: several policies side by side, keys and values kept, finished responses left out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from recipe.lag_simulator.policy import KeysValues, Policy, first_position, padding_bias

_READ_TOGETHER = 128
"""Prompts whose hidden states fit the processor's caches."""
_WORTH_PACKING = 0.75
"""Keys and values are copied where no more than this share of the rows is left."""


@dataclass
class _Rows:
    """R x W responses, those that are still written among them."""

    index: Tensor
    """[R, W] which of the B rows they are."""
    token: Tensor
    """[R, W] the newest ones."""
    alive: Tensor
    """[R, W] false after the end token."""
    before: list[KeysValues]
    """Of the prompts but for their last tokens, [R, W, 1, kv_heads, P - 1, d]."""
    own: list[KeysValues]
    """Of what follows, [R, W, 1, kv_heads, tokens, d]."""
    padding: Tensor
    rotation: tuple[Tensor, Tensor]
    """Of all positions to come, [R, W, 1, 1, T, d]."""

    def unfinished(self) -> "_Rows":
        """As many rows of each policy as the one with the most has left."""
        width = int(self.alive.sum(dim=1).max())
        kept = (~self.alive).byte().argsort(dim=1, stable=True)[:, :width]
        run = torch.arange(len(kept))[:, None]

        def pick(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair[0][run, kept], pair[1][run, kept]

        return _Rows(
            index=self.index[run, kept],
            token=self.token[run, kept],
            alive=self.alive[run, kept],
            before=[pick(layer) for layer in self.before],
            own=[pick(layer) for layer in self.own],
            padding=self.padding[run, kept],
            rotation=pick(self.rotation),
        )


@torch.no_grad()
def sample(
    policy: Policy,
    prompt: Tensor,
    prompt_mask: Tensor,
    samples: int,
    max_tokens: int,
    generators: Sequence[Generator] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw `samples` responses per prompt at temperature 1; without generators, the most likely ones.

    Args:
        policy: R policies side by side.
        prompt: [R, N, P] padded on the left.
        prompt_mask: [R, N, P] false on padding.
        samples: per prompt.
        max_tokens: of a response, with its end.
        generators: one per policy, which draws from it the numbers that it would draw by itself.

    Returns:
        response [R, B, T], log_prob [R, B, T], mask [R, B, T] (true up to and with the end token), of B = N * samples
        rows, those of a prompt adjacent; T is the longest response's.
    """
    weights = policy.weights()
    rows = _begin(policy, weights, prompt, prompt_mask, samples, max_tokens)
    shape = (*rows.index.shape, max_tokens)
    response, log_probs = torch.full(shape, policy.shape.pad_token), torch.zeros(shape)
    masks = torch.zeros(shape, dtype=torch.bool)
    for step in range(max_tokens):
        cosine, sine = (part[..., step : step + 1, :] for part in rows.rotation)
        token = rows.token[..., None, None]
        hidden, rows.own = policy.extend(weights, token, (cosine, sine), rows.before, rows.padding, rows.own)
        log_prob = policy.head(weights, hidden)[:, :, 0, 0].log_softmax(dim=-1)  # [R, W, V]
        if generators is None:
            rows.token = log_prob.argmax(dim=-1)
        else:
            rows.token = draw(log_prob, _chances(generators, rows.alive, shape[1]).gather(1, rows.index))
        taken = log_prob.gather(-1, rows.token[..., None])[..., 0]
        response[..., step].scatter_(1, rows.index, rows.token.masked_fill(~rows.alive, policy.shape.pad_token))
        log_probs[..., step].scatter_(1, rows.index, taken.masked_fill(~rows.alive, 0.0))
        masks[..., step].scatter_(1, rows.index, rows.alive)
        rows.alive = rows.alive & (rows.token != policy.shape.end_token)
        left = int(rows.alive.sum(dim=1).max())
        if not left:
            break
        if left <= _WORTH_PACKING * rows.alive.shape[1]:
            rows = rows.unfinished()
    return response[..., : step + 1], log_probs[..., : step + 1], masks[..., : step + 1]


def draw(log_prob: Tensor, chance: Tensor) -> Tensor:
    """[..., V] -> [...] tokens, for `chance` [...] drawn uniformly from [0, 1).

    A tenth of torch.multinomial's time, which draws a number per row and token where one per row is enough. Where
    log-probabilities are NaN, the last token.
    """
    cumulative = log_prob.exp().cumsum(dim=-1, dtype=torch.float64)
    token = torch.searchsorted(cumulative, chance[..., None] * cumulative[..., -1:], right=True)[..., 0]
    return token.clamp(max=log_prob.shape[-1] - 1)


def _begin(
    policy: Policy, weights: dict[str, Tensor], prompt: Tensor, prompt_mask: Tensor, samples: int, max_tokens: int
) -> _Rows:
    """All rows, their prompts read but for the last tokens."""
    parts = zip(prompt.split(_READ_TOGETHER, 1), prompt_mask.split(_READ_TOGETHER, 1), strict=True)
    read = [policy.read(weights, tokens[..., :-1], mask[..., :-1]) for tokens, mask in parts]
    before: list[KeysValues] = []
    for layer in zip(*read, strict=True):
        keys, values = (torch.cat(of, dim=1).repeat_interleave(samples, dim=1) for of in zip(*layer, strict=True))
        before.append((keys, values))
    token, mask = prompt[..., -1].repeat_interleave(samples, dim=1), prompt_mask.repeat_interleave(samples, dim=1)
    return _Rows(
        index=torch.arange(token.shape[1]).expand_as(token),
        token=token,
        alive=torch.ones_like(token, dtype=torch.bool),
        before=before,
        own=[],
        padding=padding_bias(mask),
        rotation=policy.rotation(first_position(mask) + torch.arange(max_tokens)),
    )


def _chances(generators: Sequence[Generator], alive: Tensor, rows: int) -> Tensor:
    """[R, rows] float64, those of run r from generator r unless all its responses are finished."""
    chance = torch.zeros(len(generators), rows, dtype=torch.float64)
    for run, generator in enumerate(generators):
        if alive[run].any():
            chance[run] = torch.rand(rows, dtype=torch.float64, generator=generator)
    return chance
