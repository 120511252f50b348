"""Who can reach the Ray of a run: whoever has its token, and on one machine nobody from outside it.

Ray runs any code for whoever it lets in. So every run asks for a token: the user's, where Ray finds one
(RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token); otherwise a random one of the run's own, which is in the
environment of its processes and nowhere else. A Ray that the run starts itself listens on loopback, and keeps its
sockets and logs in a folder that other users cannot enter. docs/explanation/security.md says what that does not cover.
"""

import contextlib
import os
import secrets
import shutil
import signal
import stat
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recipe.fully_async_policy.settings.errors import SettingError
from recipe.fully_async_policy.settings.variables import cluster_address
from verl_vcpo.common import start_up
from verl_vcpo.common.disk import disk_of
from verl_vcpo.common.run_folder import private_folder, run_folder

LOOPBACK = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
# Where Ray keeps to one machine it takes 127.0.0.1 for the node's address, which verl and TransferQueue then bind to.
# `_node_ip_address="127.0.0.1"` does not do that: Ray replaces it by the address that others see.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_START = {
    # Ray gives its processes 10 s to report that they are up, and tries three times. A busy machine takes longer.
    "RAY_raylet_start_wait_time_s": "300",
    # Processes that Ray starts before any is asked for lack the run's environment, so that no actor takes one.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's agents write their titles over their environment, by which the run's processes are found, and they outlive a
    # killed raylet by minutes. With this a title keeps to the command line.
    "SPT_NOENV": "1",
    # Ray's control store remembers so many tasks for its dashboard, each in some KB. A step has hundreds.
    "RAY_task_events_max_num_task_in_gcs": "10000",
}
_TOKEN, _TOKEN_FILE, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"
_PLACES = f"{_TOKEN}, {_TOKEN_FILE} or ~/.ray/auth_token"
_CONNECT_TIMEOUT_S = 10.0
_SOCKET_PATH, _SOCKET_NAME = 107, 50  # bytes: the kernel's limit; the longest name that verl and vLLM give
_SPACE = 20_000_000  # bytes: a small run's, without its checkpoints, have 1 to 10 MB there
_IN_EACH_WORKER = "worker_process_setup_hook"
_OF_OWN_RAY = ("num_cpus", "num_gpus", "object_store_memory", "resources", "labels")


def check_access(ray_init: Mapping[str, Any], connect: bool = True) -> None:
    """Refuse what would leave Ray open; `connect=False`: no cluster is asked and no folder is made.

    Raises:
        SettingError: authentication is off or has no usable token, other users can reach the sockets, or the cluster
            that was named does not answer, asks for no token or for another one.
    """
    if os.environ.get(_MODE, "token").lower() != "token":
        raise SettingError(
            f"{_MODE}={os.environ[_MODE]}: whoever reaches Ray's ports could run code as you; unset it, or set it to "
            "token, here and where the cluster is started"
        )
    if (hook := (ray_init.get("runtime_env") or {}).get(_IN_EACH_WORKER)) is not None:
        raise SettingError(
            f"ray_kwargs.ray_init.runtime_env.{_IN_EACH_WORKER}={hook}: Ray takes one such function, and the run needs "
            "its own, which closes TransferQueue's sockets; leave it out"
        )
    token = _given_token()
    if address := cluster_address(ray_init):
        _check_form(address)
        if token is None and not connect:
            raise _no_token(address)
    else:
        folder = ray_init.get("_temp_dir")
        if folder and not _is_private(Path(folder)):
            raise SettingError(
                f"ray_kwargs.ray_init._temp_dir={folder}: Ray would let every user change its sockets there; give a "
                "folder inside one of mode 0700"
            )
    if not connect:
        return
    try:
        of_run = run_folder("0" * 12)
    except OSError as error:
        raise SettingError(str(error)) from None
    session = session_folder(ray_init, of_run)
    _check_length(of_run, session)
    _check_space((session or of_run).parent)
    if address:
        _check_cluster(address, token)


def session_folder(ray_init: Mapping[str, Any], of_run: Path) -> Path | None:
    """Where a Ray of the run's own has its session: in the run's folder, or in one of that name in `_temp_dir`.

    None: a cluster is named, and has its session where it was told to.
    """
    if cluster_address(ray_init):
        return None
    given = ray_init.get("_temp_dir")
    return Path(given) / of_run.name if given else of_run


