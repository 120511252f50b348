"""What machines give a process: user ids without a name, variables of Kubernetes and SLURM, read-only folders."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from verl_vcpo.common.caches import own_caches
from verl_vcpo.common.machine import adapt_environment

NAMELESS = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
CODE = ("TORCHINDUCTOR_CACHE_DIR", "CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
SETS_UP = """
import getpass, os, tempfile
from pathlib import Path
from verl_vcpo.common import start_up
start_up.set_up_process()
with start_up.temporary_files_in_run_folder():
    print(os.getuid(), getpass.getuser(), Path.home(), os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.parametrize("home", ["/", None])
def test_a_user_id_without_a_name(home: str | None, tmp_path: Path) -> None:
    if subprocess.run([*NAMELESS, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "VCPO_RUN_ID": "0" * 12}
    environment |= dict.fromkeys(("RAY_TMPDIR", "TMPDIR"), str(tmp_path)) | ({"HOME": home} if home else {})
    done = subprocess.run([*NAMELESS, sys.executable, "-c", SETS_UP], env=environment, capture_output=True, text=True)
    assert done.stdout == f"12345 uid_12345 / {tmp_path}/vcpo-caches-12345/torchinductor_cache_dir\n", done.stderr


@pytest.mark.parametrize(
    ("name", "value", "stays"),
    [
        ("VLLM_PORT", "tcp://10.43.1.39:8000", False),
        ("VLLM_DP_MASTER_PORT", "udp://10.43.1.39:8000", False),
        ("RAY_PORT", "tcp://10.0.0.1:6379", False),
        ("MASTER_PORT", "tcp://10.0.0.1:29500", False),
        ("VLLM_PORT", "8000", True),
        ("VLLM_SERVICE_HOST", "10.43.1.39", True),
        ("REDIS_PORT", "tcp://10.0.0.2:6379", True),
        ("ROCR_VISIBLE_DEVICES", "0,1", False),
        ("HIP_VISIBLE_DEVICES", "0", False),
        ("CUDA_VISIBLE_DEVICES", "0,1", True),
    ],
)
def test_variables_of_kubernetes_and_slurm(name: str, value: str, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(Path.home()), name: value})
    adapt_environment()
    assert (os.environ.get(name) == value) is stays


@pytest.mark.parametrize("excepted", [None, "example.com", "*"])
def test_this_machine_is_asked_without_a_proxy(excepted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        if excepted:
            monkeypatch.setenv(name, excepted)
    adapt_environment()
    for host in ("localhost", "127.0.0.1", excepted or "localhost"):
        assert requests.utils.get_environ_proxies(f"http://{host}:8000/v1") == {}
    assert bool(requests.utils.get_environ_proxies("http://elsewhere.org")) is (excepted != "*")


def test_caches_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home := tmp_path / "home").mkdir()
    given = {"HOME": str(home), "TRITON_CACHE_DIR": str(tmp_path / "kept")}
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert own_caches().keys() == set(CODE)
    monkeypatch.setattr(os, "access", lambda folder, mode: Path(folder) != home)  # of root everything may be written
    found = own_caches()
    assert found["HF_HOME"] == f"{home}/.cache/huggingface", "models are read where they are"
    assert not found["HF_DATASETS_CACHE"].startswith(str(home)) and "TRITON_CACHE_DIR" not in found
    Path(found["XDG_CACHE_HOME"]).parent.chmod(0o755)
    with pytest.raises(PermissionError, match="set TMPDIR"):
        own_caches()


def test_no_code_is_loaded_from_a_folder_that_others_can_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), CODE[0]: "/mine"})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"vcpo-caches-{os.getuid()}"
    for _ in ("a run", "the next one"):
        assert own_caches() == {name: str(own / name.lower()) for name in CODE[1:]}
        assert own.stat().st_mode & 0o777 == 0o700
    own.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o777)
    own.symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="set TMPDIR"):
        own_caches()
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)} | dict.fromkeys(CODE, "/mine"))
    assert own_caches() == {}


def test_a_user_with_a_name_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    adapt_environment()
    assert "USER" not in os.environ and Path.home() == Path(pwd.getpwuid(os.getuid()).pw_dir)
