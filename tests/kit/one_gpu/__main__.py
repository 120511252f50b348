"""Run PROGRAM with several GPUs of Ray that are this machine's one GPU: `python -m tests.kit.one_gpu PROGRAM ...`.

A whole run with trainer and samplers on one GPU needs `+ray_kwargs.ray_init.num_gpus=2` besides. Everything in it is
what runs on several GPUs, NCCL among it, which goes over the loopback interface. Memory and time are shared: each
sampler takes `actor_rollout_ref.rollout.gpu_memory_utilization` of the card, and the trainer the rest.
"""

import os
import sys
from pathlib import Path

from tests.kit.start_of_python import python_path


def environment() -> dict[str, str]:
    """Return the variables of a process whose Ray has several GPUs."""
    return {
        "PYTHONPATH": python_path(Path(__file__).parent / "site"),
        "VCPO_ONE_GPU": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **environment()})
