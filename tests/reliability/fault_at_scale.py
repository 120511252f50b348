"""The death of a sampler with tens of thousands of trajectories in flight, in engines that only count tokens."""

import time
from pathlib import Path

from tests.kit.small_run import make_assets
from tests.reliability import scale_layouts as scale
from tests.reliability.injected_faults import FaultVerdict
from tests.reliability.published_scripts import SHELL

NAME = "kill -9 of a sampler, 66,048 trajectories in flight"
_SCRIPT = SHELL / "math/vcpo_k=128.sh"
_STEPS, _KILL_IN_STEP = 4, 2
_RESPONSES = scale.Responses()


def try_at_scale(folder: Path) -> FaultVerdict:
    """Run the launch scripts' largest layout, and kill one of its samplers during the trainer's second update."""
    start, layout = time.monotonic(), scale.read_layout(_SCRIPT)
    (folder / "scale").mkdir()
    rows = int((layout.lag + _STEPS + 1) * layout.batch_size)  # each prompt once, so that a second time shows
    assets = make_assets(folder / "scale", train=rows)
    overrides = scale.settings(layout, assets, folder / "scale" / "run", _STEPS, _RESPONSES)
    result = scale.run(layout, overrides, folder / "scale" / "result.json", _RESPONSES, _KILL_IN_STEP)
    complaints = [
        *["it hangs"] * result.hung,
        *[f"{result.declared_dead} samplers were replaced, and one had died"] * (result.declared_dead != 1),
        *[f"{result.in_flight:,} trajectories were in flight"] * (f"{result.in_flight:,}" not in NAME),
    ]
    return FaultVerdict(
        NAME,
        result.lost,
        result.duplicated,
        result.lag_violations,
        "; ".join(complaints),
        round(time.monotonic() - start, 1),
    )
