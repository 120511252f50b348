"""The passes of a packed update: the sequences of each pass, and what a pass keeps. All ranks decide the same."""

import torch
from torch import Tensor

from vcpo import OpobScope
from verl_vcpo.workers.config.vcpo import VCPOSettings
from verl_vcpo.workers.engine.megatron.mini_batch import SequencesBeforeForward
from verl_vcpo.workers.engine.megatron.norms import NormsKeep


def what_to_keep(
    config: VCPOSettings,
    sequences: SequencesBeforeForward,
    interleaved: bool,
    micro_batch_tokens: int | None = None,
) -> NormsKeep:
    """`config.norms.keep`; with `auto` `gradients` where groups and ranks allow that, else `activations`.

    Args:
        config: VCPO's settings.
        sequences: all ranks' sequences.
        interleaved: whether pipeline stages are virtual.
        micro_batch_tokens: with `use_dynamic_bsz` the most tokens of a micro-batch; None: micro-batches by sequences.

    Raises:
        ValueError: `keep=gradients`, where groups and ranks do not allow it.
    """
    if config.norms.keep is NormsKeep.GRADIENTS:
        obstacle = _against_gradients(config, sequences, interleaved, micro_batch_tokens)
        if obstacle:
            raise ValueError(f"vcpo.norms.keep=gradients: {obstacle}; set vcpo.norms.keep=activations, or auto")
    if config.norms.keep is not NormsKeep.AUTO:
        return config.norms.keep
    obstacle = _against_gradients(config, sequences, interleaved, micro_batch_tokens)
    return NormsKeep.ACTIVATIONS if obstacle else NormsKeep.GRADIENTS


def _against_gradients(
    config: VCPOSettings, sequences: SequencesBeforeForward, interleaved: bool, micro_batch_tokens: int | None
) -> str | None:
    if config.opob_leave_one_out:
        return "with vcpo.opob_leave_one_out=true every sequence has a baseline of its own"
    if config.opob_scope is OpobScope.MINIBATCH:
        return None
    if interleaved:
        return "an interleaved pipeline cannot run one group at a time"
    homes = [sequences.group[sequences.rank == rank].unique() for rank in range(_ranks(sequences))]
    if len({len(groups) for groups in homes}) != 1 or len(torch.cat(homes).unique()) != sum(map(len, homes)):
        return "a prompt's samples lie on several data-parallel ranks, or ranks hold different numbers of prompts"
    for groups in zip(*homes, strict=True):
        if not _ready(torch.isin(sequences.group, torch.stack(groups)), sequences, micro_batch_tokens):
            return (
                "use_dynamic_bsz=true makes as many micro-batches on all data-parallel ranks, and one of them has "
                "fewer samples of its prompt"
            )
    return None


def _ranks(sequences: SequencesBeforeForward) -> int:
    return int(sequences.rank.max()) + 1


def plan_passes(
    config: VCPOSettings,
    keep: NormsKeep,
    sequences: SequencesBeforeForward,
    interleaved: bool,
    micro_batch_tokens: int | None = None,
) -> list[list[int]]:
    """Per pass the numbers of this rank's sequences. All ranks have the same number of passes, none of them empty.

    All sequences of a baseline are in the same pass, on whichever ranks they are. Arguments as of `what_to_keep`.
    """
    everything = [list(range(sequences.mine.stop - sequences.mine.start))]
    if keep is NormsKeep.NOTHING or config.opob_scope is OpobScope.MINIBATCH or interleaved:
        return everything
    local = torch.arange(len(sequences.group)) - sequences.rank * len(everything[0])  # [B] row number within the rank
    if keep is NormsKeep.GRADIENTS:
        return [_rows(sequences, sequences.group == group, local) for group in sequences.group[sequences.mine].unique()]
    passes: list[Tensor] = []
    for group in sequences.group.unique():
        rows = sequences.group == group
        if passes and (
            not _ready(passes[-1], sequences, micro_batch_tokens)
            or _fits(passes[-1] | rows, sequences, config.norms.tokens)
        ):
            passes[-1] |= rows
        else:
            passes.append(rows)
    while len(passes) > 1 and not _ready(passes[-1], sequences, micro_batch_tokens):
        last = passes.pop()
        passes[-1] |= last
    return [_rows(sequences, rows, local) for rows in passes]


def _rows(sequences: SequencesBeforeForward, rows: Tensor, local: Tensor) -> list[int]:
    mine = torch.zeros_like(rows)
    mine[sequences.mine] = True
    return local[rows & mine].tolist()


def _ready(rows: Tensor, sequences: SequencesBeforeForward, micro_batch_tokens: int | None) -> bool:
    """Whether every rank has sequences in these rows, and as many as any rank may have micro-batches.

    verl makes the same number of micro-batches on all ranks, none of them empty. A rank whose tokens exceed one
    micro-batch may need as many as it has sequences. All rows together are ready: ranks hold equally many.
    """
    on_rank = [rows & (sequences.rank == rank) for rank in range(_ranks(sequences))]
    counts = [int(mine.sum()) for mine in on_rank]
    most = 1
    if micro_batch_tokens is not None:
        tokens = [int(sequences.length[mine].sum()) for mine in on_rank]
        most = max(n if total > micro_batch_tokens else 1 for n, total in zip(counts, tokens, strict=True))
    return min(counts) >= most


def _fits(rows: Tensor, sequences: SequencesBeforeForward, most: int) -> bool:
    """Whether every rank has at most `most` tokens in these rows."""
    return all(sequences.length[rows & (sequences.rank == rank)].sum() <= most for rank in range(_ranks(sequences)))
