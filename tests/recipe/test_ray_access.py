"""A run's Ray is closed: another user of the machine, without its token, gets nothing from it."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
import ray

from recipe.fully_async_policy import main
from recipe.fully_async_policy.launch import ray_access
from recipe.fully_async_policy.launch.processes import processes_of
from recipe.fully_async_policy.launch.session import LOGGING
from recipe.fully_async_policy.settings.validate import SettingError
from tests.kit.small_run import listening
from verl_vcpo.common.run_folder import private_folder, run_folder
from verl_vcpo.common.run_id import RUN_ID_VARIABLE

pytestmark = pytest.mark.slow

TOKEN = ray_access._TOKEN
NOBODY = 65534
# The interpreter may lie where others cannot go: everything is imported before the user changes.
ANOTHER_USER = """
import json, os, sys
from ray._raylet import GcsClient
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
address, folder, driver = sys.argv[1:]
def attempt(name, function):
    try:
        function()
        return "works"
    except Exception as error:
        return type(error).__name__
attempts = {{
    "store": lambda: GcsClient(address=address).internal_kv_keys(b"", None, timeout=8),
    "folder": lambda: os.listdir(folder),
    "environment": lambda: open(f"/proc/{{driver}}/environ").read(),
}}
print(json.dumps({{name: attempt(name, function) for name, function in attempts.items()}}))
"""


RUN = "run-of-these-tests"


@pytest.fixture(scope="module")
def own_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray as the launcher starts it, with a value in its store; the address of its control store."""
    main.prepare_environment(["hardware=cpu"])
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))  # without a token of the user's
        patch.delenv(TOKEN, raising=False)
        patch.setenv(RUN_ID_VARIABLE, RUN)
        with ray_access.started({"num_cpus": 1, "include_dashboard": False, "log_to_driver": False}):
            secret = ray.put("the run's data")
            yield ray.get_runtime_context().gcs_address
            del secret
            session = Path(session_folder())
        assert not session.parent.exists(), "its session is left"
        assert not list(home.iterdir()), "Ray wrote a token of its own"
        shutil.rmtree(run_folder(RUN), ignore_errors=True)
    assert TOKEN not in os.environ


def test_what_a_worker_prints_has_a_limit(own_ray: str) -> None:
    """And a file system that fills up ends nothing: the worker prints into a pipe."""

    @ray.remote
    def flood() -> bool:
        for _ in range(100):
            print("x" * (1 << 20))
        return stat.S_ISFIFO(os.fstat(1).st_mode) and stat.S_ISFIFO(os.fstat(2).st_mode)

    assert ray.get(flood.remote())
    logs = Path(session_folder()) / "logs"
    assert 0 < sum(file.stat().st_size for file in logs.glob("worker-*")) <= 2 * int(LOGGING["RAY_ROTATION_MAX_BYTES"])


