"""The patched Megatron actor, or the critic, alone, for a measurement or a test: on CPU, or on a GPU if there is one.

Importing the module imports the whole training stack and, without a GPU, applies the environment of a CPU run. On a GPU
Megatron's own layers need PyTorch and packages without kernels; attention is torch's where Transformer Engine is not
installed.
"""

import os
import zlib
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from verl_vcpo.common import start_up
from verl_vcpo.cpu import environment

start_up.set_up_process()
ON_GPU = torch.cuda.is_available()
if ON_GPU:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's condition for tensor parallelism
else:
    environment.apply()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from verl.workers.config import HFModelConfig, McoreCheckpointConfig, McoreOptimizerConfig  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

from tests.kit.layout_run import GROUP_SIZE, LEARNING_RATE, ParallelLayout  # noqa: E402
from verl_vcpo.actor.actor_settings import VCPOActorConfig  # noqa: E402
from verl_vcpo.actor.update.mini_batch import Measured  # noqa: E402
from verl_vcpo.actor.update.one_pass import log_probs  # noqa: E402
from verl_vcpo.actor.update.sequences import Sequences  # noqa: E402
from verl_vcpo.actor.vcpo_settings import VCPOSettings  # noqa: E402
from verl_vcpo.cpu.config import CPUMcoreEngineConfig  # noqa: E402

if ON_GPU:
    from verl_vcpo.actor.megatron_actor import ValueEngine as Critic
    from verl_vcpo.actor.megatron_actor import VCPOMegatronEngine as Engine
else:
    from verl_vcpo.cpu.engine import CPUValueEngine as Critic
    from verl_vcpo.cpu.engine import CPUVCPOMegatronEngine as Engine


def adamw(learning_rate: float = LEARNING_RATE) -> McoreOptimizerConfig:
    """Return the optimizer that trains the layouts."""
    return McoreOptimizerConfig(
        lr=learning_rate,
        weight_decay=0.1,
        clip_grad=0.1,  # reached: clipping comes after the baseline on every layout
        lr_warmup_steps=0,
        total_training_steps=100,
        # at 1e-8 Adam turns the rounding of tiny gradients into full steps
        override_optimizer_config={"adam_eps": 1e-4},
    )


def engine_settings(
    layout: ParallelLayout,
    checkpoint: Path,
    optimizer: McoreOptimizerConfig,
    dtype: str = "float32",
    model_type: str = "language_model",
    **engine: Any,
) -> dict[str, Any]:
    """Return the engine's configurations, under verl's names; `engine`: more of verl's engine settings."""
    transformer: dict[str, Any] = {"attention_backend": "auto"}
    if ON_GPU:
        implementation = {"local": "local", "te": "transformer_engine"}[layout.layers]
        transformer |= {"transformer_impl": implementation, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    if layout.tp > 1:
        transformer["sequence_parallel"] = layout.sequence_parallel
    if layout.recompute:
        transformer |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    lora: dict[str, Any] = {"rank": layout.lora_rank, "alpha": 16, "merge": True} if layout.lora_rank else {}
    if layout.model == "moe_lora":
        lora["target_modules"] = ["linear_qkv", "linear_proj"]
    return dict(
        model_config=HFModelConfig(path=str(checkpoint), load_tokenizer=True, model_type=model_type, lora=lora),
        engine_config=CPUMcoreEngineConfig(  # verl's own refuses float32, which exactness is checked in
            dtype=dtype,
            use_remove_padding=layout.packed,
            use_distributed_optimizer=layout.distributed_optimizer,
            tensor_model_parallel_size=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            override_transformer_config=transformer,
            **engine,
        ),
        optimizer_config=optimizer,
        checkpoint_config=McoreCheckpointConfig(),
    )


def build_engine(
    layout: ParallelLayout,
    checkpoint: Path,
    optimizer: McoreOptimizerConfig,
    dtype: str = "float32",
    model_type: str = "language_model",
    **engine: Any,
) -> Any:
    """Build and load the patched actor, or the critic if `model_type` is value_model."""
    engine_class = {"language_model": Engine, "value_model": Critic}[model_type]
    built = engine_class(**engine_settings(layout, checkpoint, optimizer, dtype, model_type, **engine))
    # Megatron writes its choice of attention into the environment, and child processes would refuse another choice.
    with patch.dict(os.environ):
        built.initialize()
    if layout.lora_rank:
        _fill_adapters(built, layout.tp)
    return built


def _fill_adapters(engine: Any, tp: int) -> None:
    """Give adapters the same weights on every layout: Megatron draws them on each rank, and B is zero."""
    rank = mpu.get_tensor_model_parallel_rank()
    for layer in (m for chunk in engine.module for m in chunk.modules() if isinstance(m, TransformerLayer)):
        for name, weight in layer.named_parameters():
            if not weight.requires_grad:
                continue
            gate_and_up = 2 if "linear_fc1.adapter.linear_out" in name else 1  # each rank has a part of both
            axis = weight.partition_dim
            shape = [size * (tp if i == axis else 1) for i, size in enumerate(weight.shape)]
            draw = torch.Generator().manual_seed(zlib.crc32(f"{layer.layer_number} {name}".encode()))
            whole = 0.1 * torch.randn(*shape, generator=draw).unflatten(axis, (gate_and_up, -1))
            weight.data.copy_(whole.chunk(tp, dim=axis + 1)[rank].flatten(axis, axis + 1))
    engine.optimizer.reload_model_params()


def loss_function(vcpo: VCPOSettings, loss_agg_mode: str = "seq-mean-token-mean", **actor: Any) -> partial[Any]:
    """Return verl's loss as the engine receives it: a partial with the actor's configuration."""
    config = VCPOActorConfig(
        strategy="megatron",
        rollout_n=GROUP_SIZE,
        ppo_micro_batch_size_per_gpu=2,
        loss_agg_mode=loss_agg_mode,
        vcpo=vcpo,
        **actor,
    )
    return partial(ppo_loss, config=config)


def two_passes() -> Any:
    """In the block of this context, an update without norms measures its weights by a forward pass alone."""

    def measured(engine: Any, data: Any, sequences: Sequences, *_: Any) -> Measured:
        return Measured(sequences.measured(log_probs(engine, data, engine.infer_batch(data))), None)

    return patch("verl_vcpo.actor.megatron_actor.one_pass", measured)


def join_processes(rank: int, world_size: int, folder: Path) -> None:
    """Join the group of a measurement with this process and its device."""
    torch.set_num_threads(1)
    backend = "gloo"
    if ON_GPU:
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False  # else float32 products have the digits of bfloat16
        backend = "cpu:gloo,cuda:nccl"  # verl's
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
