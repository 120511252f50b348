"""torch's store listens where its process group names it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

from tests.kit.sandbox_server import free_port

PORTS = """
import json, os, pathlib, sys, time
import psutil, torch, torch.distributed as dist
from verl_vcpo.common.distributed import keep_stores_on_loopback
if sys.argv[1] == "ours":
    keep_stores_on_loopback()
for _ in range(2):  # a second group on the same port, as after a restart of the engine
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    dist.barrier()
    dist.destroy_process_group()
    closed = pathlib.Path(os.environ["CLOSED"])
    if os.environ["RANK"] == "0":
        closed.touch()
    while not closed.exists():  # a rank that is too early would wait in the old store for the new group
        time.sleep(0.01)
print(json.dumps(listening))
"""


def addresses(patch: str, folder: Path) -> set[str]:
    """Where two processes of one group listen."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PORTS, patch],
            env=os.environ | group | {"RANK": str(rank), "CLOSED": str(folder / "closed")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    return {address for output in outputs for address in json.loads(output.splitlines()[-1])}


@pytest.mark.parametrize(("patch", "expected"), [("ours", {"127.0.0.1"}), ("torch's", {"127.0.0.1", "::"})])
def test_a_store_named_by_loopback_listens_there_only(patch: str, expected: set[str], tmp_path: Path) -> None:
    assert addresses(patch, tmp_path) == expected


def test_every_process_that_imports_verl_has_it() -> None:
    import verl  # noqa: F401  # loads the plugin

    rendezvous = sys.modules[torch.distributed.rendezvous.__module__]
    assert rendezvous.TCPStore.__module__ == "verl_vcpo.common.distributed"