def _check_length(of_run: Path, session: Path | None) -> None:
    """Raises SettingError where sockets would have too long a path in the run's folder, or Ray's in its session's."""
    longest = of_run / ("-" * _SOCKET_NAME)
    if session:
        longest = session / f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{os.getpid()}" / "sockets" / "plasma_store"
    if (length := len(os.fsencode(longest))) > _SOCKET_PATH:
        raise SettingError(
            f"{(session or of_run).parent}: sockets in this folder would have paths of {length} bytes, and "
            f"{_SOCKET_PATH} is the most; set RAY_TMPDIR (or ray_kwargs.ray_init._temp_dir) to a folder with a shorter "
            "path"
        )


def _check_space(folder: Path) -> None:
    """Raises SettingError where Ray's start would wait in vain for files that do not fit on the folder's disk."""
    space = shutil.disk_usage(disk_of(folder))
    if space.total and space.free < _SPACE:  # a file system that does not count has a total of 0
        raise SettingError(
            f"{folder}: {space.free / 1e6:.0f} MB are free for the run's sockets and Ray's logs, {_SPACE / 1e6:.0f} "
            "are needed; remove files there, or set RAY_TMPDIR (or ray_kwargs.ray_init._temp_dir) to a folder on "
            "another disk"
        )


def without_own_nodes(ray_init: MutableMapping[str, Any], given: Collection[str]) -> None:
    """Where a running cluster is named, drop what describes the machine of a Ray of the run's own: Ray refuses it.

    Args:
        ray_init: changed in place.
        given: the settings that the user gives, by their full names.

    Raises:
        SettingError: the user gives one of those.
    """
    address = cluster_address(ray_init)
    if address is None:
        return
    for name in _OF_OWN_RAY:
        if f"ray_kwargs.ray_init.{name}" in given and ray_init[name] is not None:
            raise SettingError(
                f"ray_kwargs.ray_init.{name}={ray_init[name]}: the Ray cluster at {address} has its nodes' own; leave "
                "it out, or give it to `ray start` on the node"
            )
        if name in ray_init:
            ray_init[name] = None


@contextlib.contextmanager
def started(ray_init: Mapping[str, Any], folder: Path | None = None) -> Iterator[None]:
    """Ray for the block: the cluster that `ray_init` or RAY_ADDRESS names, otherwise one of our own on this machine.

    Args:
        ray_init: arguments of `ray.init`. `_node_ip_address` replaces loopback.
        folder: for the session of a Ray of our own, and not removed. None: one that ends with the block.

    Raises:
        PermissionError: the private folder belongs to someone else.
    """
    import ray
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # not in its stub

    set_up = {_IN_EACH_WORKER: f"{start_up.__name__}.{start_up.set_up_worker.__name__}"}
    arguments = {**ray_init, "runtime_env": {**(ray_init.get("runtime_env") or {}), **set_up}}
    environment = {_MODE: "token"}
    environment |= {name: os.environ.get(name, value) for name, value in _START.items()}
    loader, had_clusters = AuthenticationTokenLoader.instance(), ray_constants.ENABLE_RAY_CLUSTER
    with contextlib.ExitStack() as stack:
        if cluster_address(ray_init) is None:
            if folder is None:
                made = TemporaryDirectory(dir=private_folder(), ignore_cleanup_errors=True)
                folder = Path(stack.enter_context(made))
            arguments |= {"address": "local", "_temp_dir": str(folder)}
            if ray_init.get("_node_ip_address") is None:
                loopback = {name: os.environ.get(name, value) for name, value in LOOPBACK.items()}
                environment |= loopback | {_ONE_MACHINE: "0"}
            if _given_token() is None:
                environment[_TOKEN] = secrets.token_hex(32)
        stack.enter_context(start_up.environment(environment))
        Config.initialize("")  # this process has read the mode already, and may have read a token
        loader.reset_cache()
        ray_constants.ENABLE_RAY_CLUSTER = had_clusters and _ONE_MACHINE not in environment
        try:
            ray.init(**arguments)
            yield
        finally:
            _shut_down()
            ray_constants.ENABLE_RAY_CLUSTER = had_clusters
    loader.reset_cache()


