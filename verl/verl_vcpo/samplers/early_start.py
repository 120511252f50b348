"""A start of the samplers while the trainer starts (extends verl/workers/rollout/llm_server.py).

verl's trainer starts its own processes and waits for them, then starts the samplers and waits again. Neither side needs
the other before the first weights are sent, and each side has to load a model.
"""

import asyncio
import copy
import threading
from collections.abc import Callable
from concurrent.futures import wait
from types import SimpleNamespace, TracebackType
from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.workers.rollout.llm_server import LLMServerManager

from verl_vcpo.samplers.keeper import START_S

THREAD = "start of the samplers"
_POLL_S = 0.02


class BalancerFirst(LLMServerManager):
    """verl's manager with a load balancer that exists before the servers, so that clients can be made meanwhile.

    Args:
        config: the whole configuration.
    """

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


class EarlyStart:
    """A `with` block in which the samplers start; verl's trainer gets them where it would start samplers.

    Args:
        config: the whole configuration.
        trainer_has_devices: the condition that the samplers wait for. Ray gives out devices in the order of requests,
            and a trainer that needs whole nodes would find none if samplers came first.
    """

    def __init__(self, config: DictConfig, trainer_has_devices: Callable[[], bool]) -> None:
        # A copy: verl writes to its configuration for moments, while this one is read in another thread.
        self.manager = BalancerFirst(copy.deepcopy(config))
        self._trainer_has_devices, self._needed = trainer_has_devices, False
        self._runner, self._over = asyncio.Runner(loop_factory=asyncio.new_event_loop), asyncio.Event()
        self._loop = self._runner.get_loop()
        self._started = asyncio.run_coroutine_threadsafe(self._start(), self._loop)

    def __enter__(self) -> BalancerFirst:
        trainer_separate_async.LLMServerManager = SimpleNamespace(create=self._create)
        threading.Thread(target=self._run_loop, name=THREAD, daemon=True).start()
        return self.manager

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        trainer_separate_async.LLMServerManager = LLMServerManager
        if kind is not None:
            # The run ends because of `error`. Nobody reads the errors of a start that is given up.
            self._loop.set_exception_handler(lambda loop, context: None)
        self._started.cancel()  # without effect where the samplers are up
        self._loop.call_soon_threadsafe(self._over.set)

    def _run_loop(self) -> None:
        """Run the event loop until some time after the `with` block: a call of Ray cannot be interrupted.

        `Runner` cancels unfinished tasks, and waits for them.
        """
        with self._runner as runner:
            runner.run(self._over.wait())

    async def _start(self) -> None:
        while not (self._trainer_has_devices() or self._needed):
            await asyncio.sleep(_POLL_S)
        await self.manager.start()

    def _create(self, config: DictConfig, start_rank: int) -> BalancerFirst:
        """Wait for the samplers, in place of `LLMServerManager.create`. Raise the error of a failed start.

        Raises:
            RuntimeError: the samplers were not up `START_S` after the trainer was.
        """
        assert start_rank == 0, "the trainer has no samplers on its own devices"
        self._needed = True
        wait([self._started], timeout=START_S)
        if not self._started.done():
            raise RuntimeError(
                f"the samplers were not up {START_S:.0f} s after the trainer was: their workers' logs say why; mend "
                "that, and start the run again"
            )
        self._started.result()
        return self.manager


def has_devices(resource_pools: dict[str, Any]) -> bool:
    """Return True if Ray has given each of verl's pools its devices."""
    return bool(resource_pools) and all(pool.pgs is not None for pool in resource_pools.values())
