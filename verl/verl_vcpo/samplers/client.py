"""The samplers' client: a response goes on across weight updates (extends verl/workers/rollout/llm_server.py).

A weight update aborts every request. The client keeps the tokens sampled so far, with their log-probs, and requests the
rest. The server holds the request back until the new weights are loaded, and computes the prefix again with these.

A server that dies or hangs is taken out of the load balancer's pool. The request goes to another server, or waits until
the pool has a server. admission.py decides when a request goes to a server.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator
from contextvars import ContextVar
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_vcpo.common.token_versions import FIELD, SAMPLER, token_versions
from verl_vcpo.samplers.admission import AdmissionGate, admitted_per_worker, is_training_request, request_order
from verl_vcpo.samplers.router import NO_SERVERS, GatheredCalls
from verl_vcpo.samplers.sampling_params import check_training_request

at_samplers: ContextVar["Seconds | None"] = ContextVar("at_samplers", default=None)
"""The seconds that an agent loop's requests take, with the wait for their turn."""

_ABORTED = ("abort", "aborted")
_LIMITS = ("max_tokens", "max_new_tokens")
_RETRY_S = 0.5
_PROBE_S = 60.0
MAX_SERVER_FAILURES = 4
"""The number of servers that fail while they work on a request, after which the request must be the cause."""
_logger = logging.getLogger(__name__)


class Seconds:
    """The seconds in which at least one of several blocks was under way."""

    def __init__(self) -> None:
        self._ended, self._since, self._under_way = 0.0, 0.0, 0

    @property
    def total(self) -> float:
        """The sum of the seconds until now."""
        return self._ended + (time.monotonic() - self._since if self._under_way else 0.0)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the seconds of the block."""
        if not self._under_way:
            self._since = time.monotonic()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._ended += time.monotonic() - self._since


def is_server_failure(error: BaseException) -> bool:
    """Return True for an error of the server, not of the request: server or engine died, or did not answer in time."""
    if isinstance(error, RayTaskError):
        return type(error.cause).__name__ in ("EngineDeadError", "EngineGenerateError")
    return isinstance(error, RayActorError | TimeoutError)


class RequestEndsServers(RuntimeError):
    """The error of a request that must be the cause why server after server failed while it worked on the request."""


class ResumingLLMClient(LLMServerClient):
    """A client that hides weight updates, and servers that fail, from the agent loop.

    A response keeps its server from the first request to the last: after a weight update, which aborts every request,
    no client has to ask the load balancer again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gate = AdmissionGate(admitted_per_worker(self.config.actor_rollout_ref.rollout))
        self._suspects = AdmissionGate(1)
        self._balancer = GatheredCalls(self._load_balancer)
        self._server_of: dict[str, tuple[str, Any]] = {}
        self._engine_request: dict[str, str] = {}  # the id under which vLLM knows a request

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Return a whole response: tokens, each with the log-prob under the policy that sampled the token.

        In `extra_fields`, `min_global_steps` and `max_global_steps` are the oldest and the newest policy version that
        sampled one of the tokens.

        Raises:
            RequestEndsServers: `MAX_SERVER_FAILURES` servers failed while they worked on the request.
            UserCodeError: a training request asks for tokens of another distribution than the policy's.
        """
        if is_training_request():
            check_training_request(sampling_params, self.config.actor_rollout_ref.rollout.temperature)
        with (at_samplers.get() or Seconds()).counted():
            async with self._gate.admitted(request_order.get()):
                try:
                    tokens = normalize_token_ids(prompt_ids)
                    return await self._whole_response(request_id, tokens, sampling_params, kwargs)
                finally:
                    self._leave_server(request_id)

    async def _whole_response(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], kwargs: dict[str, Any]
    ) -> TokenOutput:
        given = [sampling_params[name] for name in _LIMITS if sampling_params.get(name)]
        budget = given[0] if given else self.config.actor_rollout_ref.rollout.response_length
        others = {name: value for name, value in sampling_params.items() if name not in _LIMITS}
        whole: TokenOutput | None = None
        while True:
            done = [] if whole is None else whole.token_ids
            limited = {**others, "max_tokens": budget - len(done)}
            part = await self._part(request_id, prompt_ids + done, limited, kwargs)
            whole = part if whole is None else _joined(whole, part)
            if len(whole.token_ids) >= budget or part.stop_reason not in _ABORTED:
                if whole.stop_reason in _ABORTED:
                    whole.stop_reason = "length"
                return whole

    async def _part(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], kwargs: dict[str, Any]
    ) -> TokenOutput:
        """Send one request, again to other servers while servers fail; a request that may be the cause goes alone."""
        for failures in range(MAX_SERVER_FAILURES):
            alone = self._suspects.admitted(()) if failures > 1 else contextlib.nullcontext()
            try:
                async with alone:
                    return await self._attempt(
                        super().generate(
                            request_id, prompt_ids=prompt_ids, sampling_params=dict(sampling_params), **kwargs
                        ),
                        request_id,
                    )
            except (RayActorError, RayTaskError, TimeoutError) as error:
                if not is_server_failure(error) or request_id not in self._server_of:
                    raise
                server_id, _ = self._server_of[request_id]
                self._leave_server(request_id)
                _logger.warning("sampler %s failed (%s): its requests go elsewhere", server_id, type(error).__name__)
                await self._load_balancer.remove_servers.remote([server_id])
        raise RequestEndsServers(f"{MAX_SERVER_FAILURES} samplers failed, one after another, while they worked on it")

    async def _attempt(self, generate: Coroutine[Any, Any, TokenOutput], request_id: str) -> TokenOutput:
        """Return the server's answer. If the answer is late, probe the server's engine.

        Raises:
            TimeoutError: the engine does not answer.
        """
        call = asyncio.ensure_future(generate)
        try:
            while True:
                done, _ = await asyncio.wait({call}, timeout=self.config["async"].sampler_timeout_s)
                if done:
                    return call.result()
                if request_id in self._server_of and not await self._answers(self._server_of[request_id][1]):
                    raise TimeoutError
        finally:
            if not call.done():  # nobody waits any more: end the request at the server too, which frees a place
                call.cancel()
                held, engine_request = self._server_of.get(request_id), self._engine_request.get(request_id)
                if held and engine_request:
                    held[1].drop_request.remote(engine_request)

    async def _answers(self, server: Any) -> bool:
        try:
            await asyncio.wait_for(server.probe.remote(), min(self.config["async"].sampler_timeout_s, _PROBE_S))
        except (RayActorError, RayTaskError, TimeoutError):
            return False
        return True

    def _vllm_request_id(self, request_id: str) -> str:
        self._engine_request[request_id] = super()._vllm_request_id(request_id)
        return self._engine_request[request_id]

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        while request_id not in self._server_of:
            try:
                self._server_of[request_id] = await self._balancer.acquire(request_id)
            except RuntimeError as error:
                if NO_SERVERS not in str(error):
                    raise
                await asyncio.sleep(_RETRY_S)  # a replacement is being started
        return self._server_of[request_id]

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Do nothing: verl calls this after each part of a response; `_leave_server` releases after the last part."""

    def _leave_server(self, request_id: str) -> None:
        held = self._server_of.pop(request_id, None)
        self._engine_request.pop(request_id, None)
        if held is not None:
            self._balancer.release(held[0])


