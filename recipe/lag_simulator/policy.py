"""The warm start's architecture (Qwen2: RMSNorm, rotary positions, grouped queries, SwiGLU) in plain torch.

Static shapes: prompts are padded on the left to P tokens, responses on the right to T. All but the last token of a
prompt are read once, whatever the number of samples, and of the last layer only their keys and values; what follows,
the last token and the response, attends to them. R policies of one shape run side by side: tensors begin with [R].
"""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
KeysValues = tuple[Tensor, Tensor]
"""Of one layer, both [R, N, samples, kv_heads, L, d]."""


@dataclass(frozen=True)
class PolicyShape:
    """Sizes, from a checkpoint's config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    rope_theta: float
    norm_eps: float
    end_token: int
    pad_token: int


@dataclass(frozen=True)
class ParameterTap:
    """What a block of parameters took in and gave out, each time it was used: all that its gradient is made of."""

    kind: str
    """linear, bias, scale (RMSNorm's weight) or embedding."""
    taken: list[Tensor | None] = field(default_factory=list)
    """[B, S, d_in] inputs, detached; [B, S] token ids of an embedding; None for a bias."""
    given: list[Tensor] = field(default_factory=list)
    """Outputs [..., S, d_out], part of the graph."""


Taps = dict[str, ParameterTap]
"""By block, of one policy and responses that share no prompt."""


def parameter_blocks(layers: int) -> dict[str, list[str]]:
    """Hugging Face names of the parameters that are used as one, by the block's name: matrices first, then vectors."""
    matrices, vectors = {EMBEDDING: [EMBEDDING]}, dict[str, list[str]]()
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        matrices[f"{attention}.qkv.weight"] = [f"{attention}.{part}_proj.weight" for part in "qkv"]
        matrices[f"{mlp}.gate_up.weight"] = [f"{mlp}.{part}_proj.weight" for part in ("gate", "up")]
        vectors[f"{attention}.qkv.bias"] = [f"{attention}.{part}_proj.bias" for part in "qkv"]
        for name in (f"{attention}.o_proj.weight", f"{mlp}.down_proj.weight"):
            matrices[name] = [name]
        for name in (f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"):
            vectors[name] = [name]
    return {**matrices, HEAD: [HEAD], **vectors, FINAL_NORM: [FINAL_NORM]}


class Policy:
    """R language models of one shape.

    Args:
        parameters: by their Hugging Face names, each [R, ...]; copied, as float32.
        shape: of all R.
    """

    def __init__(self, parameters: dict[str, Tensor], shape: PolicyShape) -> None:
        self.shape = shape
        self._blocks = parameter_blocks(shape.layers)
        self._sizes = {name: parameters[name].shape[1:] for names in self._blocks.values() for name in names}
        every = [parameters[name].detach().float().flatten(1) for name in self._sizes]
        self.flat = torch.cat(every, dim=1).requires_grad_()
        """[R, D] all parameters, those of a block side by side."""

    @classmethod
    def load(cls, folder: str | Path) -> "Policy":
        """One policy, from a Hugging Face checkpoint's folder.

        Raises:
            ValueError: the checkpoint is no untied Qwen2 model.
        """
        config = json.loads((Path(folder) / "config.json").read_text())
        if config["model_type"] != "qwen2" or config["tie_word_embeddings"]:
            raise ValueError(f"actor_rollout_ref.model.path={folder}: the simulator runs untied Qwen2 models only")
        heads = config["num_attention_heads"]
        shape = PolicyShape(
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            rope_theta=config["rope_parameters"]["rope_theta"],
            norm_eps=config["rms_norm_eps"],
            end_token=config["eos_token_id"],
            pad_token=config["pad_token_id"],
        )
        return cls({name: p[None] for name, p in load_file(Path(folder) / "model.safetensors").items()}, shape)

    @classmethod
    def together(cls, policies: Sequence["Policy"]) -> "Policy":
        """Copies of policies of one shape, side by side."""
        joint = copy.copy(policies[0])
        joint.flat = torch.cat([policy.flat.detach() for policy in policies]).requires_grad_()
        return joint

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Views of the parameters by their Hugging Face names, each [R, ...]."""
        return self.by_name(self.flat.detach())

    @property
    def matrix_entries(self) -> int:
        """The first so many columns of `flat` are of matrices, the rest of vectors."""
        return sum(size.numel() for size in self._sizes.values() if len(size) > 1)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of [R, D], parameters or a gradient, by the parameters' names, each [R, ...]."""
        parts = flat.split([size.numel() for size in self._sizes.values()], dim=1)
        return {name: part.unflatten(1, size) for (name, size), part in zip(self._sizes.items(), parts, strict=True)}

    def joined(self, blocks: dict[str, Tensor]) -> Tensor:
        """[1, D] from what belongs to one policy's blocks."""
        return torch.cat([blocks[name].flatten() for name in self._blocks])[None]

    def log_probs(self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, taps: Taps | None = None) -> Tensor:
        """[R, B, T, V] log-probabilities of every token at each response position; arguments as of `outputs`."""
        return self.outputs(prompt, prompt_mask, response, taps).log_softmax(dim=-1)

    def outputs(self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, taps: Taps | None = None) -> Tensor:
        """[R, B, T, V] what the head makes of the state before each response token.

        Args:
            prompt: [R, N, P] padded on the left; N divides B, the responses to a prompt are adjacent.
            prompt_mask: [R, N, P] false on padding.
            response: [R, B, T] padded on the right with any token; padding influences no earlier position.
            taps: filled with every block's tap; N = B then.
        """
        weights = self.weights()
        before = self.read(weights, prompt[..., :-1], prompt_mask[..., :-1], taps)
        response = response.unflatten(1, (prompt.shape[1], -1))  # [R, N, samples, T]
        last = prompt[:, :, None, -1:].expand(*response.shape[:3], 1)
        tokens = torch.cat([last, response[..., :-1]], dim=-1)  # the last token is predicted only
        rotation = self.rotation(first_position(prompt_mask) + torch.arange(tokens.shape[-1]))
        hidden, _ = self.extend(weights, tokens, rotation, before, padding_bias(prompt_mask), [], taps)
        return self.head(weights, hidden, taps).flatten(1, 2)

    def weights(self) -> dict[str, Tensor]:
        """The blocks, [R, rows, columns] or [R, entries], part of the graph of `flat`."""
        rows = {block: sum(self._sizes[name][0] for name in names) for block, names in self._blocks.items()}
        rest = {block: self._sizes[names[0]][1:] for block, names in self._blocks.items()}
        parts = self.flat.split([rows[block] * rest[block].numel() for block in rows], dim=1)
        return {b: part.unflatten(1, (rows[b], *rest[b])) for b, part in zip(rows, parts, strict=True)}

    def read(
        self, weights: dict[str, Tensor], tokens: Tensor, mask: Tensor, taps: Taps | None = None
    ) -> list[KeysValues]:
        """[R, N, P] -> each layer's keys and values, every position seeing itself and the unpadded ones before it."""
        length = tokens.shape[-1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        seen = (causal & mask[:, :, None]) | torch.eye(length, dtype=torch.bool)
        unseen = _minus_infinity(seen)[:, :, None, None, None]  # [R, N, 1, 1, 1, P, P]
        rotation = self.rotation((mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, :, None])
        x = self._embed(weights, tokens[:, :, None], taps)
        read: list[KeysValues] = []
        for layer in range(self.shape.layers):
            query, key, value = self._attention_inputs(weights, layer, x, rotation, taps)
            read.append((key, value))
            if layer + 1 < self.shape.layers:
                mixed = _attend(query, [(key, value, unseen)])
                x = self._after_attention(weights, layer, x, mixed, taps)
        return read

    def extend(
        self,
        weights: dict[str, Tensor],
        tokens: Tensor,
        rotation: tuple[Tensor, Tensor],
        before: list[KeysValues],
        padding: Tensor,
        own: list[KeysValues],
        taps: Taps | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Go on after the prompts.

        Args:
            tokens: [R, N, samples, S] the next ones.
            rotation: to their positions.
            before: of the prompts but for their last tokens, [R, N, 1 or samples, kv_heads, P - 1, d].
            padding: [R, N, 1, 1, 1, P - 1], -inf on the prompts' padding.
            own: of the tokens between the prompts and `tokens`; empty where there are none.

        Returns:
            [R, N, samples, S, H] the last hidden states, and `own` with the keys and values of `tokens`.
        """
        length = tokens.shape[-1]
        later = _minus_infinity(torch.ones(length, length, dtype=torch.bool).tril()) if length > 1 else None
        x = self._embed(weights, tokens, taps)
        grown: list[KeysValues] = []
        for layer in range(self.shape.layers):
            query, key, value = self._attention_inputs(weights, layer, x, rotation, taps)
            if own:
                key, value = (torch.cat(parts, dim=-2) for parts in zip(own[layer], (key, value), strict=True))
            grown.append((key, value))
            mixed = _attend(query, [(*before[layer], padding), (key, value, later)])
            x = self._after_attention(weights, layer, x, mixed, taps)
        return self._norm(weights, x, FINAL_NORM, taps), grown

    def head(self, weights: dict[str, Tensor], hidden: Tensor, taps: Taps | None = None) -> Tensor:
        """[..., S, V] of [..., S, H] hidden states."""
        return self._linear(weights, hidden, HEAD, taps)

    def rotation(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """[..., S] positions -> cosines and sines, [..., 1, S, d]."""
        half = self.shape.head_size // 2
        frequency = torch.exp(torch.arange(half) * (-math.log(self.shape.rope_theta) / half))
        angle = (position[..., None] * frequency).repeat(*[1] * position.ndim, 2).unsqueeze(-3)
        return angle.cos(), angle.sin()

    def _attention_inputs(
        self, weights: dict[str, Tensor], layer: int, x: Tensor, rotation: tuple[Tensor, Tensor], taps: Taps | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [..., kv_heads, heads per key, S, d]; rotated keys and values [..., kv_heads, S, d]."""
        shape, prefix = self.shape, f"model.layers.{layer}"
        x = self._norm(weights, x, f"{prefix}.input_layernorm.weight", taps)
        mixed = self._linear(weights, x, f"{prefix}.self_attn.qkv.weight", taps, f"{prefix}.self_attn.qkv.bias")
        mixed = mixed.unflatten(-1, (-1, shape.head_size)).transpose(-2, -3)  # [..., heads + 2 kv_heads, S, d]
        turned, value = mixed.split([shape.heads + shape.kv_heads, shape.kv_heads], dim=-3)
        cosine, sine = rotation
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cosine + torch.cat([-second, first], dim=-1) * sine
        query, key = turned.split([shape.heads, shape.kv_heads], dim=-3)
        return query.unflatten(-3, (shape.kv_heads, -1)), key, value

    def _after_attention(
        self, weights: dict[str, Tensor], layer: int, x: Tensor, mixed: Tensor, taps: Taps | None
    ) -> Tensor:
        """[..., S, H] after the layer; `mixed` [..., S, heads * d]."""
        prefix = f"model.layers.{layer}"
        x = x + self._linear(weights, mixed, f"{prefix}.self_attn.o_proj.weight", taps)
        y = self._norm(weights, x, f"{prefix}.post_attention_layernorm.weight", taps)
        gate, up = self._linear(weights, y, f"{prefix}.mlp.gate_up.weight", taps).chunk(2, dim=-1)
        return x + self._linear(weights, F.silu(gate) * up, f"{prefix}.mlp.down_proj.weight", taps)

    def _embed(self, weights: dict[str, Tensor], tokens: Tensor, taps: Taps | None) -> Tensor:
        table = weights[EMBEDDING]
        runs, size = table.shape[:2]
        offset = torch.arange(runs).view(-1, *[1] * (tokens.ndim - 1)) * size
        x = F.embedding(tokens + offset, table.flatten(0, 1))
        _tap(taps, EMBEDDING, "embedding", tokens, x)
        return x

    def _linear(
        self, weights: dict[str, Tensor], x: Tensor, name: str, taps: Taps | None, bias: str | None = None
    ) -> Tensor:
        rows = x.flatten(1, -2)  # [R, rows, d_in]
        weight = weights[name].mT
        y = torch.baddbmm(weights[bias][:, None], rows, weight) if bias else torch.bmm(rows, weight)
        y = y.unflatten(1, x.shape[1:-1])
        _tap(taps, name, "linear", x.detach(), y)
        if bias:
            _tap(taps, bias, "bias", None, y)
        return y

    def _norm(self, weights: dict[str, Tensor], x: Tensor, name: str, taps: Taps | None) -> Tensor:
        unit = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.shape.norm_eps)
        y = unit * weights[name].view(len(x), *[1] * (x.ndim - 2), -1)
        _tap(taps, name, "scale", unit.detach(), y)
        return y


def _attend(query: Tensor, parts: list[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
    """Softmax attention over several stretches of keys and values.

    Args:
        query: [..., kv_heads, heads per key, S, d].
        parts: keys and values [..., kv_heads, L, d], and what is added to the scores, [..., S, L] or None.

    Returns:
        [..., S, heads * d].
    """
    group, length, size = query.shape[-3:]
    rows = query.flatten(-3, -2) * size**-0.5  # [..., kv_heads, group * S, d]
    scores = []
    for key, _, bias in parts:
        score = (rows @ key.mT).unflatten(-2, (group, length))
        scores.append(score if bias is None else score + bias)
    weight = torch.cat(scores, dim=-1).softmax(dim=-1).flatten(-3, -2)
    split = weight.split([key.shape[-2] for key, _, _ in parts], dim=-1)
    mixed = [share @ value for share, (_, value, _) in zip(split, parts, strict=True)]
    total = mixed[0] if len(mixed) == 1 else mixed[0] + mixed[1]
    return total.unflatten(-2, (group, length)).flatten(-4, -3).transpose(-2, -3).flatten(-2)


def _minus_infinity(allowed: Tensor) -> Tensor:
    """0 where allowed, otherwise -inf."""
    return torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)


def padding_bias(prompt_mask: Tensor) -> Tensor:
    """[R, N, P] -> [R, N, 1, 1, 1, 1, P - 1] for the scores of keys before the prompts' last tokens."""
    return _minus_infinity(prompt_mask[..., :-1])[:, :, None, None, None, None]


def first_position(prompt_mask: Tensor) -> Tensor:
    """[R, N, P] -> [R, N, 1, 1] positions of the prompts' last tokens."""
    return prompt_mask.sum(dim=-1)[:, :, None, None] - 1


def _tap(taps: Taps | None, name: str, kind: str, taken: Tensor | None, given: Tensor) -> None:
    """Note one use of a block; `taken` [1, B, 1, S, d_in] or [1, B, 1, S], `given` [1, B, 1, S, d_out]."""
    if taps is not None:
        tap = taps.setdefault(name, ParameterTap(kind))
        tap.taken.append(None if taken is None else taken[0, :, 0])
        tap.given.append(given)
