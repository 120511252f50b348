"""A start of the samplers while the trainer starts (extends verl/workers/rollout/llm_server.py).

verl's trainer starts its own processes and waits for them, then starts the samplers and waits again. Neither side needs
the other before the first weights are sent, and each side has to load a model.
"""

import asyncio
import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.workers.rollout.llm_server import LLMServerManager

from verl_vcpo.samplers.keeper import START_S

THREAD = "start of the samplers"
_POLL_S = 0.02


class BalancerFirst(LLMServerManager):
    """verl's manager with a load balancer that exists before the servers, so that clients can be made meanwhile."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.server_addresses: list[str] = []
        self.server_handles: list[Any] = []
        asyncio.run(super()._init_global_load_balancer())

    async def start(self) -> None:
        """Start the servers, and give them to the balancer."""
        await self._initialize_llm_servers()
        servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
        await self.global_load_balancer.add_servers.remote(servers)


@contextlib.contextmanager
def early_start(config: DictConfig, trainer_has_devices: Callable[[], bool]) -> Iterator[BalancerFirst]:
    """Start the samplers in the block; verl's trainer gets them where it would start samplers.

    Args:
        config: the whole configuration.
        trainer_has_devices: the condition that the samplers wait for. Ray gives out devices in the order of requests,
            and a trainer that needs whole nodes would find none if samplers came first.
    """
    # A copy: verl writes to its configuration for moments, while this one is read in another thread.
    manager, needed, over = BalancerFirst(copy.deepcopy(config)), threading.Event(), asyncio.Event()

    async def start() -> None:
        while not (trainer_has_devices() or needed.is_set()):
            await asyncio.sleep(_POLL_S)
        await manager.start()

    def create(config: DictConfig, start_rank: int) -> BalancerFirst:
        """Wait for the samplers, in place of `LLMServerManager.create`. Raise the error of a failed start."""
        assert start_rank == 0, "the trainer has no samplers on its own devices"
        needed.set()
        wait([started], timeout=START_S)
        if not started.done():
            raise RuntimeError(
                f"the samplers were not up {START_S:.0f} s after the trainer was: their workers' logs say why; mend "
                "that, and start the run again"
            )
        started.result()
        return manager

    def run_loop() -> None:
        """Run the event loop until some time after the block: a call of Ray cannot be interrupted."""
        with runner:  # whose end cancels unfinished tasks, and waits for them
            runner.run(over.wait())

    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()
    started = asyncio.run_coroutine_threadsafe(start(), loop)
    trainer_separate_async.LLMServerManager = SimpleNamespace(create=create)
    threading.Thread(target=run_loop, name=THREAD, daemon=True).start()
    try:
        yield manager
    except BaseException:
        loop.set_exception_handler(lambda loop, context: None)  # nobody reads the errors of a start that is given up
        raise
    finally:
        trainer_separate_async.LLMServerManager = LLMServerManager
        started.cancel()  # without effect where the samplers are up
        loop.call_soon_threadsafe(over.set)
