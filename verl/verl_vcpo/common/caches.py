"""Where packages keep what they make once: elsewhere, where the usual folders cannot be written, or not by us alone.

A container's user may have no home folder; a cluster may mount the home, or the folder of models, read-only. Some
packages load compiled code from a folder below /tmp whose name every user knows, whoever made the folder.
"""

import os
import tempfile
from pathlib import Path

from verl_vcpo.common.run_folder import own_folder

# Packages load code from these folders, by default torchinductor_USER and folders below USER of the temporary folder.
_CODE = ("TORCHINDUCTOR_CACHE_DIR", "CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


def own_caches() -> dict[str, str]:
    """Return environment variables that replace folders of caches, below one folder that only this user can enter.

    Replaced are folders that cannot be written (models are read where they are), and folders of code in /tmp for which
    the user has named no other place. The folder stays, so runs share what is compiled.

    Raises:
        OSError: the folder that replaces them cannot be made, or is somebody else's (`run_folder.own_folder`).
    """
    home = Path.home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    models = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    usual = {
        "XDG_CACHE_HOME": cache,
        "HF_DATASETS_CACHE": models / "datasets",
        "HF_MODULES_CACHE": models / "modules",
        "MEGATRON_CONFIG_LOCK_DIR": home / ".cache" / "huggingface",
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "FLASHINFER_WORKSPACE_BASE": home,
    }
    replaced = [name for name, folder in usual.items() if not _writable(Path(os.environ.get(name) or folder))]
    code = [name for name in _CODE if not os.environ.get(name)]
    if not replaced and not code:
        return {}
    own = own_folder(Path(tempfile.gettempdir(), f"vcpo-caches-{os.getuid()}"), "TMPDIR")
    read = {"HF_HOME": str(models)} if replaced else {}
    return read | {name: str(own / name.lower()) for name in replaced + code}


def _writable(folder: Path) -> bool:
    """Return True if files can be made in the folder, which need not exist yet."""
    there = next(above for above in (folder, *folder.absolute().parents) if os.path.exists(above))
    return os.access(there, os.W_OK | os.X_OK)
