"""What a person can do with a run's model: the last lines on the console."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from verl_vcpo.trainer.ppo.v1.checkpoint import checkpoints
from verl_vcpo.trainer.ppo.v1.run_log import MODEL_FOLDER

if TYPE_CHECKING:
    from omegaconf import DictConfig


def after_training(config: "DictConfig", given: list[str]) -> str:
    """How to talk to the trained model and how to evaluate it; '' where the run has written none.

    Args:
        config: the run's.
        given: the arguments that the run was started with: `+task=NAME` among them.
    """
    if not config.save_model or config.trainer.val_only:
        return ""
    model = Path(config.run_dir, MODEL_FOLDER)
    if not model.is_dir():
        return f"The trained model is in {model}, on the node of the trainer's first worker."
    folder = shlex.quote(str(model))
    task = next((o.split("=", 1)[1] for o in given if o.startswith(("+task=", "task="))), "NAME")
    if "--config-dir" in given:
        task += f" --config-dir {shlex.quote(given[given.index('--config-dir') + 1])}"
    return "\n".join(
        [
            f"The trained model: {model}",
            f"  serve it     python -m recipe.vllm serve {folder}",
            "  talk to it   python -m recipe.vllm chat",
            f"  evaluate it  python -m recipe.evaluate {folder} --task {task} --samples 8",
        ]
    )


def after_interruption(config: "DictConfig") -> str:
    """How to get the model of the newest checkpoint; '' where there is none."""
    saved = checkpoints(Path(config.trainer.default_local_dir))
    return f"\nA model of it: python -m recipe.export {shlex.quote(str(saved[0]))} OUT" if saved else ""
