"""The samplers' client: a response goes on across weight updates (extends verl/workers/rollout/llm_server.py).

A weight update aborts every request. The client keeps the tokens sampled so far, with their log-probs, and requests the
rest: the server holds the request back until the new weights are loaded, and computes the prefix anew with them.

A server that dies or hangs is taken out of the load balancer's pool. The request goes to another server, or waits until
the pool has one.
"""

import asyncio
import logging
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

_ABORTED = ("abort", "aborted")
_RETRY_S = 0.5
_logger = logging.getLogger(__name__)


def is_server_failure(error: BaseException) -> bool:
    """Whether the error is of the server, not of the request: server or engine died, or there was no answer in time."""
    if isinstance(error, RayTaskError):
        return type(error.cause).__name__ in ("EngineDeadError", "EngineGenerateError")
    return isinstance(error, RayActorError | TimeoutError)


class ResumingLLMClient(LLMServerClient):
    """Hides weight updates from the agent loop. verl's client waits a second before it goes on; this one does not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server_of: dict[str, str] = {}
        self._clock_of: dict[str, asyncio.Timeout] = {}

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """A whole response: tokens, each with the log-prob under the policy that sampled the token.

        Returns:
            verl's output. In `extra_fields`, `min_global_steps` and `max_global_steps` are the oldest and the newest
            policy version that sampled one of the tokens.
        """
        prompt_ids = normalize_token_ids(prompt_ids)
        budget = self._budget(sampling_params)
        whole: TokenOutput | None = None
        try:
            while True:
                done = [] if whole is None else whole.token_ids
                limited = {**self._without_limit(sampling_params), "max_tokens": budget - len(done)}
                part = await self._attempt(request_id, prompt_ids + done, limited, kwargs)
                whole = part if whole is None else _joined(whole, part)
                if len(whole.token_ids) >= budget or part.stop_reason not in _ABORTED:
                    if whole.stop_reason in _ABORTED:
                        whole.stop_reason = "length"
                    return whole
        finally:
            self._server_of.pop(request_id, None)
            self._clock_of.pop(request_id, None)

    async def _attempt(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], kwargs: dict[str, Any]
    ) -> TokenOutput:
        """One request, repeated until a server answers it."""
        while True:
            try:
                async with asyncio.timeout(None) as clock:  # `_acquire_server` sets the limit
                    self._clock_of[request_id] = clock
                    return await super().generate(
                        request_id, prompt_ids=prompt_ids, sampling_params=dict(sampling_params), **kwargs
                    )
            except (RayActorError, RayTaskError, TimeoutError) as error:
                if not is_server_failure(error):
                    raise
                server_id = self._server_of[request_id]
                _logger.warning("sampler %s failed (%s): its requests go elsewhere", server_id, type(error).__name__)
                await self._load_balancer.remove_servers.remote([server_id])

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        while True:
            try:
                server_id, handle = await super()._acquire_server(request_id, **extra)
            except RuntimeError as error:
                if "No available servers" not in str(error):
                    raise
                await asyncio.sleep(_RETRY_S)  # a replacement is being started
            else:
                self._server_of[request_id] = server_id
                limit_s = self.config["async"].sampler_timeout_s
                self._clock_of[request_id].reschedule(asyncio.get_running_loop().time() + limit_s)
                return server_id, handle

    def _budget(self, sampling_params: dict[str, Any]) -> int:
        for name in ("max_tokens", "max_new_tokens"):
            if sampling_params.get(name):
                return sampling_params[name]
        return self.config.actor_rollout_ref.rollout.response_length

    @staticmethod
    def _without_limit(sampling_params: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in sampling_params.items() if name not in ("max_tokens", "max_new_tokens")}


def _joined(whole: TokenOutput, part: TokenOutput) -> TokenOutput:
    """The output of a response whose first part, `whole`, was aborted and continued by `part`."""
    fields = dict(whole.extra_fields)
    if part.token_ids:  # a policy version that sampled no token is not a version of the response
        if not whole.token_ids:
            fields["min_global_steps"] = part.extra_fields.get("min_global_steps")
        for name in ("global_steps", "max_global_steps"):
            fields[name] = part.extra_fields.get(name)
    routed = whole.routed_experts
    if part.routed_experts is not None and part.token_ids:
        import numpy as np

        new = part.routed_experts[-len(part.token_ids) :]
        routed = part.routed_experts if routed is None else np.concatenate([routed, new])
    return TokenOutput(
        token_ids=whole.token_ids + part.token_ids,
        log_probs=(whole.log_probs or []) + (part.log_probs or []),
        routed_experts=routed,
        stop_reason=part.stop_reason,
        num_preempted=(whole.num_preempted or 0) + (part.num_preempted or 0),
        extra_fields=fields,
    )
