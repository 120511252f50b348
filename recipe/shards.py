"""The conversion of Megatron's shards of any parallel layout to a Hugging Face folder, in one process on the CPU.

Importing the module imports the whole training stack.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from verl.workers.config import HFModelConfig, McoreCheckpointConfig, McoreOptimizerConfig

from verl_vcpo.actor.hugging_face import write_folder
from verl_vcpo.cpu.config import CPUMcoreEngineConfig
from verl_vcpo.cpu.engine import CPUVCPOMegatronEngine


def convert(shards: Path, model: str, dtype: str, out: Path) -> None:
    """Write the policy in `shards` to the folder `out`.

    Args:
        shards: `actor/model/dist_ckpt` of a checkpoint.
        model: the Hugging Face folder that the run began with, for the model's shape and the tokenizer.
        dtype: the weights' number format, `actor_rollout_ref.actor.megatron.dtype`.
        out: the new folder.
    """
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/rendezvous", rank=0, world_size=1)
        engine = CPUVCPOMegatronEngine(
            model_config=HFModelConfig(path=model, override_config={"attn_implementation": "eager"}),
            engine_config=CPUMcoreEngineConfig(
                dtype=dtype,
                forward_only=True,  # without an optimizer
                use_dist_checkpointing=True,
                dist_checkpointing_path=str(shards.absolute()),
                override_transformer_config={"attention_backend": "auto"},
            ),
            optimizer_config=McoreOptimizerConfig(lr=0.0, total_training_steps=1),
            checkpoint_config=McoreCheckpointConfig(),
        )
        engine.initialize()
        with torch.no_grad():
            weights, _ = engine.get_per_tensor_param()
            write_folder(weights, engine.model_config, out)
        dist.destroy_process_group()
