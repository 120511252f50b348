"""One process of a layout that trains a step, and leaves a checkpoint, a Hugging Face folder and its log-probs."""

from functools import partial
from pathlib import Path

from tests.kit.actor import adamw, build_engine, join_processes, loss_function  # applies the environment first

import torch  # isort: skip
import torch.distributed as dist
from tensordict import TensorDict

from tests.kit.layout_run import ParallelLayout
from tests.kit.layout_worker import make_batch
from vcpo.config import Baseline
from verl_vcpo.actor.model.hugging_face import write_folder, write_weights
from verl_vcpo.actor.update.losses import padded_responses
from verl_vcpo.actor.vcpo_settings import VCPOSettings

CHECKPOINT, MODEL, LOG_PROBS = "global_step_1", "model", "log_probs"
_SHARD_BYTES = 100_000  # several files


def run(layout: ParallelLayout, model: Path, folder: Path, rank: int) -> None:
    """Leave the folders `CHECKPOINT` and `MODEL`, and the batch's `LOG_PROBS` [B, T]."""
    join_processes(rank, layout.world_size, folder)
    engine = build_engine(layout, model, adamw())
    with engine.train_mode():
        engine.train_batch(batch_of(layout), loss_function(VCPOSettings(baseline=Baseline.MEAN)))
    engine.save_checkpoint(str(folder / CHECKPOINT / "actor"))
    with torch.no_grad():
        in_parts = partial(write_weights, engine.whole_policy(), shard=_SHARD_BYTES)
        write_folder(in_parts, engine.files_beside_weights, folder / MODEL)
    batch = batch_of(layout)
    with engine.eval_mode():
        outputs = engine.infer_batch(batch)
    if engine.is_mp_src_rank_with_outputs() and engine.get_data_parallel_rank() == 0:
        torch.save(padded_responses(outputs["model_output"]["log_probs"], batch), folder / LOG_PROBS)
    dist.barrier()


def batch_of(layout: ParallelLayout) -> TensorDict:
    """Return the batch, which is the same on all data-parallel ranks."""
    return make_batch(layout)
