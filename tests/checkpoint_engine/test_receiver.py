"""The process that receives a sampler's weights does without vLLM."""

import subprocess
import sys

from verl.third_party import vllm as theirs
from verl.workers.rollout.vllm_rollout import vllm_rollout

from verl_vcpo.checkpoint_engine.receiver import SLEEP_LEVEL

MAKE = """
import sys
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl_vcpo.checkpoint_engine.receiver import LagKCheckpointEngineWorker
CheckpointEngineWorker.__init__ = lambda self, name: None  # needs Ray
LagKCheckpointEngineWorker("vllm")
from verl.workers.rollout.base import get_rollout_class
print(get_rollout_class("vllm", "async").__name__, "vllm" in sys.modules)
"""


def test_verls_client_of_the_server_is_found_and_vllm_is_not_imported() -> None:
    done = subprocess.run([sys.executable, "-c", MAKE], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [vllm_rollout.ServerAdapter.__name__, "False"], done.stderr


def test_the_number_is_the_one_that_verl_would_take() -> None:
    assert theirs.VLLM_SLEEP_LEVEL == SLEEP_LEVEL
