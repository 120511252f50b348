"""Around a run: its folder, its log, its Ray cluster."""

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from recipe.fully_async_policy.launch.nodes import RunOnNodes
    from recipe.fully_async_policy.launch.processes import RunOnMachine

LOGGING = {
    "VERL_LOGGING_LEVEL": "WARN",
    "TQ_LOGGING_LEVEL": "ERROR",
    # Of what a process of Ray's prints, or user code in it, 32 MB are kept, and as much of what came before. With
    # a limit the process prints into a pipe, so that a full disk does not end it.
    "RAY_ROTATION_MAX_BYTES": f"{32 << 20}",
    "RAY_ROTATION_BACKUP_COUNT": "1",
}
_FILE_LOGGER_PATH, _OF_A_PROCESS = "VERL_FILE_LOGGER_PATH", "/proc/self/"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@contextlib.contextmanager
def ray_session(config: DictConfig, run_id: str, last_words: str = "") -> "Iterator[RunOnNodes]":
    """A run's folder and a Ray cluster for the block; nothing of it on any node after it.

    Args:
        last_words: for the terminal, where this process is killed.
    """
    from recipe.fully_async_policy.launch.older_run import FILE_LOGGER, RAY_LOGS, TENSORBOARD, VERL_LOG
    from recipe.fully_async_policy.launch.processes import cleaned_up
    from recipe.fully_async_policy.launch.ray_access import session_folder
    from verl_vcpo.common import console, held_folders, start_up
    from verl_vcpo.common.run_folder import run_folder
    from verl_vcpo.common.whole_file import free_beside, write_whole
    from verl_vcpo.report.run_log import CONFIG_FILE, SUMMARY_FILE

    run_dir = held_folders.checked(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    for logged in (run_dir / VERL_LOG, run_dir / RAY_LOGS):  # by an earlier launch: why that launch ended
        if logged.exists():
            os.replace(logged, free_beside(logged))
    write_whole(run_dir / CONFIG_FILE, OmegaConf.to_yaml(config))  # `vcpo evaluate --follow` reads it meanwhile
    wandb = start_up.environment({"WANDB_DIR": os.environ.get("WANDB_DIR", str(run_dir))})
    # Paths of this process alone: not for Ray's processes, whose environment is that of Ray's start. TensorBoard's
    # thread opens its file again for each write.
    here_alone = {"TENSORBOARD_DIR": str(held_folders.through(run_dir) / TENSORBOARD)}
    if os.environ.get(_FILE_LOGGER_PATH, _OF_A_PROCESS).startswith(_OF_A_PROCESS):  # another run's, as in its tool
        here_alone[_FILE_LOGGER_PATH] = str(held_folders.through(run_dir) / FILE_LOGGER)

    # The terminal is for our lines and the progress bar; what verl, Ray and vLLM print goes to a file.
    of_run = run_folder(run_id)
    session = session_folder(config.ray_kwargs.ray_init, of_run)
    folders = {of_run, session or of_run}
    cleaning = cleaned_up(run_id, *folders, last_words=last_words)
    with open(run_dir / VERL_LOG, "w") as log, cleaning as here, console.owned(log):
        try:
            places = start_up.temporary_files_in_run_folder()
            with wandb, places, _ray(config, here, session, log) as run, start_up.environment(here_alone):
                yield run
        except BaseException as error:
            print(traceback.format_exc(), file=log, flush=True)
            if isinstance(error, Exception) and session and (place := held_folders.place(run_dir)):
                here.keep_logs_in = place / RAY_LOGS
                print(f"The processes' own logs are in {here.keep_logs_in}", file=log, flush=True)
            raise
        finally:
            console.screen().ending()


@contextlib.contextmanager
def _ray(config: DictConfig, here: "RunOnMachine", session: Path | None, log: TextIO) -> "Iterator[RunOnNodes]":
    """The Ray cluster of `ray_session`."""
    from recipe.fully_async_policy.launch.processes import catch_sigterm, interrupted_afterwards
    from verl_vcpo.common import console

    console.screen().stage("Loading the packages (torch, Ray, Megatron)")
    with interrupted_afterwards():
        import ray
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        import verl_vcpo.loop.main  # noqa: F401  # Megatron and verl's trainer, before Ray starts
        from recipe.fully_async_policy.launch import ray_access
        from recipe.fully_async_policy.launch.nodes import RunOnNodes
        from verl_vcpo.samplers import replica

    if os.environ["VCPO_HARDWARE"] == "cpu":
        replica.register("verl_vcpo.cpu.vllm_server", "CPUvLLMReplica")
    else:
        replica.register("verl_vcpo.samplers.vllm_server", "LagKvLLMReplica")
    console.screen().stage("Starting Ray")
    init = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    in_each_worker = {"env_vars": environment_of_workers()}
    given = init.pop("runtime_env", None) or {}
    runtime_env = OmegaConf.merge(get_ppo_ray_runtime_env(config), in_each_worker, given)
    init["runtime_env"] = OmegaConf.to_container(runtime_env)
    with ray_access.started(init, session), contextlib.ExitStack() as ending:
        catch_sigterm()
        run = RunOnNodes(here)
        # The last one first, and each whatever the others raise.
        for at_the_end in (run.clean_up_elsewhere, here.observe, console.screen().ending):
            ending.callback(at_the_end)
        try:
            yield run
        except Exception:
            if session is None:
                logs = ray._private.worker.global_worker.node.get_logs_dir_path()
                print(f"The processes' own logs are on each node in {logs}", file=log, flush=True)
            raise


def environment_of_workers() -> dict[str, str]:
    """What the run's processes need of this process's environment, also those of a Ray that was running before."""
    import torch

    from verl_vcpo.common.run_id import RUN_ID_VARIABLE

    defaults = {**LOGGING, "PYTHONUTF8": "1"}
    if os.environ["VCPO_HARDWARE"] == "cpu":
        from verl_vcpo.cpu import environment

        defaults |= environment.ENVIRONMENT
    elif _CONNECTIONS in os.environ or not torch.cuda.is_available():
        # For Megatron's overlap of communication. verl goes by the driver's GPU, and a cluster's head may have none.
        defaults[_CONNECTIONS] = "1"
    # A package that has been imported here may have removed its variable.
    given = {name: os.environ.get(name, value) for name, value in defaults.items()}
    if "PYTHONPATH" in os.environ:  # `vcpo train` in another folder finds the checkout by it
        given["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return given | {RUN_ID_VARIABLE: os.environ[RUN_ID_VARIABLE]}
