"""Where packages keep what they make once: elsewhere, where the usual folders cannot be written.

A container's user may have no home folder; a cluster may mount the home, or the folder of models, read-only.
"""

import os
import tempfile
from pathlib import Path

from verl_vcpo.common.run_folder import own_folder


def writable_caches() -> dict[str, str]:
    """Return the environment variables that replace folders that cannot be written; models are read where they are.

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
    if not replaced:
        return {}
    own = own_folder(Path(tempfile.gettempdir(), f"vcpo-caches-{os.getuid()}"), "TMPDIR")
    return {"HF_HOME": str(models)} | {name: str(own / name.lower()) for name in replaced}


def _writable(folder: Path) -> bool:
    """Return True if files can be made in the folder, which need not exist yet."""
    there = next(above for above in (folder, *folder.absolute().parents) if os.path.exists(above))
    return os.access(there, os.W_OK | os.X_OK)
