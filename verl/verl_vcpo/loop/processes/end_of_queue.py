"""The end of TransferQueue (extends transfer_queue/interface.py)."""

import asyncio
from concurrent.futures import wait

import transfer_queue as tq

_CANCEL_S = 5.0


def end_queue() -> None:
    """Cancel this process's open requests to TransferQueue, then end TransferQueue.

    A request to a process that has died stays open. Python would report the request, with tracebacks, when this process
    ends: after the run's last words.
    """

    async def cancel() -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    wait([asyncio.run_coroutine_threadsafe(cancel(), tq.get_client()._loop)], timeout=_CANCEL_S)
    tq.close()
