"""The start and the end of TransferQueue (extends transfer_queue/interface.py)."""

import asyncio
import copy
import threading
from concurrent.futures import Future, wait

import transfer_queue as tq
from omegaconf import DictConfig

_START_S = 300.0
_END_S = 5.0


class Queue:
    """TransferQueue, which starts in a thread: its two processes import packages one after the other.

    The samplers need as long as all else together, so their start waits for nothing. The agent loops' workers would
    start a queue of their own if there was none: whoever starts them calls `wait` first.
    """

    def __init__(self, config: DictConfig) -> None:
        self._started: Future[None] = Future()
        # A copy: verl writes to its configuration for moments, while this one is read in another thread.
        config = copy.deepcopy(config)
        threading.Thread(target=self._start, args=(config,), name="start of TransferQueue", daemon=True).start()

    def _start(self, config: DictConfig) -> None:
        try:
            tq.init(config)
        except BaseException as error:
            self._started.set_exception(error)
        else:
            self._started.set_result(None)

    def wait(self) -> None:
        """Wait until the queue is there. Raises the error of its start, and RuntimeError after five minutes."""
        wait([self._started], timeout=_START_S)
        if not self._started.done():
            raise RuntimeError(
                f"TransferQueue was not up {_START_S:.0f} s after the trainer was: its processes' logs say why; mend "
                "that, and start the run again"
            )
        self._started.result()

    def end(self) -> None:
        """End the queue, and before that this process's open requests to it; a queue that still starts ends with Ray.

        A request to a process that has died stays open. Python would report the request, with tracebacks, when this
        process ends: after the run's last words.
        """
        wait([self._started], timeout=_END_S)
        if not self._started.done():
            return
        if self._started.exception():
            tq.close()  # what the start had made before it failed
        else:
            end_queue()


def end_queue() -> None:
    """Cancel this process's open requests to TransferQueue, then end TransferQueue."""

    async def cancel() -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    wait([asyncio.run_coroutine_threadsafe(cancel(), tq.get_client()._loop)], timeout=_END_S)
    tq.close()
