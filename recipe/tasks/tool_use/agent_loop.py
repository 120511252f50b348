"""Multi-turn tool use in the manner of SimpleTIR (arXiv 2509.02479), as verl's agent loop `simpletir`.

A trajectory is one assistant message. The model writes a ```python block; the sandbox runs it; the output is appended,
and the model goes on:

    prompt | turn 1 ... ```python ... ``` | Code execution result: ... | turn 2 ... \\boxed{42}
    mask     1      1   1             1     0    0         0             1      1   1

A weight update in the middle of a turn is hidden by the samplers' client, and one during a call by nothing: the next
turn is sampled by the new weights.
"""

import asyncio
import copy
import functools
import itertools
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput

from code_sandbox.client import SandboxClient
from code_sandbox.protocol import CommandStatus
from recipe.tasks.tool_use import latency
from recipe.tasks.tool_use.settings import ToolUseSettings
from recipe.tasks.tool_use.turns import CLOSING_FENCE, OBSERVATION, Turn, Void, observation, read_turn
from verl_vcpo.common.token_versions import SAMPLER
from verl_vcpo.common.truncated import TRUNCATED

_LEFT_OUT = "\n...\n"
# Closing fences of other blocks (text, JSON, ...) that a turn is interrupted at. Each costs a request with the whole
# prompt; a model that repeats fences would make one for every few tokens. From then on the turn is written to its end,
# and what follows its program is cut off.
_STOPS_PER_TURN = 4


