"""verl's entry point into this package (entry point group `verl.plugins`): loaded at every `import verl`.

The module is light, because every Ray process imports it. On a GPU machine the module only keeps torch's key-value
stores with a loopback address on loopback, and spares processes an import; the trainer registers itself and its workers
elsewhere (`verl_vcpo.loop.trainer`). With VERL_PLATFORM=cpu the module makes verl run without an accelerator, in this
process and in every process that inherits the variable.
"""

import os

from verl_vcpo.common import distributed, skipped_imports

distributed.keep_stores_on_loopback()
skipped_imports.skip_engine_of_npus()

CPU_REQUESTED = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

if CPU_REQUESTED:
    from verl_vcpo.cpu import activate

    activate()
