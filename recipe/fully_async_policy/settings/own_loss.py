"""A policy loss of the user's own, tried once on made-up log-probs."""

from omegaconf import DictConfig

from recipe.fully_async_policy.settings.errors import SettingError
from verl_vcpo.actor import own_loss


def check_own_loss(actor: DictConfig) -> None:
    """Load and call the function that `policy_loss.loss_mode` names, if it names one; make its file's path absolute.

    Args:
        actor: the settings `actor_rollout_ref.actor`.

    Raises:
        SettingError: the function cannot be loaded or called, or gives no loss.
    """
    if not own_loss.is_own(actor.policy_loss.loss_mode):
        return
    from hydra.errors import InstantiationException
    from verl.utils.config import omega_conf_to_dataclass

    actor.policy_loss.loss_mode = own_loss.absolute(actor.policy_loss.loss_mode)
    try:
        own_loss.try_out(omega_conf_to_dataclass(actor))
    except (ValueError, InstantiationException) as error:
        raise SettingError(" ".join(str(error.__cause__ or error).split())) from None
