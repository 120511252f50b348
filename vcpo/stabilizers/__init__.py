"""Methods that VCPO is compared with and that verl does not have: one pure function in one file each.

Such a function takes `log_prob` under the policy being trained, `rollout_log_prob` recorded by the sampler, `advantage`
and `mask`, which is true on response tokens, all [B, T]; and the settings of the method. The result is the loss of each
token, [B, T], whose gradient is the method's. Statistics over "the batch" are statistics over the B sequences of the
call.
"""

from collections.abc import Callable

from torch import Tensor

from vcpo.stabilizers.bapo import bapo
from vcpo.stabilizers.m2po import m2po
from vcpo.stabilizers.oapl import oapl
from vcpo.stabilizers.off_policy_mask import off_policy_mask
from vcpo.stabilizers.p3o import p3o
from vcpo.stabilizers.r2vpo import r2vpo
from vcpo.stabilizers.sat import sat
from vcpo.stabilizers.topr import topr
from vcpo.stabilizers.vespo import vespo

TOKEN_LOSSES: dict[str, Callable[..., Tensor]] = {
    "bapo": bapo,
    "m2po": m2po,
    "oapl": oapl,
    "off_policy_mask": off_policy_mask,
    "p3o": p3o,
    "r2vpo": r2vpo,
    "sat": sat,
    "topr": topr,
    "vespo": vespo,
}
"""The losses by the names that verl knows them by (`actor_rollout_ref.actor.policy_loss.loss_mode`)."""

__all__ = ["TOKEN_LOSSES", "bapo", "m2po", "oapl", "off_policy_mask", "p3o", "r2vpo", "sat", "topr", "vespo"]
