"""What a person can do with a run's model: the last lines on the console."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.tasks.rows import SINGLE_TURN
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
    config_dir = given[given.index("--config-dir") + 1] if "--config-dir" in given else None
    if config.actor_rollout_ref.rollout.agent.default_agent_loop == SINGLE_TURN:
        presets = f" --config-dir {shlex.quote(config_dir)}" if config_dir else ""
        evaluation = f"python -m recipe.evaluate {folder} --task {task}{presets} --samples 8"
    else:
        evaluation = of_several_turns(task, model, config_dir)
    return "\n".join(
        [
            f"The trained model: {model}",
            f"  serve it     python -m recipe.vllm serve {folder}",
            "  talk to it   python -m recipe.vllm chat",
            f"  evaluate it  {evaluation}",
        ]
    )


def of_several_turns(task: str, model: Path, config_dir: str | Path | None) -> str:
    """The command that evaluates a model on a task with tools, for which recipe.evaluate has no agent loop."""
    presets = f"--config-dir {shlex.quote(str(config_dir))} " if config_dir else ""
    path = shlex.quote(f"actor_rollout_ref.model.path={model}")
    return f"python -m recipe.fully_async_policy.main {presets}+task={task} {path} trainer.val_only=true run_dir=FOLDER"


def after_interruption(config: "DictConfig") -> str:
    """How to get the model of the newest checkpoint; '' where there is none."""
    saved = checkpoints(Path(config.trainer.default_local_dir))
    return f"\nA model of it: python -m recipe.export {shlex.quote(str(saved[0]))} OUT" if saved else ""
