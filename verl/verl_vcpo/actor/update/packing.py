"""Packed norms of one engine's model, made for methods with norms alone: others tap nothing."""

import logging
from functools import partial
from typing import Any

import torch.distributed as dist
from tensordict import TensorDict

from verl_vcpo.actor.norms_settings import SECOND_BUFFERS_BYTES, against_packing
from verl_vcpo.actor.taps import experts
from verl_vcpo.actor.taps.sums import SecondBuffers
from verl_vcpo.actor.taps.tapping import plug_in
from verl_vcpo.actor.update.mini_batch import Measured
from verl_vcpo.actor.update.packed import PackedUpdate, Unmeasured
from verl_vcpo.actor.update.sequences import Sequences
from verl_vcpo.actor.vcpo_settings import VCPOSettings

logger = logging.getLogger(__name__)


class Packing:
    """The taps and the second buffers of a model. Collective over the whole trainer.

    Args:
        engine: the Megatron engine, initialized.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.tap = plug_in(engine.module)
        # Pipeline stages have different layers, and all ranks have to measure in the same way.
        trained = sum(p.numel() for chunk in engine.module for p in chunk.parameters() if p.requires_grad)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (self.why_not(), trained))
        reasons, numbers = zip(*of_ranks, strict=True)
        self.unpackable: str | None = next(filter(None, reasons), None)
        """The reason why `vcpo.norms.how=packed` is impossible with this model and these settings; None: possible."""
        self.second_buffers = SecondBuffers(max(1, SECOND_BUFFERS_BYTES // (4 * max(1, *numbers))))
        self._warned = False

    def why_not(self) -> str | None:
        """Return `unpackable` for this rank's part of the model."""
        engine = self._engine
        if engine.module[0].ddp_config.overlap_grad_reduce:
            return "overlap_grad_reduce=true: gradients would be reduced before they are computed"
        if engine.engine_config.pad_to_length or engine.engine_config.use_fused_kernels:
            return "pad_to_length and use_fused_kernels are not supported"
        if unsupported := against_packing(partial(getattr, engine.tf_config)):
            return unsupported
        if engine.tf_config.cuda_graph_impl != "none":
            return "a CUDA graph gives no gradients to a collector"
        if engine.model_config.mtp.enable:
            return "multi-token prediction is not supported"
        if engine.tf_config.softmax_type == "learnable":
            return "softmax_type=learnable: the attention's parameters are not collected"
        of_experts = experts.obstacle(engine.tf_config) if engine.tf_config.num_moe_experts else None
        return of_experts or self.tap.untapped

    def measured(
        self, data: TensorDict, sequences: Sequences, config: VCPOSettings, aggregation: dict[str, Any]
    ) -> Measured | None:
        """Return the result of `PackedUpdate.run`; None where packed norms are not possible, with a warning."""
        if self.unpackable:
            if not self._warned and dist.get_rank() == 0:
                logger.warning("vcpo.norms.how=%s -> per_trajectory: %s", config.norms.how, self.unpackable)
            self._warned = True
            return None
        for sums in (True, False):  # gradients may be too large or small only with their weights, which sums contain
            update = PackedUpdate(
                self._engine, self.tap, data, sequences, config, aggregation, self.second_buffers, sums
            )
            try:
                return update.run()
            except Unmeasured:
                for second in self.second_buffers.values():
                    second.zero_()
            if not update.has_sums:
                break
        logger.warning(
            "vcpo.norms.how=%s: a sequence's gradient is not finite; per_trajectory finds which", config.norms.how
        )
        return None
