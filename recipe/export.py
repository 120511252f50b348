"""The policy of a checkpoint as a Hugging Face folder, which transformers and vLLM load.

    python -m recipe.export CHECKPOINT OUT      CHECKPOINT: run_dir/checkpoints/global_step_N

A checkpoint holds the weights already, gathered from the layout of the run: the new folder is a copy. With
actor_rollout_ref.actor.megatron.use_dist_checkpointing=true a checkpoint holds Megatron's own shards, which are
converted on the CPU, in one process.
"""

import contextlib
import importlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open

from recipe.command_line import OneLineParser, run_command
from recipe.fully_async_policy.launch.next_steps import one_line
from recipe.fully_async_policy.main import prepare_environment
from verl_vcpo.common.whole_file import whole_folder
from verl_vcpo.loop import checkpoint as checkpoints
from verl_vcpo.report.run_log import CONFIG_FILE

# verl/utils/megatron_utils.py: get_hf_model_checkpoint_path, get_model_dist_checkpoint_path
_WEIGHTS, _SHARDS = Path("model", "huggingface"), Path("model", "dist_ckpt")
_INDEX = "model.safetensors.index.json"


class ExportError(ValueError):
    """The error, in one line, of a checkpoint that cannot be exported."""


def export(checkpoint: Path, out: Path, model: str | None = None) -> None:
    """Write the policy of `checkpoint` to the new folder `out`.

    Args:
        checkpoint: the checkpoint's folder, or the role `actor` in the folder.
        out: a folder that does not exist, or is empty.
        model: for Megatron's own shards, the Hugging Face folder that the run began with; None: the one in the run's
            config.yaml.

    Raises:
        ExportError: the checkpoint is damaged or holds no model, or there is something in `out`.
    """
    shards = next((role / _SHARDS for role in _roles(checkpoint) if _has_shards_only(role)), None)
    weights = None if shards else weights_of(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} is there already: give a new folder")
    if wrong := _damage(checkpoint) or (_missing(weights) if weights else None):
        raise ExportError(f"{checkpoint}: {wrong}; take another checkpoint")
    if shards:
        _convert(shards, model or _first_model(shards), out)
    elif weights:
        with whole_folder(out) as partial:
            shutil.copytree(weights, partial, dirs_exist_ok=True)


def _roles(checkpoint: Path) -> tuple[Path, Path]:
    return checkpoint / "actor", checkpoint


def _has_shards_only(role: Path) -> bool:
    # verl makes the folder of the shards for each checkpoint, and that of the weights for some
    return (role / _SHARDS / "metadata.json").is_file() and not (role / _WEIGHTS / "config.json").is_file()


def _first_model(shards: Path) -> str:
    """Return the model that the run began with; `shards` is run_dir/checkpoints/global_step_N/actor/model/dist_ckpt."""
    config = shards.absolute().parents[4] / CONFIG_FILE
    if not config.is_file():
        raise ExportError(f"{shards} are Megatron's own: give the Hugging Face folder that the run began with, --model")
    return str(OmegaConf.load(config).actor_rollout_ref.model.path)


def _convert(shards: Path, model: str, out: Path) -> None:
    config = shards.parents[1] / "transformer_config.json"
    if not config.is_file():
        raise ExportError(f"{config} is missing; add extra to actor_rollout_ref.actor.checkpoint.save_contents")
    dtype = json.loads(config.read_text())["params_dtype"].removeprefix("torch.")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for GPUs: the conversion needs the host's memory only
    prepare_environment(["hardware=cpu"])
    convert = importlib.import_module("recipe.shards").convert
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # verl prints the model
            convert(shards, model, dtype, out)
    except (Exception, CheckpointException) as error:
        raise ExportError(f"{shards} and the model {model} do not fit: {one_line(error):.200}") from error


def weights_of(checkpoint: Path) -> Path:
    """Return the Hugging Face folder in a checkpoint.

    Raises:
        ExportError: there is no such folder.
    """
    if not checkpoint.is_dir():
        raise ExportError(f"{checkpoint}: no such folder")
    for role in _roles(checkpoint):
        if (role / _WEIGHTS / "config.json").is_file():
            return role / _WEIGHTS
        if _has_shards_only(role):
            raise ExportError(f"{checkpoint} holds Megatron's own shards: python -m recipe.export {checkpoint} OUT")
    for folder in (checkpoint, checkpoint / "checkpoints"):
        if found := checkpoints.checkpoints(folder):
            raise ExportError(f"{checkpoint} has several checkpoints: give one of them, e.g. {found[0]}")
    raise ExportError(
        f"{checkpoint} is no checkpoint with a model: give run_dir/checkpoints/global_step_N, of a run with model in "
        "actor_rollout_ref.actor.checkpoint.save_contents"
    )


def _damage(checkpoint: Path) -> str | None:
    """Return the damage by the checkpoint's list of files, which only runs of this package write; None: no damage."""
    for folder in (checkpoint, checkpoint.parent):
        if (folder / checkpoints.MANIFEST).is_file():
            return checkpoints.damage(folder)
    return None


def _missing(weights: Path) -> str | None:
    """Return the first weight or file that the weights' index names and that is missing; None: all are there."""
    index, place = weights / _INDEX, {}
    if index.is_file():
        place = json.loads(index.read_text())["weight_map"]
    try:
        for file in set(place.values()) or {"model.safetensors"}:
            with safe_open(weights / file, framework="pt") as tensors:
                names = set(tensors.keys())
            if lost := [name for name, of in place.items() if of == file and name not in names]:
                return f"{file} lacks {lost[0]}"
    except (OSError, SafetensorError) as error:
        return " ".join(str(error).split())
    return None


def main(argv: list[str] | None = None) -> int:
    """Export a checkpoint. Return the exit code: 2 if the checkpoint cannot be exported."""
    parser = OneLineParser(prog="python -m recipe.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="run_dir/checkpoints/global_step_N")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--model", metavar="FOLDER", help="what the run began with, if its config.yaml is not there")
    args = parser.parse_args(argv)
    try:
        export(args.checkpoint, args.out, args.model)
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {args.out}: cannot be written ({error.strerror}); give another folder", file=sys.stderr)
        return 2
    print(f"{args.out}: a Hugging Face folder. To talk to it: python -m recipe.vllm serve {args.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
