"""Log-probs of a batch that samplers compute again, with the weights that the trainer begins its update with.

`vcpo.ess_part=lag` has to know what arithmetic alone makes of a log-prob (v in `vcpo.mismatch`). Fresh tokens tell
that, but a run whose trainer is the slower part has none after its first batch: all responses are as old as the bound
allows. Between two weight updates samplers have the trainer's own weights. They compute the log-probs of some sequences
again, in one pass as for a prompt, and the engine compares these with its own (`actor/update/sequences.py`).
"""

import json
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta

from verl_vcpo.actor.update.sequences import COMPUTED_AGAIN
from verl_vcpo.common import console
from verl_vcpo.common.stored_tags import session_of
from verl_vcpo.common.token_versions import SAMPLER
from verl_vcpo.loop.questions import asked_tokens
from verl_vcpo.samplers.agent_loop import one_line
from verl_vcpo.samplers.client import is_server_failure

_SEQUENCES = 16
"""The most sequences that a step asks about."""
_WAIT_S, _FIRST_WAIT_S = 10.0, 60.0
"""The first answer is worth a longer wait: often the first batch alone has fresh tokens, to compare it with."""
_NEGLIGIBLE = 0.99
"""The ESS ratio of arithmetic alone from which on the step is the same to half a percent, whatever v is."""
_PAUSE = 20
"""The steps from one question to the next after a late answer, and where arithmetic does not matter."""


class _Question(NamedTuple):
    server: Any
    id: str
    session: str
    """The uid of the prompt, and the number of the sample."""
    prompt: int
    """The tokens of the prompt."""


class ComputedAgain:
    """The questions of a run to its samplers, none where `asked_tokens` is 0.

    Args:
        servers: verl's LLMServerManager.
        config: the whole configuration.
    """

    def __init__(self, servers: Any, config: DictConfig) -> None:
        self._servers, self._asks_from, self._told = servers, 0, False
        self._longest = asked_tokens(config)
        self._asks = self._longest > 0

    def ask(self, batch: KVBatchMeta, rows: Sequence[int], step: int, arithmetic: float | None) -> None:
        """Put log-probs of some of the batch's `rows` into its `extra_info`, if samplers answer in time.

        Args:
            batch: the batch of this step, before its update.
            rows: those of the first mini-batch, whose update begins with the samplers' weights.
            step: samplers have the version `step - 1`.
            arithmetic: the ESS ratio of arithmetic alone in the last update; None if it is not known.
        """
        negligible = arithmetic is not None and arithmetic >= _NEGLIGIBLE
        if not self._asks or step < self._asks_from or (negligible and step % _PAUSE):
            return
        calls = self._calls(batch, rows)
        if not calls:
            self._tell(
                f"Step {step}: no prompt has less than {self._longest} tokens, so no log-probs are computed again."
            )
            return
        wait_s = _FIRST_WAIT_S if arithmetic is None else _WAIT_S
        answered, late = ray.wait([*calls], num_returns=len(calls), timeout=wait_s)
        for call in late:
            calls[call].server.drop_request.remote(calls[call].id)
        if late:
            self._asks_from = step + _PAUSE
            self._tell(f"Step {step}: {len(late)} of {len(calls)} log-probs were not computed again in {wait_s:g} s.")
        found = {calls[call].session: self._log_probs(call, calls[call].prompt, step - 1) for call in answered}
        known = {session: log_probs for session, log_probs in found.items() if log_probs}
        batch.extra_info[COMPUTED_AGAIN] = json.dumps(known)

    def _calls(self, batch: KVBatchMeta, rows: Sequence[int]) -> dict[Any, _Question]:
        """Send each question to the sampler that the response comes from, whose arithmetic may be its own.

        Returns:
            The questions, by the object that gets the answer.
        """
        trajectories = Counter(map(session_of, batch.keys))
        keys = [batch.keys[row] for row in rows if not batch.tags[row].get("is_padding")]
        keys = [key for key in keys if trajectories[session_of(key)] == 1]
        number = min(_SEQUENCES, len(keys))
        keys = [keys[i * len(keys) // number] for i in range(number)]
        if not keys:
            return {}
        names = ["prompts", "responses", "extra_fields"]
        fields = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=names)
        servers = {replica.replica_rank: replica._server_handle for replica in self._servers.rollout_replicas}
        in_turn = list(servers.values())
        calls = {}
        rows_of = zip(keys, fields["prompts"].unbind(), fields["responses"].unbind(), strict=True)
        for i, (key, prompt, response) in enumerate(rows_of):
            tokens = [*prompt.tolist(), *response.tolist()][: self._longest]
            if len(tokens) <= len(prompt):
                continue
            server = servers.get(fields["extra_fields"][i].get(SAMPLER)) or in_turn[i % len(in_turn)]
            asked = _Question(server, uuid.uuid4().hex, session_of(key), len(prompt))
            only = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            calls[asked.server.generate.remote(prompt_ids=tokens, sampling_params=only, request_id=asked.id)] = asked
        return calls

    def _log_probs(self, answer: Any, prompt: int, version: int) -> list[float] | None:
        """Return the log-probs of the tokens after the prompt; None from a sampler that died, or has another version.

        Any other error ends the questions of this run, with a line: the run itself does not need the answers.
        """
        try:
            fields = ray.get(answer).extra_fields
        except ray.exceptions.RayError as error:
            if self._asks and not is_server_failure(error):  # the keeper of the samplers replaces a dead one
                self._asks = False
                console.print_line(
                    f"Samplers are not asked for log-probs any more: one of them raised {one_line(error)}"
                )
            return None
        if fields.get("global_steps") != version or "prompt_logprobs" not in fields:
            return None
        return [of_token[0] for of_token in fields["prompt_logprobs"][prompt - 1 : -1]]

    def _tell(self, line: str) -> None:
        """Print the first of such lines, with what follows from it."""
        if not self._told:
            console.print_line(f"{line} What arithmetic makes of the weights stays as it was measured before.")
        self._told = True