@dataclass
class _Trajectory:
    """What was sampled and observed so far. T response tokens."""

    prompt: list[int]
    sample: int
    """The place among the prompt's trajectories."""
    tokens: list[int] = field(default_factory=list)
    """[T]"""
    mask: list[int] = field(default_factory=list)
    """[T] 1 for a sampled token, 0 for an observed one."""
    log_probs: list[float] = field(default_factory=list)
    """[T] of the policy that sampled the token; 0 for an observed one."""
    versions: list[list[int]] = field(default_factory=list)
    """Per turn, policy versions that sampled it; the oldest and the newest are among them."""
    sampler: int | None = None
    """The rank of the sampler of the first tokens."""
    routed_experts: Any = None
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    timed_out_calls: int = 0
    void: Void | None = None
    truncated: bool = False
    """A limit ended the trajectory after a program: of turns, of time, or of tokens for the program's output."""
    metrics: dict[str, Any] = field(default_factory=dict)

    def add_turn(self, tokens: list[int], log_probs: list[float]) -> None:
        self.tokens += tokens
        self.mask += [1] * len(tokens)
        self.log_probs += log_probs
        self.turns += 1

    def add_observation(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.log_probs += [0.0] * len(tokens)

    def note(self, output: TokenOutput) -> None:
        """Keep what a request of the turn tells besides its tokens."""
        if len(self.versions) == self.turns:
            self.versions.append([])
        if output.token_ids:
            told = (output.extra_fields.get(name) for name in ("min_global_steps", "max_global_steps"))
            self.versions[-1] += [version for version in told if version is not None]
            if self.sampler is None:
                self.sampler = output.extra_fields.get(SAMPLER)
        if output.routed_experts is not None:
            self.routed_experts = output.routed_experts
        preempted = output.num_preempted
        if preempted is not None and preempted >= 0:
            self.metrics["num_preempted"] = self.metrics.get("num_preempted", 0) + preempted


@functools.cache
def _of_ordinary_tokens(tokenizer: Any) -> Any:
    """A copy: `split_special_tokens` is a state of the tokenizer, which other threads encode prompts with meanwhile."""
    return copy.deepcopy(tokenizer)


@register("simpletir")
class SimpleTIRAgentLoop(AgentLoopBase):
    """Runs one trajectory. Its settings are the configuration's `tool_use`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = ToolUseSettings(**self.config.tool_use)
        self.sandbox = SandboxClient(self.settings.sandbox_url, token=self.settings.sandbox_token())
        self.response_length = self.rollout_config.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """Sample turns and run their programs, in order, until an answer, a void turn or a limit.

        Raises:
            SandboxUnavailable: the sandbox did not run a program; the prompt is sampled again.
        """
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        trajectory = _Trajectory(prompt, int(kwargs.get("session_id", 0)))
        deadline = time.monotonic() + self.settings.max_time_s
        request_id = uuid4().hex  # one for all turns: they go to the server that has the prefix in its cache
        while True:
            turn = await self._sample_turn(trajectory, sampling_params, request_id, int(priority), deadline)
            trajectory.void = turn.void
            at_limit = trajectory.turns >= self.settings.max_turns or time.monotonic() >= deadline
            if turn.code is None or turn.answers or at_limit:
                break
            observed = await self._run_program(turn.code, trajectory, deadline)
            fits = len(trajectory.tokens) + len(observed) < self.response_length
            if not fits or time.monotonic() >= deadline:
                break
            trajectory.add_observation(observed)
        trajectory.truncated = turn.code is not None and not turn.answers
        return self._output(trajectory)

    async def _sample_turn(
        self,
        trajectory: _Trajectory,
        sampling_params: dict[str, Any],
        request_id: str,
        priority: int,
        deadline: float,
    ) -> Turn:
        """One turn, cut after its first complete code block."""
        tokens: list[int] = []
        log_probs: list[float] = []
        text = ""
        for stops_left in range(_STOPS_PER_TURN, -1, -1):
            budget = self.response_length - len(trajectory.tokens) - len(tokens)
            stop = {"stop": [CLOSING_FENCE]} if stops_left else {}
            with simple_timer("generate_sequences", trajectory.metrics):
                output = await self.server_manager.generate(
                    request_id=request_id,
                    prompt_ids=trajectory.prompt + trajectory.tokens + tokens,
                    sampling_params={**sampling_params, "max_tokens": budget, **stop},
                    priority=priority,
                )
            trajectory.note(output)
            tokens += output.token_ids
            log_probs += output.log_probs or [0.0] * len(output.token_ids)
            before, text = text, self._text(tokens)
            turn = read_turn(text, self.settings.answer_pattern)
            stopped_at_a_fence = CLOSING_FENCE in text[max(0, len(before) - len(CLOSING_FENCE) + 1) :]
            ended = tokens[-1:] == [self.tokenizer.eos_token_id] or len(output.token_ids) >= budget
            if turn.code is not None or ended or not stopped_at_a_fence or time.monotonic() >= deadline:
                break  # otherwise the fence was some other block's
        if turn.end is not None:
            kept = self._tokens_up_to(tokens, turn.end)
            tokens, log_probs = tokens[:kept], log_probs[:kept]
        trajectory.add_turn(tokens, log_probs)
        return turn

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _tokens_up_to(self, tokens: list[int], end: int) -> int:
        """The fewest first tokens whose text reaches `end`."""
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if len(self._text(tokens[:middle])) >= end:
                high = middle
            else:
                low = middle + 1
        return low

    async def _run_program(self, code: str, trajectory: _Trajectory, deadline: float) -> list[int]:
        """The tokens of what the program printed; none where its wait met the deadline, and it is not run."""
        settings, turn = self.settings, trajectory.turns
        wait = settings.latency_median_s, settings.latency_sigma, trajectory.prompt, trajectory.sample, turn
        with simple_timer("tool_calls", trajectory.metrics):
            await asyncio.sleep(min(latency.seconds(*wait), deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return []
            result = await self.sandbox.run(code, self.settings.call_timeout_s)
        trajectory.calls += 1
        trajectory.failed_calls += bool(result.return_code)
        trajectory.timed_out_calls += result.status == CommandStatus.TIME_LIMIT
        output, end = observation(result, self.settings.call_timeout_s)
        body, most = (
            self._encoded("\n".join(part for part in (output, end) if part)),
            self.settings.max_observation_tokens,
        )
        if len(body) > most:
            ending = self._shortened(self._encoded(f"\n{end}" if output and end else end), most // 2)
            body = self._shortened(self._encoded(output), most - len(ending)) + ending
        head, tail = map(self._encoded, OBSERVATION.split("{}"))
        return head + body + tail

    def _shortened(self, tokens: list[int], most: int) -> list[int]:
        """About so many of the tokens: those at the beginning and at the end."""
        if len(tokens) <= most:
            return tokens
        half = most // 2
        return tokens[:half] + self._encoded(_LEFT_OUT) + tokens[-half:]

    def _encoded(self, text: str) -> list[int]:
        """Ordinary tokens only: a program may print `<|im_end|>`."""
        ordinary = _of_ordinary_tokens(self.tokenizer)
        return ordinary(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _output(self, trajectory: _Trajectory) -> AgentLoopOutput:
        dropped = trajectory.void is not None and self.settings.drop_void_turns
        mask = [0] * len(trajectory.mask) if dropped else trajectory.mask
        extra_fields: dict[str, Any] = {"turn_scores": [], "tool_rewards": [], TRUNCATED: trajectory.truncated}
        known = [versions for versions in trajectory.versions if versions]
        if known:
            # verl's tool agent keeps the first turn's oldest; the lag bound needs that of all turns.
            extra_fields["min_global_steps"] = min(map(min, known))
            extra_fields["max_global_steps"] = max(map(max, known))
        extra_fields["tool_use"] = {
            "turns": trajectory.turns,
            "calls": trajectory.calls,
            "failed_calls": trajectory.failed_calls,
            "timed_out_calls": trajectory.timed_out_calls,
            "calls_across_updates": sum(max(a) < min(b) for a, b in itertools.pairwise(known)),
            "void_trajectories": int(trajectory.void is not None),
            **{f"void_{why}": int(trajectory.void == why) for why in Void},
            "dropped_trajectories": int(dropped),
            "call_s": trajectory.metrics.get("tool_calls", 0.0),
        }
        if trajectory.sampler is not None:
            extra_fields[SAMPLER] = trajectory.sampler
        routed = trajectory.routed_experts
        return AgentLoopOutput(
            prompt_ids=trajectory.prompt,
            response_ids=trajectory.tokens,
            response_mask=mask,
            response_logprobs=trajectory.log_probs,
            routed_experts=routed,
            multi_modal_data={},
            num_turns=trajectory.turns + trajectory.calls + 1,
            metrics=trajectory.metrics,
            extra_fields=extra_fields,
        )
