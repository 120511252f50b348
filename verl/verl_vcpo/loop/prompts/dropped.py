"""Trajectories that an update drops because a limit ended their response (`async.truncated`).

They stay in their batch: the rows, and what a resumed run samples, are the same with every treatment.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from verl_vcpo.common.stored_tags import Tag, prompt_of, session_of
from verl_vcpo.common.truncated import TRUNCATED, Truncated


def groups_without_signal(tags: Mapping[str, Tag]) -> set[str]:
    """Return the prompts whose samples are all masked or dropped, or with `drop` all but a last one.

    Args:
        tags: key -> tag of the trajectories of whole groups.
    """
    treatments = {prompt_of(key): tag[TRUNCATED] for key, tag in tags.items() if TRUNCATED in tag}
    trained = {session_of(key) for key, tag in tags.items() if TRUNCATED not in tag}
    sessions = Counter(map(prompt_of, trained))
    return {uid for uid, treatment in treatments.items() if sessions[uid] <= (treatment == Truncated.DROP)}


def mask_dropped(batch: KVBatchMeta, by_verl: bool) -> None:
    """Mask all tokens of the batch's trajectories that the update drops, in TransferQueue.

    Args:
        batch: whole groups, and padding.
        by_verl: verl's estimators make the advantages. With `drop` a dropped trajectory gets a uid of its own,
            which takes it out of its prompt's baseline; so does a sample that is left alone, whose advantage would be
            its reward.
    """
    tags = {key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")}
    alone = groups_without_signal(tags) if by_verl else set()
    keys = [key for key, tag in tags.items() if TRUNCATED in tag or prompt_of(key) in alone]
    if not keys:
        return
    zeros = [torch.zeros(tags[key]["response_len"], dtype=torch.int64) for key in keys]
    fields: dict[str, Any] = {name: tu.nested_tensor_from_tensor_list(zeros) for name in ("response_mask", "loss_mask")}
    data = TensorDict(fields, batch_size=len(keys))
    if by_verl:
        masked = [tags[key].get(TRUNCATED) == Truncated.MASK for key in keys]
        uids = [prompt_of(key) if mask else key for key, mask in zip(keys, masked, strict=True)]
        tu.assign_non_tensor_stack(data, "uid", uids)
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=data)
