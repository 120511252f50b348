"""A short cut for an import of verl that would fail here after seconds: the import fails at once."""

import importlib.util
import sys

ENGINE_OF_NPUS = "verl.checkpoint_engine.hccl_checkpoint_engine"


def skip_engine_of_npus() -> None:
    """Have verl's import of its checkpoint engine for NPUs fail at once, with an ImportError, without torch_npu.

    verl tries that import in the trainer, in agent-loop workers and beside every sampler, and goes on after a failure.
    The module imports vLLM, for two seconds of processor time, before it looks for an NPU.
    """
    if importlib.util.find_spec("torch_npu") is None:
        sys.modules.setdefault(ENGINE_OF_NPUS, None)  # type: ignore[arg-type]  # Python's sign for "do not import"
