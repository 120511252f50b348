"""A line for each minute that the trainer's processes work on one thing.

verl's driver waits for these processes without a limit. A process that hangs, because it was stopped or a disk does not
answer, would otherwise look like a slow step.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from verl_vcpo.common.console import print_line

_TELL_S = 60.0

WORK = {
    "_compute_old_log_prob": "The trainer's pass for log-probs",
    "_compute_ref_log_prob": "The reference policy's pass for log-probs",
    "_compute_values": "The critic's pass for values",
    "_update_critic": "The critic's update",
    "_update_actor": "The update",
    "_save_hugging_face": "Writing the model's folder",
    "_stage_weights": "The export of the weights",
}
"""The methods of the trainer that wait for its processes, and their names in a line. The weight update has a limit."""


def tell_of_long_work(trainer: Any) -> None:
    """Have each method in `WORK` of this trainer print a line after every minute that a call of it takes."""
    for method, what in WORK.items():
        setattr(trainer, method, telling(what)(getattr(trainer, method)))


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Print a line after every minute that the block, `what`, takes."""
    start, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(_TELL_S):
            print_line(f"{what} has taken {time.monotonic() - start:.0f} s.")

    threading.Thread(target=tell, name="long work", daemon=True).start()
    try:
        yield
    finally:
        over.set()
