"""deploy/: the manifests have the GPUs of their command, the rights of nobody, and the extra's versions."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from ray._private import ray_constants

from recipe.fully_async_policy import main
from recipe.fully_async_policy.launch.session import environment_of_workers
from recipe.fully_async_policy.plan import fitting, gpu_memory, model_shape
from recipe.fully_async_policy.settings.validate import validate
from tests.kit.launch_script import arguments
from tests.test_packaging import pins

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
CLAIM = yaml.safe_load((ROOT / "deploy/kuberay/storage.yaml").read_text())
POLICY, JOB = yaml.safe_load_all((ROOT / "deploy/kuberay/rayjob.yaml").read_text())
GPU = "nvidia.com/gpu"


def named(value: Any) -> Any:
    """A mapping whose keys are attributes, and so all in it."""
    if isinstance(value, list):
        return [named(each) for each in value]
    if isinstance(value, dict) and all(str(key).isidentifier() for key in value):
        return SimpleNamespace(**{key: named(each) for key, each in value.items()})
    return value


@pytest.fixture(scope="module")
def cluster() -> Any:
    return named(JOB["spec"]["rayClusterSpec"])


def pods(cluster: Any) -> list[Any]:
    """The head's, then one of each group."""
    return [group.template.spec for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DictConfig]:
    """The configuration of the manifest's command."""
    program, script, *settings = shlex.split(JOB["spec"]["entrypoint"])
    assert program == "bash" and script.startswith(f"{working_folder()}/")
    calls = arguments(ROOT / script.removeprefix(f"{working_folder()}/"), tmp_path_factory.mktemp("bin"), *settings)
    (call,) = [call for call in calls if call[:2] == ["-m", "recipe.fully_async_policy.main"]]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VCPO_HARDWARE", "gpu")
        environment.setenv("VCPO_RUN_ID", "test")
        config = main.compose(call[2:])
        OmegaConf.resolve(config)
        yield config


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else vars(value)


def test_no_program_of_the_run_has_rights(cluster: Any) -> None:
    assert JOB["spec"]["submissionMode"] == "SidecarMode" and cluster.authOptions.mode == "token"
    for pod in pods(cluster):
        assert pod.securityContext.runAsNonRoot and not pod.automountServiceAccountToken
        assert pod.securityContext.seccompProfile.type == "RuntimeDefault"
        for container in pod.containers:
            assert not container.securityContext.allowPrivilegeEscalation
            assert container.securityContext.capabilities.drop == ["ALL"]


def working_folder() -> str:
    """The checkout's place in the image."""
    (folder,) = set(re.findall(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE))
    return str(folder)


def gib(quantity: str) -> float:
    assert quantity.endswith("Gi"), quantity
    return float(quantity.removesuffix("Gi"))


def test_the_workers_have_the_gpus_that_the_command_uses(cluster: Any, config: DictConfig) -> None:
    validate(config, files=False)
    layout = gpu_memory.read_layout(config)
    shape = model_shape.read_shape(config.actor_rollout_ref.model.path)
    assert shape is not None
    fitting.check_shape(layout, shape)
    assert gpu_memory.trainer_memory(config, layout, shape).peak < config.gpu_memory_gib
    gpus = 0
    for group in cluster.workerGroupSpecs:
        assert group.replicas == group.minReplicas == group.maxReplicas
        (container,) = group.template.spec.containers
        assert int(mapping(container.resources.limits)[GPU]) == fitting.GPUS_PER_NODE
        gpus += group.replicas * fitting.GPUS_PER_NODE
    assert gpus == layout.total
    assert [GPU in mapping(container.resources.limits) for container in pods(cluster)[0].containers] == [False]


def test_all_files_are_on_the_volume_that_every_pod_mounts(cluster: Any, config: DictConfig) -> None:
    assert (CLAIM["kind"], CLAIM["spec"]["accessModes"]) == ("PersistentVolumeClaim", ["ReadWriteMany"])
    for pod in pods(cluster):
        claims = {v.name: v.persistentVolumeClaim.claimName for v in pod.volumes if hasattr(v, "persistentVolumeClaim")}
        assert list(claims.values()) == [CLAIM["metadata"]["name"]]
        (container,) = pod.containers
        mounts = {mount.name: mount.mountPath for mount in container.volumeMounts}
        assert set(mounts) == {volume.name for volume in pod.volumes}
        (shared,) = (mounts[name] for name in claims)
        data = config.data
        for path in (config.run_dir, config.actor_rollout_ref.model.path, data.train_files, data.val_files):
            assert path.startswith(f"{shared}/")


def test_a_stopped_run_has_time_to_end_and_the_next_one_continues(cluster: Any, config: DictConfig) -> None:
    assert config.trainer.resume_mode == "auto" and config.trainer.save_freq > 0
    assert config.trainer.max_actor_ckpt_to_keep == 2, "or twenty checkpoints of 7B fill the volume"
    pod = pods(cluster)[0]
    (container,) = pod.containers
    (wait,) = [int(env.value) for env in container.env if env.name == "RAY_JOB_STOP_WAIT_TIME_S"]
    assert wait < pod.terminationGracePeriodSeconds
    program, option, script = container.lifecycle.preStop.exec.command
    assert (program, option) == ("bash", "-c") and f"{{1..{wait}}}" in script
    (waits_for,) = re.findall("pgrep -f '(.+)'", script)
    assert re.search(waits_for, f"python -m {main.__spec__.name} +task=math")
    assert not re.search(waits_for, script)  # or it would wait for itself


