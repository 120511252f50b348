"""The warm start's architecture (Qwen2: RMSNorm, rotary positions, grouped queries, SwiGLU) in plain torch.

What is known beforehand is read as a tree of tokens: common beginnings once, and of the last layer only the keys and
values of what nothing is predicted after. What is drawn goes on after it, token by token. Tensors begin with [1], the
axis of the policy.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from lab.simulator.tree import TokenTree

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
KeysValues = tuple[Tensor, Tensor]
"""Of one layer, both [G, kv_heads, L, d] of G lists of L tokens."""


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
    """What a block of parameters took in and gave out: all that its gradient is made of."""

    kind: str
    """linear, bias, scale (RMSNorm's weight) or embedding."""
    taken: Tensor | None
    """[1, M, d_in] inputs, detached; [1, M] token ids of an embedding; None for a bias; of M - C nodes after the last
    attention."""
    given: Tensor
    """[1, M, d_out] outputs, part of the graph; [1, M - C, d_out] after the last attention."""


@dataclass(frozen=True)
class Taps:
    """What every block of one policy took in and gave out in one pass."""

    tree: TokenTree
    """What is read; where norms are wanted, each of its lists is of one sequence."""
    blocks: dict[str, ParameterTap] = field(default_factory=dict)


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
    """A language model.

    Args:
        parameters: by their Hugging Face names, each [1, ...]; copied, as float32.
        shape: its sizes.
    """

    def __init__(self, parameters: dict[str, Tensor], shape: PolicyShape) -> None:
        self.shape = shape
        self._blocks = parameter_blocks(shape.layers)
        self._sizes = {name: parameters[name].shape[1:] for names in self._blocks.values() for name in names}
        every = [parameters[name].detach().float().flatten(1) for name in self._sizes]
        self.flat = torch.cat(every, dim=1).requires_grad_()
        """[1, D] all parameters, those of a block side by side."""

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

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Views of the parameters by their Hugging Face names, each [1, ...]."""
        return self.by_name(self.flat.detach())

    @property
    def matrix_entries(self) -> int:
        """The first so many columns of `flat` are of matrices, the rest of vectors."""
        return sum(size.numel() for size in self._sizes.values() if len(size) > 1)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of [1, D], parameters or a gradient, by the parameters' names, each [1, ...]."""
        parts = flat.split([size.numel() for size in self._sizes.values()], dim=1)
        return {name: part.unflatten(1, size) for (name, size), part in zip(self._sizes.items(), parts, strict=True)}

    def joined(self, blocks: dict[str, Tensor]) -> Tensor:
        """[1, D] from what belongs to one policy's blocks."""
        return torch.cat([blocks[name].flatten() for name in self._blocks])[None]

    def outputs(self, tree: TokenTree, taps: Taps | None = None) -> Tensor:
        """[1, M - C, V] what the head makes of the states of those nodes that response tokens come after.

        Args:
            tree: the sequences.
            taps: of this tree; filled with every block's tap.
        """
        weights = self.weights()
        hidden, _ = self.read(weights, tree, taps)
        return self.head(weights, hidden, taps)

    def weights(self) -> dict[str, Tensor]:
        """The blocks, [1, rows, columns] or [1, entries], part of the graph of `flat`."""
        rows = {block: sum(self._sizes[name][0] for name in names) for block, names in self._blocks.items()}
        rest = {block: self._sizes[names[0]][1:] for block, names in self._blocks.items()}
        parts = self.flat.split([rows[block] * rest[block].numel() for block in rows], dim=1)
        return {b: part.unflatten(1, (rows[b], *rest[b])) for b, part in zip(rows, parts, strict=True)}

    def read(
        self, weights: dict[str, Tensor], tree: TokenTree, taps: Taps | None = None
    ) -> tuple[Tensor, list[KeysValues]]:
        """[1, M - C, H] the last hidden states of the nodes after C, and each layer's keys and values, G = N."""
        listed, place = tree.listed.flatten(0, 1), tree.place
        rotation, unseen = self._rotation(tree.position.flatten(0, 1)), ~tree.seen.flatten(0, 1)
        x, bias, kept = self._embed(weights, tree.token, taps), self._bias(unseen), list[KeysValues]()
        for layer in range(self.shape.layers):
            query, key, value = self._attention_inputs(weights, layer, x, listed, rotation, taps)
            kept.append((key, value))
            if layer + 1 == self.shape.layers:
                first = tree.prompt_length - 1
                x, place, bias = x[:, tree.context :], tree.place_after, self._bias(unseen[:, first:])
                query = query[..., first:, :]
            x = self._after_attention(weights, layer, x, _attend(query, key, value, bias), place, taps)
        return self._norm(weights, x, FINAL_NORM, taps), kept

    def extend(
        self,
        weights: dict[str, Tensor],
        token: Tensor,
        listed: Tensor,
        place: Tensor,
        position: Tensor,
        seen: Tensor,
        kept: list[KeysValues],
    ) -> Tensor:
        """[1, W, H] the last hidden states of W more tokens, S in each of G lists.

        Args:
            token: [1, W] the next ones.
            listed: [G, S] which of all W tokens; on padding any.
            place: [1, W] where a token is listed, among all G * S places; on padding any.
            position: [G, 1] of the tokens.
            seen: [G, S, L] true for what comes before in its list, and itself.
            kept: keys and values; the newest are written before L.
        """
        rotation, bias = self._rotation(position), self._bias(~seen)
        x, newest = self._embed(weights, token, None), slice(seen.shape[2] - seen.shape[1], seen.shape[2])
        for layer in range(self.shape.layers):
            query, *new = self._attention_inputs(weights, layer, x, listed, rotation, None)
            for of, part in zip(kept[layer], new, strict=True):
                of[:, :, newest] = part
            key, value = (of[:, :, : newest.stop] for of in kept[layer])
            x = self._after_attention(weights, layer, x, _attend(query, key, value, bias), place, None)
        return self._norm(weights, x, FINAL_NORM, None)

    def head(self, weights: dict[str, Tensor], hidden: Tensor, taps: Taps | None = None) -> Tensor:
        """[1, M, V] of [1, M, H] hidden states."""
        return self._linear(weights, hidden, HEAD, taps)

    def _rotation(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """[G, L] positions -> cosines and signed sines, [G, 1, L, d]."""
        half = self.shape.head_size // 2
        frequency = torch.exp(torch.arange(half) * (-math.log(self.shape.rope_theta) / half))
        angle = torch.arange(int(position.max()) + 1)[:, None] * frequency  # [positions, d / 2]
        sine = angle.sin()
        tables = angle.cos().repeat(1, 2), torch.cat([-sine, sine], dim=1)
        cosine, sine = (F.embedding(position, table)[:, None] for table in tables)
        return cosine, sine

    def _bias(self, unseen: Tensor) -> Tensor:
        """[G * kv_heads, heads per key * S, L] for scores: -inf where `unseen` [G, S, L], otherwise 0."""
        shape = self.shape
        bias = torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)[:, None, None]
        return bias.expand(-1, shape.kv_heads, shape.heads // shape.kv_heads, -1, -1).flatten(2, 3).flatten(0, 1)

    def _attention_inputs(
        self,
        weights: dict[str, Tensor],
        layer: int,
        x: Tensor,
        listed: Tensor,
        rotation: tuple[Tensor, Tensor],
        taps: Taps | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [G, kv_heads, heads per key, L, d], rotated keys and values [G, kv_heads, L, d] of lists."""
        shape, prefix = self.shape, f"model.layers.{layer}"
        x = self._norm(weights, x, f"{prefix}.input_layernorm.weight", taps)
        mixed = self._linear(weights, x, f"{prefix}.self_attn.qkv.weight", taps, f"{prefix}.self_attn.qkv.bias")
        mixed = mixed.flatten(0, 1).index_select(0, listed.flatten())
        mixed = mixed.view(*listed.shape, -1, shape.head_size).transpose(1, 2)  # [G, heads + 2 kv_heads, L, d]
        turned, value = mixed.split([shape.heads + shape.kv_heads, shape.kv_heads], dim=1)
        cosine, sine = rotation
        turned = torch.addcmul(turned * cosine, turned.roll(shape.head_size // 2, dims=-1), sine)
        query, key = turned.split([shape.heads, shape.kv_heads], dim=1)
        return query.unflatten(1, (shape.kv_heads, -1)), key, value

    def _after_attention(
        self,
        weights: dict[str, Tensor],
        layer: int,
        x: Tensor,
        attended: Tensor,
        place: Tensor,
        taps: Taps | None,
    ) -> Tensor:
        """[1, M, H] after the layer; `attended` [G, L, heads * d] of lists, `place` [1, M] in them."""
        prefix = f"model.layers.{layer}"
        mixed = attended.flatten(0, 1).index_select(0, place.flatten()).unflatten(0, place.shape)
        x = x + self._linear(weights, mixed, f"{prefix}.self_attn.o_proj.weight", taps)
        y = self._norm(weights, x, f"{prefix}.post_attention_layernorm.weight", taps)
        gate, up = self._linear(weights, y, f"{prefix}.mlp.gate_up.weight", taps).chunk(2, dim=-1)
        return x + self._linear(weights, F.silu(gate) * up, f"{prefix}.mlp.down_proj.weight", taps)

    def _embed(self, weights: dict[str, Tensor], token: Tensor, taps: Taps | None) -> Tensor:
        table = weights[EMBEDDING]
        first = torch.arange(len(table))[:, None] * table.shape[1]
        x = F.embedding(token + first, table.flatten(0, 1))
        _tap(taps, EMBEDDING, "embedding", token, x)
        return x

    def _linear(
        self, weights: dict[str, Tensor], x: Tensor, name: str, taps: Taps | None, bias: str | None = None
    ) -> Tensor:
        weight = weights[name].mT
        y = torch.baddbmm(weights[bias][:, None], x, weight) if bias else torch.bmm(x, weight)
        _tap(taps, name, "linear", x.detach(), y)
        if bias:
            _tap(taps, bias, "bias", None, y)
        return y

    def _norm(self, weights: dict[str, Tensor], x: Tensor, name: str, taps: Taps | None) -> Tensor:
        unit = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.shape.norm_eps)
        y = unit * weights[name][:, None]
        _tap(taps, name, "scale", unit.detach(), y)
        return y


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention.

    Args:
        query: [G, kv_heads, heads per key, S, d].
        key: [G, kv_heads, L, d].
        value: the same.
        bias: [G * kv_heads, heads per key * S, L] added to the scores.

    Returns:
        [G, S, heads * d].
    """
    rows = query.flatten(2, 3).flatten(0, 1)  # [G * kv_heads, heads per key * S, d]
    scores = torch.baddbmm(bias, rows, key.flatten(0, 1).mT, alpha=query.shape[-1] ** -0.5)
    mixed = scores.softmax(dim=-1) @ value.flatten(0, 1)
    return mixed.view(query.shape).flatten(1, 2).transpose(1, 2).flatten(2)


def _tap(taps: Taps | None, name: str, kind: str, taken: Tensor | None, given: Tensor) -> None:
    """Note the use of a block."""
    if taps is not None:
        taps.blocks[name] = ParameterTap(kind, taken, given)
