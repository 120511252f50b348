"""The policy of a checkpoint as a Hugging Face folder, which transformers and vLLM load.

    python -m recipe.export CHECKPOINT OUT      CHECKPOINT: run_dir/checkpoints/global_step_N

A checkpoint holds the weights already, gathered from the layout of the run: the new folder is a copy.
"""

import shutil
import sys
from pathlib import Path

from recipe.command_line import OneLineParser, run_command
from recipe.fully_async_policy.settings.model import missing_weights
from verl_vcpo.common.whole_file import is_free, whole_folder
from verl_vcpo.loop import checkpoint as checkpoints

# verl/utils/megatron_utils.py: get_hf_model_checkpoint_path, get_model_dist_checkpoint_path
_WEIGHTS, _SHARDS = Path("model", "huggingface"), Path("model", "dist_ckpt")


class ExportError(ValueError):
    """The error, in one line, of a checkpoint that cannot be exported."""


def export(checkpoint: Path, out: Path) -> None:
    """Write the policy of `checkpoint` to the new folder `out`.

    Args:
        checkpoint: the checkpoint's folder, or the role `actor` in the folder.
        out: a folder that does not exist, or is empty.

    Raises:
        ExportError: the checkpoint is damaged or holds no model, or there is something in `out`.
    """
    weights = weights_of(checkpoint)
    if not is_free(out):
        raise ExportError(f"{out} is there already: give a new folder")
    if out.resolve().is_relative_to(checkpoint.resolve()):
        raise ExportError(f"{out} is in the checkpoint: give a folder elsewhere")
    if wrong := _damage(checkpoint) or missing_weights(weights):
        raise ExportError(f"{checkpoint}: {wrong}; take another checkpoint")
    with whole_folder(out) as partial:
        shutil.copytree(weights, partial, dirs_exist_ok=True)


def weights_of(checkpoint: Path) -> Path:
    """Return the Hugging Face folder in a checkpoint.

    Raises:
        ExportError: there is no such folder.
    """
    if not checkpoint.is_dir():
        raise ExportError(f"{checkpoint}: no such folder")
    for role in (checkpoint / "actor", checkpoint):
        if (role / _WEIGHTS / "config.json").is_file():
            return role / _WEIGHTS
        if (role / _SHARDS / "metadata.json").is_file():
            raise ExportError(
                f"{checkpoint} holds Megatron's own shards alone: add hf_model to "
                "actor_rollout_ref.actor.checkpoint.save_contents, go on from it, and take the next checkpoint"
            )
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


def main(argv: list[str] | None = None) -> int:
    """Export a checkpoint. Return the exit code: 2 if the checkpoint cannot be exported."""
    parser = OneLineParser(prog="python -m recipe.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="run_dir/checkpoints/global_step_N")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    args = parser.parse_args(argv)
    try:
        export(args.checkpoint, args.out)
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # copytree goes on after an error, and lists all of them: (from, to, why)
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        print(f"error: {args.out}: cannot be written ({why}); give another folder", file=sys.stderr)
        return 2
    print(f"{args.out}: a Hugging Face folder. To talk to it: python -m recipe.vllm serve {args.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