def another_user(address: str, token: str | None) -> dict[str, str]:
    """What another user of this machine gets from it: "works", or the kind of error."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    given = {"HOME": "/nonexistent", "RAY_AUTH_MODE": "token"} | ({TOKEN: token} if token else {})
    if token is None:
        given["RAY_AUTH_MODE"] = "disabled"  # otherwise its own Ray refuses already
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_USER.format(nobody=NOBODY), address, session_folder(), str(os.getpid())],
        env=inherited | given,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def session_folder() -> str:
    return ray._private.worker.global_worker.node.get_session_dir_path()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_reads_the_store_with_the_token_only(own_ray: str) -> None:
    denied = {"folder": "PermissionError", "environment": "PermissionError"}
    assert another_user(own_ray, None) == {"store": "AuthenticationError", **denied}
    assert another_user(own_ray, "0" * 64) == {"store": "AuthenticationError", **denied}
    assert another_user(own_ray, os.environ[TOKEN]) == {"store": "works", **denied}


def test_it_listens_on_loopback_only(own_ray: str) -> None:
    own = [psutil.Process(), *psutil.Process().children(recursive=True)]
    addresses = listening(own)
    assert len(addresses) > 5, "Ray's listeners are not found, so their absence elsewhere proves nothing"
    assert [found for found in addresses if not found.on_loopback] == []
    assert ray.util.get_node_ip_address() == "127.0.0.1", "what verl and TransferQueue bind to"


def test_its_agents_are_known_as_processes_of_the_run(own_ray: str) -> None:
    """The agents rename themselves, and outlive a raylet that is killed."""
    deadline, found = time.monotonic() + 60, list[str]()
    while len(found) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
        titles = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
        found = [title for title in titles if title.startswith(("ray::DashboardAgent", "ray::RuntimeEnvAgent"))]
    known = [" ".join(process.cmdline()) for process in processes_of(RUN)]
    assert len(found) == 2 and {*found} <= {*known}


def test_the_token_is_in_no_command_line_and_no_file(own_ray: str) -> None:
    token = os.environ[TOKEN]
    assert len(token) == 64
    for process in psutil.process_iter(["cmdline"]):
        assert token not in " ".join(process.info["cmdline"] or [])
    files = [file for file in Path(session_folder()).rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if token.encode() in file.read_bytes()]


def test_a_cluster_is_joined_with_its_token_only(own_ray: str, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = {"address": own_ray}
    ray_access.check_access(joined)
    monkeypatch.setenv(TOKEN, "0" * 64)
    with pytest.raises(SettingError, match=f"{own_ray} has another token"):
        ray_access.check_access(joined)
    monkeypatch.delenv(TOKEN)
    with pytest.raises(SettingError, match=f"{own_ray} needs its token here"):
        ray_access.check_access(joined)
    monkeypatch.setenv("RAY_ADDRESS", own_ray)
    with pytest.raises(SettingError, match="needs its token here"):
        ray_access.check_access({})
    ray_access.check_access({"address": "local"})


def test_a_joined_cluster_keeps_the_resources_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray refuses to join with them: the preset's are dropped, and the user's refused."""
    monkeypatch.setenv("VCPO_HARDWARE", "cpu")
    task = ["+task=countdown", "run_dir=unused"]
    own = main.compose(task).ray_kwargs.ray_init
    assert own.num_cpus and own.num_gpus and own.object_store_memory
    joined = main.compose([*task, "ray_kwargs.ray_init.address=10.0.0.1:6379"]).ray_kwargs.ray_init
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for found in (joined, main.compose(task).ray_kwargs.ray_init):
        assert found.num_cpus is found.num_gpus is found.object_store_memory is None
    with pytest.raises(SettingError, match=r"ray_init.num_gpus=2: the Ray cluster at 10.0.0.1:6379 has .*leave it out"):
        main.compose([*task, "ray_kwargs.ray_init.num_gpus=2"])


def test_a_cluster_without_authentication_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "0" * 64)
    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", {"CheckAlive": answer})]
    )
    port = server.add_insecure_port("[::]:0")
    server.start()
    with pytest.raises(SettingError, match="asks for no token"):
        ray_access.check_access({"address": f"127.0.0.1:{port}"})
    server.stop(None).wait()
    with pytest.raises(SettingError, match=r"no Ray cluster answers at .* \(unavailable\)"):
        ray_access.check_access({"address": f"127.0.0.1:{port}"})


def test_authentication_cannot_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(SettingError, match="RAY_AUTH_MODE=disabled: whoever reaches"):
        ray_access.check_access({})


def test_a_set_up_function_of_ones_own_would_replace_the_runs() -> None:
    given = {"runtime_env": {"worker_process_setup_hook": "mine.set_up"}}
    with pytest.raises(SettingError, match=r"runtime_env.worker_process_setup_hook=mine.set_up: .*leave it out"):
        ray_access.check_access(given)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    with pytest.raises(SettingError, match="no token in that file"):
        ray_access.check_access({})
    file.write_text("0" * 64)
    file.chmod(0o640)
    with pytest.raises(SettingError, match=f"chmod 600 {file}"):
        ray_access.check_access({})
    file.chmod(0o600)
    ray_access.check_access({})


