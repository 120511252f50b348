"""verl's entry point into this package (entry point group `verl.plugins`): loaded at every `import verl`.

The module is light, because every Ray process imports it. On a GPU machine the module only keeps torch's key-value
stores with a loopback address on loopback, and spares processes an import; the trainer registers itself and its workers
elsewhere (`verl_vcpo.loop.trainer`). With VERL_PLATFORM=cpu the module makes verl run without an accelerator, in this
process and in every process that inherits the variable.
"""

import importlib.util
import os
import sys

from verl_vcpo.common import distributed

distributed.keep_stores_on_loopback()
if importlib.util.find_spec("torch_npu") is None:
    # None is Python's sign for "do not import". verl's checkpoint engine for NPUs imports vLLM, for two seconds of
    # processor time, before it looks for an NPU; verl goes on where the import fails.
    sys.modules.setdefault("verl.checkpoint_engine.hccl_checkpoint_engine", None)  # type: ignore[arg-type]

CPU_REQUESTED = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

if CPU_REQUESTED:
    from verl_vcpo.cpu import activate

    activate()
