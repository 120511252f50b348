"""The passes of a packed update: the sequences of each pass, and what a pass keeps. All ranks decide the same."""

from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor
from verl.utils.device import get_device_name

from vcpo import OpobScope
from verl_vcpo.actor.mini_batch import SequencesBeforeForward
from verl_vcpo.actor.norms.settings import SECOND_BUFFERS_BYTES, NormsKeep
from verl_vcpo.actor.vcpo_settings import OWN_BASELINES, VCPOSettings

# verl splits a batch into micro-batches in time quadratic in its sequences: beyond so many sequences in a pass, more
# sequences would cost the host more time than another pass does.
_TOGETHER = 64
# Beyond so many tokens in a pass, activations have left a CPU's cache when the sums need them.
_NEAR_TOKENS = 4096


class Experts(Enum):
    """The experts of a model, for the passes."""

    NONE = "none"
    """A dense model."""
    OWN = "own"
    """A rank's experts get tokens of its own data-parallel rank's sequences only."""
    SHARED = "shared"
    """A rank's experts get tokens of several data-parallel ranks' sequences."""


@dataclass(frozen=True)
class Parts:
    """The part of the model on each rank, for the passes."""

    trained: int
    """The most numbers in trained parameters on any rank."""
    device: str = "cpu"
    staged: bool = False
    """True: the model is a pipeline, whose stages are idle for a part of short passes."""

    @classmethod
    def gathered(cls, chunks: list[torch.nn.Module]) -> "Parts":
        """Gather the parts from this rank's `chunks` and those of all others. Collective over the whole trainer."""
        trained = sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)
        of_ranks = [0] * dist.get_world_size()
        dist.all_gather_object(of_ranks, trained)
        return cls(max(of_ranks), get_device_name(), mpu.get_pipeline_model_parallel_world_size() > 1)

    @property
    def second_buffers(self) -> int:
        """The most groups of a pass of `gradients` on a rank: at least one, then as memory allows."""
        return max(1, SECOND_BUFFERS_BYTES // (4 * max(1, self.trained)))


def choose(
    config: VCPOSettings,
    sequences: SequencesBeforeForward,
    interleaved: bool,
    micro_batch_tokens: int | None,
    experts: Experts,
    parts: Parts,
) -> tuple[NormsKeep, list[list[list[int]]]]:
    """Choose what a mini-batch's passes keep, and per pass and data-parallel rank the numbers of its sequences.

    Args:
        config, sequences, interleaved, micro_batch_tokens, experts: those of `what_to_keep`.

    Raises:
        ValueError: `keep=gradients`, where groups and ranks do not allow it.
    """
    limits = interleaved, micro_batch_tokens, experts
    keep = what_to_keep(config, sequences, *limits)
    # Micro-batches by sequences are as long in a long pass as in a short one.
    together = None if micro_batch_tokens is None or parts.staged else _TOGETHER
    if keep is NormsKeep.ACTIVATIONS:
        asked = config.norms.keep is keep or experts is not Experts.NONE
        return keep, plan_passes(config, keep, sequences, *limits, most_sequences=None if asked else together)
    near = config.norms.tokens if parts.staged or parts.device != "cpu" else min(_NEAR_TOKENS, config.norms.tokens)
    groups = parts.second_buffers if experts is Experts.NONE else 1
    return keep, plan_passes(config, keep, sequences, *limits, near, together, groups)


def what_to_keep(
    config: VCPOSettings,
    sequences: SequencesBeforeForward,
    interleaved: bool,
    micro_batch_tokens: int | None = None,
    experts: Experts = Experts.NONE,
) -> NormsKeep:
    """Return what passes keep: `config.norms.keep`, and with `auto`

        with experts                    `config.kept_with_experts`
        groups and ranks allow it       `gradients`
        else                            `activations`

    Args:
        config: VCPO's settings.
        sequences: all ranks' sequences.
        interleaved: whether pipeline stages are virtual.
        micro_batch_tokens: with `use_dynamic_bsz` the most tokens of a micro-batch; None: micro-batches by sequences.
        experts: the model's experts.

    Raises:
        ValueError: `keep=gradients`, where groups and ranks do not allow it.
    """
    if config.norms.keep is NormsKeep.GRADIENTS:
        obstacle = against_gradients(config, sequences, interleaved, micro_batch_tokens, experts)
        if obstacle:
            raise ValueError(f"vcpo.norms.keep=gradients: {obstacle}; set vcpo.norms.keep=activations, or auto")
    if config.norms.keep is not NormsKeep.AUTO:
        return config.norms.keep
    if experts is not Experts.NONE:
        return config.kept_with_experts
    obstacle = against_gradients(config, sequences, interleaved, micro_batch_tokens, experts)
    return NormsKeep.ACTIVATIONS if obstacle else NormsKeep.GRADIENTS


def against_gradients(
    config: VCPOSettings,
    sequences: SequencesBeforeForward,
    interleaved: bool,
    micro_batch_tokens: int | None,
    experts: Experts,
) -> str | None:
    """Return why groups and ranks do not allow `keep=gradients`; None if they do. Arguments: see `what_to_keep`."""
    if not config.fits_two_sums:
        return OWN_BASELINES
    if config.opob_scope is OpobScope.MINIBATCH:
        return None
    if experts is Experts.SHARED:
        return "experts get tokens of several data-parallel ranks, whose prompts have baselines of their own"
    if interleaved:
        return "an interleaved pipeline cannot run one group at a time"
    homes = [sequences.group[sequences.rank == rank].unique() for rank in range(_ranks(sequences))]
    if len({len(groups) for groups in homes}) != 1 or len(torch.cat(homes).unique()) != sum(map(len, homes)):
        return "a prompt's samples lie on several data-parallel ranks, or ranks hold different numbers of prompts"
    for groups in zip(*homes, strict=True):
        rows = torch.isin(sequences.group, torch.stack(groups))
        if not _ready(rows, sequences, micro_batch_tokens, alike=False):
            return (
                "use_dynamic_bsz=true makes as many micro-batches on all data-parallel ranks, and one of them has "
                "fewer samples of its prompt"
            )
    return None


def _ranks(sequences: SequencesBeforeForward) -> int:
    return int(sequences.rank.max()) + 1


def plan_passes(
    config: VCPOSettings,
    keep: NormsKeep | None,
    sequences: SequencesBeforeForward,
    interleaved: bool,
    micro_batch_tokens: int | None = None,
    experts: Experts = Experts.NONE,
    most_tokens: int | None = None,
    most_sequences: int | None = None,
    most_groups: int = 1,
) -> list[list[list[int]]]:
    """Return per pass and data-parallel rank the numbers of that rank's sequences. No rank has an empty pass.

    All sequences of a baseline are in the same pass, on whichever ranks they are; without `keep` there is one pass.
    Where experts are shared, all ranks have equally many micro-batches in a pass. With `keep=gradients` a rank's
    sequences are sorted by group, and within a group by reward: sequences of equal rewards share products.

    Args:
        most_tokens: the limit of a rank in a pass, but at least one group; None: `config.norms.tokens`.
        most_sequences: the limit of a rank in a pass; None: no limit.
        most_groups: the limit of a rank in a pass with `keep=gradients`.
        config, keep, sequences, interleaved, micro_batch_tokens, experts: those of `what_to_keep`.
    """
    ranks = _ranks(sequences)
    size = len(sequences.group) // ranks
    most = (config.norms.tokens if most_tokens is None else most_tokens), most_sequences
    if keep is None or config.opob_scope is OpobScope.MINIBATCH or interleaved:
        return [[list(range(size))] * ranks]
    if keep is NormsKeep.GRADIENTS:
        by_rank = sequences.group.view(ranks, size)
        rewards = sequences.reward.view(ranks, size)
        homes = [
            [_by_reward(groups == group, of_rank) for group in groups.unique()]
            for groups, of_rank in zip(by_rank, rewards, strict=True)
        ]
        of_groups = [list(of_ranks) for of_ranks in zip(*homes, strict=True)]
        return _joined(of_groups, sequences, micro_batch_tokens, most, most_groups)
    alike = experts is Experts.SHARED and micro_batch_tokens is None
    passes: list[Tensor] = []
    for group in sequences.group.unique():
        rows = sequences.group == group
        if passes and (
            not _ready(passes[-1], sequences, micro_batch_tokens, alike) or _fits(passes[-1] | rows, sequences, *most)
        ):
            passes[-1] |= rows
        else:
            passes.append(rows)
    while len(passes) > 1 and not _ready(passes[-1], sequences, micro_batch_tokens, alike):
        last = passes.pop()
        passes[-1] |= last
    return [[mine.nonzero().flatten().tolist() for mine in rows.view(ranks, size)] for rows in passes]


def _by_reward(rows: Tensor, reward: Tensor) -> list[int]:
    """Return the numbers of these rows in the order of their rewards."""
    numbers = rows.nonzero().flatten()
    return numbers[reward[numbers].sort(stable=True).indices].tolist()


def _joined(
    of_groups: list[list[list[int]]],
    sequences: SequencesBeforeForward,
    micro_batch_tokens: int | None,
    most: tuple[int, int | None],
    most_groups: int,
) -> list[list[list[int]]]:
    """Join passes of one group on each rank to passes of up to `most_groups`, where ranks are ready for these."""
    size = len(sequences.group) // _ranks(sequences)

    def allowed(one: list[list[int]]) -> bool:
        taken = torch.zeros(len(sequences.group), dtype=torch.bool)
        for rank, rows in enumerate(one):
            taken[rank * size + torch.tensor(rows)] = True
        return _fits(taken, sequences, *most) and _ready(taken, sequences, micro_batch_tokens, alike=False)

    passes = of_groups[:1]
    groups = 1
    for one in of_groups[1:]:
        both = [[*rows, *more] for rows, more in zip(passes[-1], one, strict=True)]
        if groups < most_groups and allowed(both):
            passes[-1], groups = both, groups + 1
        else:
            passes.append(one)
            groups = 1
    return passes


def _ready(rows: Tensor, sequences: SequencesBeforeForward, micro_batch_tokens: int | None, alike: bool) -> bool:
    """Return True where every rank has at least as many of these rows as any rank may have micro-batches, and one.

    verl makes the same number of micro-batches on all ranks, none of them empty. A rank whose tokens exceed one
    micro-batch may need one for each sequence. All rows together are ready: ranks hold equally many.

    Args:
        alike: all ranks must have equally many sequences, and so equally many micro-batches by sequences.
    """
    on_rank = [rows & (sequences.rank == rank) for rank in range(_ranks(sequences))]
    counts = [int(mine.sum()) for mine in on_rank]
    if alike and len(set(counts)) > 1:
        return False
    most = 1
    if micro_batch_tokens is not None:
        tokens = [int(sequences.length[mine].sum()) for mine in on_rank]
        most = max(n if total > micro_batch_tokens else 1 for n, total in zip(counts, tokens, strict=True))
    return min(counts) >= most


def _fits(rows: Tensor, sequences: SequencesBeforeForward, tokens: int, number: int | None) -> bool:
    """Return True where every rank has at most `tokens` tokens and `number` sequences in these rows."""
    of_ranks = [sequences.length[rows & (sequences.rank == rank)] for rank in range(_ranks(sequences))]
    return all(mine.sum() <= tokens and (number is None or len(mine) <= number) for mine in of_ranks)
