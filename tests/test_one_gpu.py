"""One GPU that stands for several (tests/kit/one_gpu), without a GPU: what Ray's actors are told."""

import json
import os
import subprocess
import sys

from tests.kit import ROOT

PROGRAM = """
import json, os
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

@ray.remote(num_gpus=1)
class Actor:
    def devices(self):
        numbers = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return [os.environ["CUDA_VISIBLE_DEVICES"], *numbers, os.environ["NCCL_HOSTID"]]

ray.init(num_gpus=2, num_cpus=2, include_dashboard=False, log_to_driver=False)
group = placement_group([{"GPU": 1, "CPU": 1}])
ray.get(group.ready(), timeout=60)
in_group = Actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group))
print(json.dumps(ray.get([in_group.remote().devices.remote(), Actor.remote().devices.remote()], timeout=60)))
"""


def test_two_actors_have_the_first_gpu_each_on_a_machine_of_its_own() -> None:
    """verl asks Ray for the number of a sampler's GPU, and gives it to vLLM."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.kit.one_gpu", "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    (first, number, host), (second, other_number, other_host) = json.loads(answer.stdout.splitlines()[-1])
    assert first == number == second == other_number == "0"
    assert host != other_host
