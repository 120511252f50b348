"""What a run says at its end: how to use the model."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.launch.next_steps import after_training
from tests.recipe.refused import MODEL


def config(run_dir: Path, agent_loop: str = "single_turn_agent", code: bool = False, **settings: Any) -> DictConfig:
    trainer = {"default_local_dir": str(run_dir / "checkpoints"), "val_only": settings.pop("val_only", False)}
    actor = {"rollout": {"agent": {"default_agent_loop": agent_loop}}, "model": {"trust_remote_code": code}}
    return OmegaConf.create(
        {"run_dir": str(run_dir), "save_model": True, "trainer": trainer, "actor_rollout_ref": actor, **settings}
    )


def test_the_model_and_what_to_do_with_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    (run_dir / "model").mkdir(parents=True)
    lines = after_training(config(run_dir), ["hardware=cpu", "+task=gsm8k"]).splitlines()
    assert lines[0] == f"The trained model: {run_dir}/model"
    assert lines[1].endswith(f"python -m recipe.vllm serve '{run_dir}/model'"), "a shell takes it as it is"
    assert lines[3].endswith(f"{run_dir}/model' --settings-of '{run_dir}' --samples 8"), "the run's data and reward"
    lines = after_training(config(run_dir, code=True), ["+task=gsm8k"]).splitlines()
    assert lines[1].endswith(" --trust-remote-code")


def test_the_whole_stack_evaluates_a_task_with_tools(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    given = ["--config-dir", "mine", "+task=sort_by_tool", "data.val_files=b", f"{MODEL}.path=first", "run_dir=first"]
    said = after_training(config(tmp_path, "tool_agent"), given).splitlines()
    assert said[3] == (
        "  evaluate it  python -m recipe.fully_async_policy.main --config-dir mine +task=sort_by_tool data.val_files=b "
        f"actor_rollout_ref.model.path={tmp_path}/model trainer.val_only=true run_dir=FOLDER"
    )


def test_nothing_is_said_of_a_model_that_was_not_written(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()  # an earlier run's
    assert after_training(config(tmp_path, save_model=False), []) == ""
    assert after_training(config(tmp_path, val_only=True), []) == ""
    assert "on the node of the trainer's first worker" in after_training(config(tmp_path / "elsewhere"), [])
