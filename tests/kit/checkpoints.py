"""Checkpoints of small files, written by the code that writes a run's checkpoints."""

from pathlib import Path

from omegaconf import OmegaConf

from verl_vcpo.loop.checkpoint import written_whole


def write_checkpoint(root: Path, step: int, run: str | None = None, keep: int | None = None, **files: str) -> Path:
    """Write the checkpoint of `step` of the run `run` in `root`, and return its folder.

    Args:
        keep: `trainer.max_actor_ckpt_to_keep`.
        files: the contents of the files, by name.
    """
    trainer = OmegaConf.create({"default_local_dir": str(root), "max_actor_ckpt_to_keep": keep})
    with written_whole(trainer, step, run) as folder:
        folder.mkdir()
        for name, text in (files or {"model": "weights"}).items():
            (folder / name).write_text(text)
    return root / folder.name
