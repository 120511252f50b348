"""The warm start's architecture (Qwen2: RMSNorm, rotary positions, grouped queries, SwiGLU) in plain torch.

Static shapes: prompts are padded on the left to P tokens, responses on the right to T. Sampling keeps keys and values.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Generator, Tensor

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


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
    """What one parameter (or several, side by side) took in and gave out: all that its gradient is made of."""

    kind: str
    """linear, bias, scale (RMSNorm's weight) or embedding."""
    names: list[str]
    """The parameters, in the order in which they are stacked."""
    sizes: list[int]
    """Their first dimensions."""
    taken: Tensor | None
    """[B, S, d_in] inputs, detached; [B, S] token ids of an embedding; None for a bias."""
    given: Tensor
    """[B, S, d_out] outputs, part of the graph."""


class Policy:
    """A language model; `parameters` by their Hugging Face names, float32."""

    def __init__(self, parameters: dict[str, Tensor], shape: PolicyShape) -> None:
        self.shape = shape
        self.parameters = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}

    @classmethod
    def load(cls, folder: str | Path) -> "Policy":
        """From a Hugging Face checkpoint's folder.

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
        return cls({name: p.float() for name, p in load_file(Path(folder) / "model.safetensors").items()}, shape)

    def log_probs(
        self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, taps: list[ParameterTap] | None = None
    ) -> Tensor:
        """[B, T, V] log-probabilities of every token at each response position; arguments as of `outputs`."""
        return self.outputs(prompt, prompt_mask, response, taps).log_softmax(dim=-1)

    def outputs(
        self, prompt: Tensor, prompt_mask: Tensor, response: Tensor, taps: list[ParameterTap] | None = None
    ) -> Tensor:
        """[B, T, V] what the head makes of the state before each response token.

        Args:
            prompt: [B, P] padded on the left.
            prompt_mask: [B, P] false on padding.
            response: [B, T] padded on the right with any token; padding influences no earlier position.
            taps: filled with every parameter's tap.
        """
        tokens = torch.cat([prompt, response[:, :-1]], dim=1)  # [B, S]: the last token is predicted only
        mask = F.pad(prompt_mask, (0, response.shape[1] - 1), value=True)
        hidden = self._hidden(tokens, mask, taps)[:, prompt.shape[1] - 1 :]
        return self._linear(hidden, [HEAD], taps)

    def _hidden(self, tokens: Tensor, mask: Tensor, taps: list[ParameterTap] | None) -> Tensor:
        """[B, S] -> [B, S, H], every position seeing itself and the unpadded ones before it."""
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        attended = ((causal & mask[:, None, :]) | torch.eye(length, dtype=torch.bool))[:, None]  # [B, 1, S, S]
        rotation = self._rotation((mask.long().cumsum(dim=1) - 1).clamp(min=0))
        x = F.embedding(tokens, self.parameters[EMBEDDING])
        self._tap(taps, "embedding", [EMBEDDING], tokens, x)
        for layer in range(self.shape.layers):
            query, key, value = self._attention_inputs(layer, x, rotation, taps)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attended, enable_gqa=True)
            x = self._after_attention(layer, x, mixed, taps)
        return self._norm(x, FINAL_NORM, taps)

    @torch.no_grad()
    def sample(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        samples: int,
        max_tokens: int,
        generator: Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw `samples` responses per prompt at temperature 1; without a generator, the most likely one.

        Args:
            prompt: [N, P] padded on the left.
            prompt_mask: [N, P] false on padding.

        Returns:
            response [B, T], log_prob [B, T], mask [B, T] (true up to and with the end token), of B = N * samples rows,
            those of a prompt adjacent; T is the longest response's.
        """
        shape, start = self.shape, prompt.shape[1]
        last, cache = self._prefill(prompt, prompt_mask, samples, max_tokens)
        allowed = F.pad(prompt_mask.repeat_interleave(samples, 0), (0, max_tokens), value=True)[:, None, None]
        position = prompt_mask.sum(dim=1).repeat_interleave(samples)  # [B]
        alive = torch.ones(len(position), dtype=torch.bool)
        drawn: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(max_tokens):
            log_prob = F.linear(last, self.parameters[HEAD]).log_softmax(dim=-1)  # [B, V]
            token = log_prob.argmax(dim=-1) if generator is None else draw(log_prob, generator)
            drawn.append((token, log_prob.gather(1, token[:, None])[:, 0], alive))
            alive = alive & (token != shape.end_token)
            if step + 1 == max_tokens or not alive.any():
                break
            last = self._decode(token, position + step, cache, start + step, allowed)
        response, log_probs, masks = (torch.stack(part, dim=1) for part in zip(*drawn, strict=True))
        return response.masked_fill(~masks, shape.pad_token), log_probs.masked_fill(~masks, 0.0), masks

    def _prefill(
        self, prompt: Tensor, mask: Tensor, samples: int, max_tokens: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """([B, H] last hidden states, per layer the prompts' keys and values with room for the response)."""
        length = prompt.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        attended = ((causal & mask[:, None, :]) | torch.eye(length, dtype=torch.bool))[:, None]
        rotation = self._rotation((mask.long().cumsum(dim=1) - 1).clamp(min=0))
        x = F.embedding(prompt, self.parameters[EMBEDDING])
        cache: list[tuple[Tensor, Tensor]] = []
        for layer in range(self.shape.layers):
            query, key, value = self._attention_inputs(layer, x, rotation, None)
            keys, values = (F.pad(part, (0, 0, 0, max_tokens)).repeat_interleave(samples, 0) for part in (key, value))
            cache.append((keys, values))
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attended, enable_gqa=True)
            x = self._after_attention(layer, x, mixed, None)
        return self._norm(x[:, -1], FINAL_NORM, None).repeat_interleave(samples, 0), cache

    def _decode(
        self, token: Tensor, position: Tensor, cache: list[tuple[Tensor, Tensor]], at: int, allowed: Tensor
    ) -> Tensor:
        """[B] the newest tokens -> [B, H]; their keys and values are stored at column `at` of the cache."""
        rotation = self._rotation(position[:, None])
        x = F.embedding(token[:, None], self.parameters[EMBEDDING])
        for layer, (keys, values) in enumerate(cache):
            query, key, value = self._attention_inputs(layer, x, rotation, None)
            keys[:, :, at : at + 1], values[:, :, at : at + 1] = key, value
            end = at + 1
            mixed = F.scaled_dot_product_attention(
                query, keys[:, :, :end], values[:, :, :end], attn_mask=allowed[..., :end], enable_gqa=True
            )
            x = self._after_attention(layer, x, mixed, None)
        return self._norm(x[:, 0], FINAL_NORM, None)

    def _attention_inputs(
        self, layer: int, x: Tensor, rotation: tuple[Tensor, Tensor], taps: list[ParameterTap] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, heads, S, d] and keys, and values, both [B, kv_heads, S, d]."""
        shape, prefix = self.shape, f"model.layers.{layer}"
        x = self._norm(x, f"{prefix}.input_layernorm.weight", taps)
        names = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        mixed = self._linear(x, [f"{name}.weight" for name in names], taps, [f"{name}.bias" for name in names])
        mixed = mixed.unflatten(-1, (-1, shape.head_size)).transpose(1, 2)  # [B, heads + 2 kv_heads, S, d]
        turned, value = mixed[:, : shape.heads + shape.kv_heads], mixed[:, shape.heads + shape.kv_heads :]
        cosine, sine = rotation
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cosine + torch.cat([-second, first], dim=-1) * sine
        return turned[:, : shape.heads], turned[:, shape.heads :], value

    def _after_attention(self, layer: int, x: Tensor, mixed: Tensor, taps: list[ParameterTap] | None) -> Tensor:
        prefix = f"model.layers.{layer}"
        x = x + self._linear(mixed.transpose(1, 2).flatten(2), [f"{prefix}.self_attn.o_proj.weight"], taps)
        y = self._norm(x, f"{prefix}.post_attention_layernorm.weight", taps)
        gate, up = self._linear(y, [f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight"], taps).chunk(
            2, dim=-1
        )
        return x + self._linear(F.silu(gate) * up, [f"{prefix}.mlp.down_proj.weight"], taps)

    def _linear(
        self, x: Tensor, names: list[str], taps: list[ParameterTap] | None, biases: list[str] | None = None
    ) -> Tensor:
        weight = self.parameters[names[0]] if len(names) == 1 else torch.cat([self.parameters[n] for n in names])
        bias = torch.cat([self.parameters[name] for name in biases]) if biases else None
        y = F.linear(x, weight, bias)
        self._tap(taps, "linear", names, x.detach(), y)
        if biases:
            self._tap(taps, "bias", biases, None, y)
        return y

    def _norm(self, x: Tensor, name: str, taps: list[ParameterTap] | None) -> Tensor:
        unit = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.shape.norm_eps)
        y = unit * self.parameters[name]
        self._tap(taps, "scale", [name], unit.detach(), y)
        return y

    def _tap(
        self, taps: list[ParameterTap] | None, kind: str, names: list[str], taken: Tensor | None, given: Tensor
    ) -> None:
        if taps is not None:
            taps.append(ParameterTap(kind, names, [len(self.parameters[name]) for name in names], taken, given))

    def _rotation(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S] positions -> cosines and sines, [B, 1, S, d]."""
        half = self.shape.head_size // 2
        frequency = torch.exp(torch.arange(half) * (-math.log(self.shape.rope_theta) / half))
        angle = (position[..., None] * frequency).repeat(1, 1, 2)[:, None]
        return angle.cos(), angle.sin()


def draw(log_prob: Tensor, generator: Generator) -> Tensor:
    """[B, V] -> [B] tokens. A tenth of torch.multinomial's time, which draws B x V numbers where B are enough."""
    cumulative = log_prob.double().exp().cumsum(dim=-1)
    threshold = torch.rand(len(log_prob), 1, dtype=torch.float64, generator=generator) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]
