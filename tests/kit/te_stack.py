"""The CPU stack on Transformer Engine's layers, in processes that import this module before anything else of the stack.

Models are those that Megatron-Bridge builds on a GPU, with its own layer specs, except that attention, which has no
parameters, is torch's.
"""

from verl_vcpo.cpu import environment

environment.apply()  # before torch is imported

from tests.kit import te_on_cpu  # noqa: E402

te_on_cpu.install()  # before Megatron is imported

import copy  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformer_engine  # noqa: E402
from megatron.core.extensions import transformer_engine as extension  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch import Tensor  # noqa: E402

from verl_vcpo.actor.model.varlen_attention import VarlenAttention  # noqa: E402


class TorchAttention(VarlenAttention):
    """torch's attention in the place of Transformer Engine's, with sliding windows."""

    def __init__(
        self, config: TransformerConfig, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any
    ) -> None:
        """Take the arguments that Megatron gives to Transformer Engine's attention."""
        without_window = copy.copy(config)
        without_window.window_size = None
        super().__init__(without_window, *args, **kwargs)
        self.window = config.window_size

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int) -> Tensor:
        if self.window is None:
            return super()._packed(query, key, value, offsets, longest)
        assert self.cp_group.size() == 1 and self.window[1] == 0
        inner, outputs = offsets[1:-1].long(), []
        for of_sequence in zip(*(x.tensor_split(inner) for x in (query, key, value)), strict=True):
            at = torch.arange(len(of_sequence[0]))
            before = at[:, None] - at
            mask = (before >= 0) & (before <= self.window[0])
            q, k, v = (x.transpose(0, 1) for x in of_sequence)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
            outputs.append(out.transpose(0, 1).flatten(1))
        return torch.cat(outputs)


extension.TEDotProductAttention = TorchAttention  # before layer specs take it

from tests.kit import layout_worker  # noqa: E402
from verl_vcpo.actor.model.local_layers import LocalLayers  # noqa: E402
from verl_vcpo.cpu.megatron_shims import TRANSFORMER_CONFIG  # noqa: E402

TRANSFORMER_CONFIG["moe_grouped_gemm"] = True  # as Megatron-Bridge has it on a GPU
TRANSFORMER_CONFIG["moe_shared_expert_overlap"] = False  # norms of DeepSeek-V2 would not be packed
run = layout_worker.run  # a process of `layout_run`
_upstream = LocalLayers._build_tf_config


def _build_tf_config(self: Any) -> None:
    from megatron.bridge.peft import utils

    utils.version = lambda package: transformer_engine.__version__  # no package of that name is installed
    _upstream(self)


LocalLayers._build_tf_config = _build_tf_config  # type: ignore[method-assign]


def pytest_configure() -> None:
    """Do nothing: `pytest -p tests.kit.te_stack` imports the module, and tests run on Transformer Engine's layers."""