def test_only_the_runs_own_pods_and_the_operator_reach_it(cluster: Any) -> None:
    (labels,) = {
        tuple(mapping(group.template.metadata.labels).items())
        for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs)
    }
    run = {"podSelector": {"matchLabels": dict(labels)}}
    assert (POLICY["apiVersion"], POLICY["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    spec = POLICY["spec"]
    assert {"podSelector": spec["podSelector"]} == run
    assert spec["policyTypes"] == ["Ingress"]
    among_the_pods, from_the_operator = spec["ingress"]
    assert among_the_pods == {"from": [run]}
    (dashboard,) = [
        port for port in cluster.headGroupSpec.template.spec.containers[0].ports if port.name == "dashboard"
    ]
    assert from_the_operator["ports"] == [{"protocol": "TCP", "port": dashboard.containerPort}]
    (operator,) = from_the_operator["from"]
    assert set(operator) == {"namespaceSelector", "podSelector"}  # both hold for a pod that may


def test_ray_asks_for_a_token_that_is_in_no_file(cluster: Any) -> None:
    for pod in pods(cluster):
        settings = {env.name: getattr(env, "value", None) for container in pod.containers for env in container.env}
        assert settings["RAY_AUTH_MODE"] == "token"  # without a token Ray does not start
        assert "RAY_AUTH_TOKEN" not in settings  # of the operator, from the Secret that it makes


def test_the_key_of_wandb_is_in_no_file(cluster: Any) -> None:
    """The driver, which logs, runs on the head. The page's command makes the Secret that the head looks for."""
    page = (ROOT / "deploy/README.md").read_text()
    head, *workers = pods(cluster)
    (key,) = [env for env in head.containers[0].env if env.name == "WANDB_API_KEY"]
    assert not hasattr(key, "value")
    secret = key.valueFrom.secretKeyRef
    assert f"create secret generic {secret.name} --from-literal={secret.key}=KEY" in page
    assert not [env for pod in workers for env in pod.containers[0].env if env.name.startswith("WANDB_")]


def test_every_node_lets_megatron_overlap_communication(
    cluster: Any, config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl sets the variable by the driver's GPU, and the head has none."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    for pod in pods(cluster):
        assert [env.value for container in pod.containers for env in container.env if env.name == name] == ["1"]
    job = (ROOT / "deploy/slurm.sh").read_text()
    assert re.search(rf"^export .*\b{name}=1\b", job, re.MULTILINE)
    monkeypatch.delenv(name, raising=False)
    assert environment_of_workers()[name] == "1"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert name not in environment_of_workers()  # then verl knows what the GPU needs
    monkeypatch.setenv(name, "8")
    assert environment_of_workers()[name] == "8"


def test_the_head_can_run_what_is_pinned_to_it(cluster: Any) -> None:
    """TransferQueue puts a storage process that asks for a CPU on every node."""
    assert mapping(cluster.headGroupSpec.rayStartParams).get("num-cpus") != "0"


def test_shared_memory_holds_rays_object_store(cluster: Any) -> None:
    for pod in pods(cluster):
        memory = gib(mapping(pod.containers[0].resources.limits)["memory"])
        (shm,) = [gib(volume.emptyDir.sizeLimit) for volume in pod.volumes if hasattr(volume, "emptyDir")]
        largest = ray_constants.DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES / 2**30
        assert min(ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION * memory, largest) < shm < memory


def test_the_cluster_has_the_version_of_ray_of_the_extra(cluster: Any) -> None:
    assert cluster.rayVersion == pins("gpu")["ray"]


def test_all_pods_have_the_image_that_the_dockerfile_makes(cluster: Any) -> None:
    (image,) = {container.image for pod in pods(cluster) for container in pod.containers}
    assert f"-t {image} ." in DOCKERFILE
    assert f'version = "{image.rpartition(":")[2]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_pods_user_is_the_images(cluster: Any) -> None:
    (user,) = re.findall(r"^USER (\d+:\d+)$", DOCKERFILE, re.MULTILINE)
    for pod in pods(cluster):
        assert f"{pod.securityContext.runAsUser}:{pod.securityContext.runAsGroup}" == user
    assert f"useradd --uid {user.split(':')[0]} " in DOCKERFILE


def test_the_image_takes_the_packages_and_what_names_them_and_nothing_else() -> None:
    ignored, *lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored == "*"
    taken = {line.removeprefix("!") for line in lines if line.startswith("!")}
    locks = {f"requirements/{name}.lock" for name in ("gpu", "te", "flash-attn")}
    setup = {"setup.py", "pyproject.toml", "LICENSE", "NOTICE"}
    assert taken == locks | setup | {"recipe", "sandbox", "scripts", "tests/__init__.py", "tests/kit", "vcpo", "verl"}
    for copied in re.findall(r"^COPY ((?!--from).+) \./$", DOCKERFILE, re.MULTILINE):
        assert set(copied.split()) == locks


def test_slurm_gives_ray_the_cores_of_its_job(tmp_path: Path) -> None:
    """`srun` takes them from SRUN_CPUS_PER_TASK alone. Programs of SLURM are stand-ins."""
    programs, launched = tmp_path / "bin", tmp_path / "recipe/fully_async_policy/shell/vcpo/math/vcpo_k=10.sh"
    for file, text in {
        programs / "srun": 'echo "$SRUN_CPUS_PER_TASK: $*"',
        programs / "scontrol": "echo node1",
        programs / "getent": "echo 10.0.0.1 node1",
        programs / "sleep": "",
        launched: 'echo "$RAY_ADDRESS"',
        tmp_path / ".venv/bin/activate": "",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
    job = {"SLURM_CPUS_PER_TASK": "96", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[1-4]"}
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), **job}
    script = ["bash", str(ROOT / "deploy/slurm.sh")]
    said = subprocess.run(script, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    starts = [line for line in said.splitlines() if "ray start" in line]
    assert len(starts) == 2 and all(line.startswith("96: ") for line in starts)
    assert "10.0.0.1:6379" in said.splitlines()
