"""Methods that VCPO is compared with and that verl does not have: one pure function in one file each.

A function takes log-probabilities under the policy and as recorded by the sampler, advantages and a mask, all [B, T],
and its own settings; it returns the loss of each token, [B, T], whose gradient is the method's. What it computes over
"the batch" is over the sequences it is given.
"""

from collections.abc import Callable

from torch import Tensor

from vcpo.stabilizers.bapo import bapo
from vcpo.stabilizers.m2po import m2po
from vcpo.stabilizers.off_policy_mask import off_policy_mask
from vcpo.stabilizers.topr import topr
from vcpo.stabilizers.vespo import vespo

TOKEN_LOSSES: dict[str, Callable[..., Tensor]] = {
    "bapo": bapo,
    "m2po": m2po,
    "off_policy_mask": off_policy_mask,
    "topr": topr,
    "vespo": vespo,
}
"""By the name under which verl knows them (`actor_rollout_ref.actor.policy_loss.loss_mode`)."""

__all__ = ["TOKEN_LOSSES", "bapo", "m2po", "off_policy_mask", "topr", "vespo"]
