"""verl's critic on Megatron, which goes on from a checkpoint as the actor does."""

from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithValueHead

from verl_vcpo.actor.local_layers import LocalLayers
from verl_vcpo.actor.megatron_actor import ENGINE_VENDOR
from verl_vcpo.actor.resume import Resumable


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cuda", vendor=ENGINE_VENDOR)
class ValueEngine(LocalLayers, Resumable, MegatronEngineWithValueHead):
    """verl's critic."""
