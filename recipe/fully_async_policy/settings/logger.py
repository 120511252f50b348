"""Where metrics go: `trainer.logger`."""

import importlib.util

from omegaconf import DictConfig, ListConfig
from pydantic import ValidationError

from recipe.fully_async_policy.settings.errors import SettingError, choices, first_line

PACKAGES = {
    **{name: name for name in ("tensorboard", "wandb", "trackio", "mlflow", "swanlab", "clearml", "rl_insight")},
    **{"console": None, "file": None, "vemlp_wandb": "volcengine_ml_platform"},
}
"""verl's loggers (verl/utils/tracking.py), and the package that each needs."""


def check_logger(config: DictConfig) -> None:
    """Refuse a logger that verl does not have, whose package is not installed, or to which nobody is logged in."""
    given = config.trainer.logger
    for name in given if isinstance(given, list | ListConfig) else [given]:
        if name not in PACKAGES:
            raise SettingError(f"trainer.logger={name}: {choices(name, PACKAGES)}")
        package = PACKAGES[name]
        if package and importlib.util.find_spec(package) is None:
            fix = f"install it with `pip install {package}`, or leave {name} out"
            raise SettingError(f"trainer.logger={name}: the package {package} is not installed; {fix}")
        if name == "wandb" and (why := _why_no_login()):
            raise SettingError(f"trainer.logger=wandb: {why}")


def _why_no_login() -> str | None:
    """W&B itself looks for a key when the training begins: after the models are loaded, or the nodes waited for."""
    import wandb
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    try:
        settings = wandb_setup.singleton().settings
        ready = settings.mode in ("offline", "dryrun", "disabled") or wbauth.authenticate_session(
            host=settings.base_url, source="trainer.logger", prompt=False, update_session=False
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        return f"WANDB_{str(wrong['loc'][0]).upper()}={wrong['input']}: {wrong['msg']}"
    except wandb.Error as error:
        return first_line(error)
    finally:
        wandb.teardown()  # W&B reads its variables once, and the launcher sets one more: WANDB_DIR
    return None if ready else "W&B has no key: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
