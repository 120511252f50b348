"""What `vcpo.norms.keep=auto` keeps of a mini-batch, and in which passes: whatever takes the least time there.

The time is that of operations and bytes at the rates of the kind of device (vcpo/gradnorm/cost.py), and of the host. It
depends on the model's layers, the sequences' lengths and the groups, and on nothing that is measured: the same
mini-batch is computed in the same way in every run, and on all ranks.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from vcpo import OpobScope
from vcpo.gradnorm import cost
from verl_vcpo.actor.mini_batch import SequencesBeforeForward
from verl_vcpo.actor.norms.plan import (
    Experts,
    against_gradients,
    plan_passes,
    what_to_keep,
)
from verl_vcpo.actor.norms.settings import ACTIVATIONS_OF_AUTO_BYTES, NormsKeep
from verl_vcpo.actor.vcpo_settings import VCPOSettings

Passes = list[list[list[int]]]

# Host time of a pass: verl's schedule, and what ranks tell each other. And for each pair of sequences in a micro-batch
# by tokens: verl's preprocess_thd_engine takes the batch apart for each sequence in it. On the machine of
# docs/measurements/step-cost.md; their ratio is what matters.
_PASS_S, _PAIR_S = 20e-3, 10e-6
_TOGETHER = 64
"""Sequences of a pass from which on more of them would cost the host more than passes do."""
_NEAR_TOKENS = 4096
"""Tokens of a pass on a CPU from which on activations are too far from the processor for passes of several groups."""


@dataclass(frozen=True)
class Layers:
    """The linear layers of a dense model."""

    stages: tuple[tuple[tuple[int, int], ...], ...]
    """Of each different part of the model on a rank the layers' numbers of inputs and outputs on that rank."""
    number_bytes: int = 4
    """Of inputs and output gradients."""
    device: str = "cpu"
    trained: int = 0
    """Numbers in all trained parameters of the rank that has most of them."""

    @classmethod
    def gathered(cls, chunks: list[torch.nn.Module], tied: bool) -> "Layers":
        """Of all ranks' parts of a model. Collective over the whole trainer.

        Args:
            chunks: this rank's.
            tied: whether the head's weight is that of the embedding.
        """
        is_head = tied and mpu.get_pipeline_model_parallel_world_size() == 1
        trained = [pair for chunk in chunks for pair in chunk.named_parameters() if pair[1].requires_grad]
        weights = [
            parameter
            for name, parameter in trained
            if parameter.dim() == 2 and (is_head or "word_embeddings" not in name)
        ]
        # ranks of context parallelism square some rows each
        mine = tuple(sorted((w.shape[1], w.shape[0] // mpu.get_context_parallel_world_size()) for w in weights))
        kinds = {(w.element_size(), w.device.type) for w in weights}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (mine, kinds, sum(parameter.numel() for _, parameter in trained)))
        stages, all_kinds, numbers = zip(*parts, strict=True)
        number_bytes, device = max(set().union(*all_kinds), default=(4, "cpu"))
        return cls(tuple(sorted(set(stages))), number_bytes, device, max(numbers))

    def seconds(self, keep: NormsKeep, lengths: list[int], rewards: int = 2) -> float:
        """Of norms and sums of sequences of these lengths, with `gradients` of one baseline, on the slowest rank.

        Args:
            rewards: how many values the rewards of these sequences have.
        """
        of = cost.rates(self.device, self.number_bytes)

        def of_layer(inputs: int, outputs: int) -> float:
            if keep is NormsKeep.GRADIENTS:
                return cost.two_sums(lengths, inputs, outputs, of, self.number_bytes, rewards)
            return cost.norm_then_sum(lengths, inputs, outputs, of, self.number_bytes)

        return max(
            (sum(n * of_layer(*shape) for shape, n in Counter(stage).items()) for stage in self.stages), default=0.0
        )

    @property
    def second_buffers_that_fit(self) -> int:
        """How many groups a pass of `gradients` may have on a rank: at least one.

        The second buffers of more groups take no more memory than ACTIVATIONS_OF_AUTO_BYTES.
        """
        return max(1, ACTIVATIONS_OF_AUTO_BYTES // (4 * max(1, self.trained)))

    @property
    def tokens_that_fit(self) -> int:
        """The most tokens of which `auto` keeps activations, or of one group, on a rank.

        They take no more memory than the second buffer would, or than ACTIVATIONS_OF_AUTO_BYTES.
        """
        return min(
            (
                int(max(ACTIVATIONS_OF_AUTO_BYTES, 4 * sum(i * o for i, o in stage)) / kept)
                for stage in self.stages
                if (kept := self.number_bytes * sum(i + o for i, o in stage))
            ),
            default=1,
        )


@dataclass(frozen=True)
class Choice:
    """What a mini-batch's passes keep, and their sequences."""

    keep: NormsKeep
    passes: Passes
    """Per pass and data-parallel rank the numbers of that rank's sequences."""
    why: str
    """For the log, in words."""


def choose(
    config: VCPOSettings,
    sequences: SequencesBeforeForward,
    interleaved: bool,
    micro_batch_tokens: int | None,
    experts: Experts,
    layers: Layers,
    staged: bool = False,
) -> Choice:
    """What is set; with `auto`, of a dense model, the fastest of what groups, ranks and memory allow.

    Args:
        layers: the model's.
        staged: whether the model is a pipeline, of which short passes leave stages idle.
        config, sequences, interleaved, micro_batch_tokens, experts: as of `what_to_keep`.

    Raises:
        ValueError: `keep=gradients`, where groups and ranks do not allow it.
    """
    limits = interleaved, micro_batch_tokens, experts

    def plan(keep: NormsKeep, why: str, **most: Any) -> Choice:
        return Choice(keep, plan_passes(config, keep, sequences, *limits, **most), why)

    # micro-batches by sequences are as long in a long pass as in a short one
    together = None if micro_batch_tokens is None or staged else _TOGETHER
    near = config.norms.tokens if staged or layers.device != "cpu" else min(_NEAR_TOKENS, config.norms.tokens)
    of_gradients: dict[str, Any] = dict(most_tokens=near, most_sequences=together)
    if experts is Experts.NONE:
        of_gradients["most_groups"] = layers.second_buffers_that_fit
    if config.norms.keep is not NormsKeep.AUTO or experts is not Experts.NONE:
        keep = what_to_keep(config, sequences, *limits)
        why = f"vcpo.norms.keep={config.norms.keep.value}"
        return plan(keep, why, **(of_gradients if keep is NormsKeep.GRADIENTS else {}))
    fit = layers.tokens_that_fit
    obstacle = against_gradients(config, sequences, *limits)
    if obstacle:
        return plan(NormsKeep.ACTIVATIONS, obstacle, most_sequences=together)
    one_sum = plan(NormsKeep.ACTIVATIONS, "", most_tokens=min(fit, config.norms.tokens), most_sequences=together)
    two_sums = plan(NormsKeep.GRADIENTS, "", **of_gradients)
    if any(sum(lengths) > fit for one in one_sum.passes for lengths in _lengths(one, sequences)):
        return Choice(two_sums.keep, two_sums.passes, "the activations of a pass are larger than a second buffer")
    scope = config.opob_scope
    seconds = {one.keep: _seconds(one, scope, sequences, micro_batch_tokens, layers) for one in (two_sums, one_sum)}
    fastest = two_sums if seconds[two_sums.keep] <= seconds[one_sum.keep] else one_sum
    estimates = ", ".join(f"{keep.value} {time:.3g} s" for keep, time in seconds.items())
    return Choice(fastest.keep, fastest.passes, f"norms and sums are estimated to take: {estimates}")


def _lengths(rows: list[list[int]], sequences: SequencesBeforeForward) -> list[list[int]]:
    """Of each rank the lengths of its sequences in a pass."""
    return [sequences.length[mine].tolist() for mine in _of_mini_batch(rows, sequences)]


def _of_mini_batch(rows: list[list[int]], sequences: SequencesBeforeForward) -> list[Tensor]:
    """Of each rank where its sequences in a pass are in the mini-batch."""
    size = len(sequences.length) // len(rows)
    return [rank * size + torch.tensor(mine) for rank, mine in enumerate(rows)]


def _of_baselines(
    rows: Tensor, choice: Choice, scope: OpobScope, sequences: SequencesBeforeForward
) -> list[tuple[list[int], int]]:
    """The lengths of these sequences, and how many values their rewards have, of each baseline.

    With `activations` baselines need not be told apart.
    """
    of_baselines = [rows]
    if choice.keep is NormsKeep.GRADIENTS and scope is not OpobScope.MINIBATCH:
        groups = sequences.group[rows]
        of_baselines = [rows[groups == group] for group in groups.unique()]
    return [(sequences.length[some].tolist(), len(sequences.reward[some].unique())) for some in of_baselines]


def _seconds(
    choice: Choice,
    scope: OpobScope,
    sequences: SequencesBeforeForward,
    micro_batch_tokens: int | None,
    layers: Layers,
) -> float:
    """Of all passes, one after the other; in each the slowest rank counts."""

    def of_rank(rows: Tensor) -> float:
        norms_and_sums = sum(
            layers.seconds(choice.keep, lengths, rewards)
            for lengths, rewards in _of_baselines(rows, choice, scope, sequences)
        )
        return norms_and_sums + _host_seconds(sequences.length[rows].tolist(), micro_batch_tokens)

    return sum(max(map(of_rank, _of_mini_batch(one, sequences))) for one in choice.passes)


def _host_seconds(lengths: list[int], micro_batch_tokens: int | None) -> float:
    if micro_batch_tokens is None:
        return _PASS_S
    micro_batches = -(-sum(lengths) // micro_batch_tokens)
    return _PASS_S + _PAIR_S * len(lengths) ** 2 / max(1, micro_batches)
