"""One forward and backward that measures importance weights and forms the gradient, for baselines without norms.

A coefficient is then the sequence's own weight, which comes out of the forward pass, times a factor of the rewards,
which are known before. The factors take every real sequence for usable. Where a weight turns out NaN or infinite, the
factors are wrong and the gradient may be: activations that are NaN spoil the gradient of every weight (0 * NaN). The
pass is then a measurement alone, and a second one forms the gradient.
"""

from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from vcpo import VCPOConfig
from vcpo.estimator import reward_factors
from verl_vcpo.actor.update.losses import padded_responses
from verl_vcpo.actor.update.mini_batch import Measured
from verl_vcpo.actor.update.sequences import Sequences


def one_pass(engine: Any, data: TensorDict, sequences: Sequences, config: VCPOConfig, loss: partial[Any]) -> Measured:
    """Run the pass over one mini-batch. Collective over the whole trainer.

    Args:
        engine: the Megatron engine, in train mode.
        data: this data-parallel rank's b sequences.
        sequences: those of `data`.
        config: VCPO's settings, with a baseline that needs no norms.
        loss: `weighted_score_loss` with its aggregation.

    Returns:
        Without outputs, routers' states are those of before.
    """
    tu.maybe_fix_3d_position_ids(data)
    facts = sequences.facts
    if not (facts.usable & ~facts.masked).any():  # no step follows, and so no state may move
        return Measured(sequences.measured(log_probs(engine, data, engine.infer_batch(data))), None)
    factor = reward_factors(config, facts.reward, facts.group, usable=facts.usable, masked=facts.masked)
    data["vcpo_coefficient"] = factor[sequences.mine]  # [b]
    states = [(buffer, buffer.clone()) for chunk in engine.module for _, buffer in chunk.named_buffers()]
    engine.optimizer_zero_grad()
    outputs = engine.forward_backward_batch(data, partial(loss, importance=config))
    batch = sequences.measured(log_probs(engine, data, outputs))
    if not batch.spoils.any():
        return Measured(batch, outputs)
    for buffer, state in states:  # experts' biases follow the tokens of each pass that has a backward
        buffer.copy_(state)
    return Measured(batch, None)


def log_probs(engine: Any, data: TensorDict, outputs: dict[str, Any]) -> Tensor | None:
    """Return [b, T] log-probs of the response tokens, from the outputs of a pass; None on ranks that hold none."""
    if not engine.is_mp_src_rank_with_outputs():
        return None
    return padded_responses(outputs["model_output"]["log_probs"], data)


def outputs_of(engine: Any, losses: list[float]) -> dict[str, Any]:
    """Return what `forward_backward_batch` would, of passes whose log-probs are gathered already."""
    if not engine.is_mp_src_rank_with_outputs():
        return {}
    return {"model_output": {}, "loss": losses, "metrics": {}}
