"""The process that receives a sampler's weights does without vLLM, and has its socket in the run's folder."""

import subprocess
import sys
from pathlib import Path

import pytest
from verl.third_party import vllm as theirs
from verl.workers.rollout.vllm_rollout import vllm_rollout

from verl_vcpo.common.run_folder import run_folder
from verl_vcpo.common.run_id import RUN_ID_VARIABLE
from verl_vcpo.weights.receiver import SLEEP_LEVEL

MAKE = """
import sys
from types import SimpleNamespace
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl_vcpo.weights.receiver import LagKCheckpointEngineWorker
adapter = SimpleNamespace(zmq_handle="ipc:///tmp/rl-colocate-zmq-1-replica-0-rank-0.sock", update_weights=dict)
lora = {"rank": 4, "alpha": 8, "merge": False}
model = SimpleNamespace(lora=lora)
# needs Ray
CheckpointEngineWorker.__init__ = lambda self: vars(self).update(server_adapter=adapter, model_config=model)
LagKCheckpointEngineWorker()
print(adapter.zmq_handle)
sent = adapter.update_weights()
print(sent["peft_config"]["r"], sent["base_sync_done"])
from verl.workers.rollout.base import get_rollout_class
print(get_rollout_class("vllm", "async").__name__, "vllm" in sys.modules)
"""


def test_verls_client_of_the_server_is_found_and_vllm_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv(RUN_ID_VARIABLE, "0123456789ab")
    done = subprocess.run([sys.executable, "-c", MAKE], capture_output=True, text=True, timeout=120)
    address = f"ipc://{run_folder('0123456789ab')}/rl-colocate-zmq-1-replica-0-rank-0.sock"
    assert done.stdout.split() == [address, "4", "True", vllm_rollout.ServerAdapter.__name__, "False"], done.stderr


def test_the_number_is_the_one_that_verl_would_take() -> None:
    assert theirs.VLLM_SLEEP_LEVEL == SLEEP_LEVEL