def _shut_down() -> None:
    """Shut Ray down; a SIGTERM meanwhile goes to the handler that this process has.

    `ray.shutdown` gives SIGTERM its default action, which ends a process without words, before it waits for Ray's
    processes.
    """
    import ray

    handler, node = signal.getsignal(signal.SIGTERM), ray._private.worker.global_worker.node
    if node is not None:
        end_processes = node.kill_all_processes

        def caught(*args: Any, **settings: Any) -> None:
            signal.signal(signal.SIGTERM, handler)
            end_processes(*args, **settings)

        node.kill_all_processes = caught
    try:
        ray.shutdown()
    except KeyboardInterrupt:
        # Otherwise Ray ends the rest while Python exits, and makes the folder of its session again.
        ray.shutdown()
        raise


def _given_token() -> str | None:
    """The token that Ray finds for this user.

    Raises:
        SettingError: the file that should hold it does not, or other users can read it.
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # not in its stub
    from ray.exceptions import AuthenticationError

    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    try:
        if not loader.has_token(ignore_auth_mode=True):
            return None
        token = loader.get_raw_token(ignore_auth_mode=True)
    except AuthenticationError:
        raise SettingError(f"{_TOKEN_FILE}={os.environ.get(_TOKEN_FILE)}: no token in that file") from None
    if not os.environ.get(_TOKEN):
        file = Path(os.environ.get(_TOKEN_FILE) or Path.home() / ".ray" / "auth_token")
        if _others_can(file.stat()):
            raise SettingError(f"{file}: other users may read this token; chmod 600 {file}")
    return token


def _others_can(found: os.stat_result) -> bool:
    return bool(stat.S_IMODE(found.st_mode) & 0o077)


def _is_private(folder: Path) -> bool:
    """Whether some folder above it keeps other users out. Its own mode says nothing: Ray makes it 0777."""
    return any(above.exists() and not _others_can(above.stat()) for above in folder.absolute().parents)


def _check_form(address: str) -> None:
    host, _, port = address.rpartition(":")
    of_a_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if address != "auto" and not (host and "/" not in host and of_a_port):
        place = "RAY_ADDRESS" if address == os.environ.get("RAY_ADDRESS") else "ray_kwargs.ray_init.address"
        raise SettingError(
            f"{place}={address}: is no address of a Ray cluster; give HOST:PORT, or leave it out: then the run starts "
            "a Ray of its own"
        )


def _no_token(address: str) -> SettingError:
    return SettingError(f"the Ray cluster at {address} needs its token here: {_PLACES} (docs/guide/cluster.md)")


def _check_cluster(address: str, token: str | None) -> None:
    import grpc
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError) as error:
        raise SettingError(f"Ray cluster {address}: {str(error).splitlines()[0]}") from None
    denied = grpc.StatusCode.UNAUTHENTICATED
    without = answer = _status(found, [])
    if without == grpc.StatusCode.OK:
        raise SettingError(
            f"the Ray cluster at {address} asks for no token, so whoever reaches it could run code as you; start it "
            f"with {_MODE}=token on every node (docs/guide/cluster.md)"
        )
    if without == denied:
        if token is None:
            raise _no_token(address)
        answer = _status(found, [("authorization", f"Bearer {token}")])
    if answer == denied:
        raise SettingError(f"the Ray cluster at {address} has another token than the one here: {_PLACES}")
    if answer != grpc.StatusCode.OK:
        raise SettingError(
            f"no Ray cluster answers at {address} ({answer.name.lower()}); mend the address, or leave it out: then the "
            "run starts a Ray of its own"
        )


def _status(address: str, metadata: list[tuple[str, str]]) -> Any:
    """What Ray's control store answers to a question that changes nothing, with the given credentials."""
    import grpc
    from ray._common.tls_utils import load_certs_from_env

    options = [("grpc.enable_http_proxy", 0)]
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        chain, key, root = load_certs_from_env()
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(root, key, chain), options)
    else:
        channel = grpc.insecure_channel(address, options)
    with channel:
        alive = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            alive(b"", timeout=_CONNECT_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK
