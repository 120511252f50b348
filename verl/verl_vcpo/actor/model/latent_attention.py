"""Multi-latent attention of DeepSeek's models whose queries have no low rank: V2-Lite and Moonlight."""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class PlainQueries(MLASelfAttention):
    """Megatron's class without a norm before the queries' layer, which no model has and no checkpoint can fill."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return super()._resolve_qk_norm_config(submodules) | {"linear_q_proj": submodules.linear_q_proj}


def with_plain_queries(layers: Callable[..., Any]) -> Callable[..., Any]:
    """Return the layer specs of `layers`, as Megatron-Bridge asks for them, with `PlainQueries`."""

    def block(config: Any, vp_stage: int | None = None) -> Any:
        specs = layers(config, vp_stage=vp_stage)
        for layer in specs.layer_specs:
            layer.submodules.self_attention.module = PlainQueries
        return specs

    return block
