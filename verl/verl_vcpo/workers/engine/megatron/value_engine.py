"""verl's critic on Megatron, which goes on from a checkpoint as the actor does."""

from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithValueHead

from verl_vcpo.workers.engine.megatron.resume import Resumable
from verl_vcpo.workers.engine.megatron.transformer_impl import ENGINE_VENDOR


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cuda", vendor=ENGINE_VENDOR)
class ValueEngine(Resumable, MegatronEngineWithValueHead):
    """verl's critic."""