def test_ray_is_not_given_a_folder_that_others_can_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    ray_access.check_access({"_temp_dir": str(tmp_path / "ray")}, connect=False)
    with pytest.raises(SettingError, match="_temp_dir=/tmp/anyone: .*mode 0700"):
        ray_access.check_access({"_temp_dir": "/tmp/anyone"})


@pytest.mark.parametrize("squatted", ["open to others", "a link"])
def test_a_private_folder_that_is_not_ours_is_refused(
    squatted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = tmp_path / f"vcpo-{os.getuid()}"
    if squatted == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o755)
    with pytest.raises(SettingError, match="set RAY_TMPDIR"):
        ray_access.check_access({})
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    made = private_folder()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700 and private_folder() == made


def test_a_place_that_cannot_hold_a_private_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "not-made"))
    with pytest.raises(SettingError, match=r"not-made/vcpo-\d+ cannot be made \(No such file.*set RAY_TMPDIR"):
        ray_access.check_access({})


def test_a_folder_with_too_long_a_path_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says it when it starts, the samplers say it when they start."""
    long = tmp_path / ("a" * 60)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(SettingError, match=f"{long}/.* 107 is the most; set RAY_TMPDIR"):
        ray_access.check_access({})
    monkeypatch.setenv(TOKEN, "0" * 64)
    with pytest.raises(SettingError, match=f"{long}/.* 107 is the most; set RAY_TMPDIR"):
        ray_access.check_access({"address": "10.0.0.1:6379"})
    monkeypatch.delenv("RAY_TMPDIR")
    with pytest.raises(SettingError, match=f"{long}: .* 107 is the most"):
        ray_access.check_access({"_temp_dir": str(long)})


@pytest.mark.nightly
def test_a_ray_that_starts_slowly_is_waited_for(tmp_path: Path) -> None:
    """As on a busy machine. Ray by itself gives up after half a minute."""
    slow = tmp_path / "raylet"
    slow.write_text(f'#!/bin/sh\nsleep 50\nexec "{ray._private.services.RAYLET_EXECUTABLE}" "$@"\n')
    slow.chmod(0o700)
    program = (
        "import sys, ray\nfrom recipe.fully_async_policy import main\n"
        "from recipe.fully_async_policy.launch import ray_access\n"
        "main.prepare_environment(['hardware=cpu'])\nray._private.services.RAYLET_EXECUTABLE = sys.argv[1]\n"
        "with ray_access.started({'num_cpus': 1, 'include_dashboard': False, 'log_to_driver': False}): print('up')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(slow)], capture_output=True, text=True, timeout=200)
    assert done.stdout.endswith("up\n"), done.stderr[-1000:]


def test_a_sigterm_while_ray_ends_goes_to_the_launcher() -> None:
    program = (
        "import os, signal, ray\n"
        "from recipe.fully_async_policy import main\nfrom recipe.fully_async_policy.launch import ray_access\n"
        "main.prepare_environment(['hardware=cpu'])\n"
        "with ray_access.started({'num_cpus': 1, 'include_dashboard': False, 'log_to_driver': False}):\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
        "    node = ray._private.worker.global_worker.node\n"
        "    end_processes = node.kill_all_processes\n"
        "    def at_the_end(*args, **settings):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        end_processes(*args, **settings)\n"
        "    node.kill_all_processes = at_the_end\n"
        "print('ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.split()) == (0, ["told", "ended"]), done.stderr


def test_a_disk_without_room_for_the_start_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(30_000_000, 21_000_000, 9_000_000))
    with pytest.raises(SettingError, match=r"vcpo-\d+: 9 MB are free .*, 20 are needed; .* set RAY_TMPDIR"):
        ray_access.check_access({})