def _joined(whole: TokenOutput, part: TokenOutput) -> TokenOutput:
    """Join the output of a response whose first part, `whole`, was aborted and continued by `part`."""
    fields = dict(whole.extra_fields)
    if part.token_ids:  # a policy version that sampled no token is not a version of the response
        if not whole.token_ids:
            fields |= {name: part.extra_fields.get(name) for name in ("min_global_steps", SAMPLER)}
        for name in ("global_steps", "max_global_steps"):
            fields[name] = part.extra_fields.get(name)
        of_parts = [token_versions(each.extra_fields, len(each.token_ids)) for each in (whole, part) if each.token_ids]
        fields[FIELD] = [run for runs in of_parts for run in runs]
    return TokenOutput(
        token_ids=whole.token_ids + part.token_ids,
        log_probs=(whole.log_probs or []) + (part.log_probs or []),
        routed_experts=_all_experts(whole.routed_experts, part.routed_experts),
        stop_reason=part.stop_reason,
        num_preempted=(whole.num_preempted or 0) + (part.num_preempted or 0),
        extra_fields=fields,
    )


def _all_experts(whole: Any, part: Any) -> Any:
    """Join the experts [tokens, layers, chosen] of two outputs: `part` has those of the tokens of `whole` too.

    Each token keeps the experts that computed it first. An aborted output may have none.
    """
    if whole is None or part is None:
        return part if whole is None else whole
    import numpy as np

    return np.concatenate([whole, part[len(whole) :]])
