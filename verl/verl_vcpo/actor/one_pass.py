"""One forward and backward that measures importance weights and forms the gradient, for baselines without norms.

A coefficient is then the sequence's own weight, which comes out of the forward pass, times a factor of the rewards,
which are known before. The factors take every real sequence for usable. Where a weight turns out NaN or infinite, the
factors are wrong and the gradient may be: activations that are NaN spoil the gradient of every weight (0 * NaN). The
pass is then a measurement alone, and a second one forms the gradient.
"""

from functools import partial
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from vcpo import VCPOConfig
from vcpo.estimator import reward_factors
from verl_vcpo.actor.losses import padded_responses
from verl_vcpo.actor.mini_batch import MiniBatch, gather_mini_batch, gather_sequences


def one_pass(
    engine: Any, data: TensorDict, config: VCPOConfig, loss: partial[Any]
) -> tuple[MiniBatch, dict[str, Any] | None]:
    """Run the pass over one mini-batch. Collective over the whole trainer.

    Args:
        engine: the Megatron engine, in train mode.
        data: this data-parallel rank's b sequences.
        config: VCPO's settings, with a baseline that needs no norms.
        loss: `weighted_score_loss` with its aggregation.

    Returns:
        The mini-batch, and the outputs of `forward_backward_batch`: the gradient is in Megatron's buffers. None in
        their place, on all ranks, where the gradient is still to be formed; routers' states are those of before.
    """
    tu.maybe_fix_3d_position_ids(data)
    before = gather_sequences(data, engine.get_data_parallel_rank())
    if not (before.usable & ~before.masked).any():  # no step follows, and so no state may move
        return gather_outputs(engine, data, engine.infer_batch(data)), None
    factor = reward_factors(config, before.reward, before.group, usable=before.usable, masked=before.masked)
    data["vcpo_coefficient"] = factor[before.mine]  # [b]
    states = [(buffer, buffer.clone()) for chunk in engine.module for _, buffer in chunk.named_buffers()]
    engine.optimizer_zero_grad()
    outputs = engine.forward_backward_batch(data, partial(loss, importance=config))
    batch = gather_outputs(engine, data, outputs)
    if not batch.spoils.any():
        return batch, outputs
    for buffer, state in states:  # experts' biases follow the tokens of each pass that has a backward
        buffer.copy_(state)
    return batch, None


def gather_outputs(engine: Any, data: TensorDict, outputs: dict[str, Any]) -> MiniBatch:
    """Gather a mini-batch's rows from the outputs of a pass over this data-parallel rank's sequences."""
    log_prob = None
    if engine.is_mp_src_rank_with_outputs():
        log_prob = padded_responses(outputs["model_output"]["log_probs"], data)
    return gather_mini_batch(data, engine.get_data_parallel_rank(), log_prob, None)
