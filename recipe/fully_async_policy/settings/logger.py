"""Where metrics go: `trainer.logger`."""

import importlib.util

from omegaconf import DictConfig, ListConfig
from pydantic import ValidationError

from recipe.fully_async_policy.settings.errors import SettingError, choices, first_line

PACKAGES = {
    "console": None,
    "file": None,
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "clearml": "clearml",
    "vemlp_wandb": "volcengine_ml_platform",
    "rl_insight": "rl_insight",
}
"""verl's loggers (verl/utils/tracking.py), and the package that each needs."""


def check_logger(config: DictConfig) -> None:
    """Refuse a logger that verl does not have, whose package is not installed, or to which nobody is logged in.

    Raises:
        SettingError: the first of them.
    """
    given = config.trainer.logger
    for name in list(given) if isinstance(given, list | ListConfig) else [given]:
        if name not in PACKAGES:
            raise SettingError(f"trainer.logger={name}: {choices(name, PACKAGES)}")
        package = PACKAGES[name]
        if package and importlib.util.find_spec(package) is None:
            raise SettingError(
                f"trainer.logger={name}: the package {package} is not installed; install it with `pip install "
                f"{package}`, or leave {name} out"
            )
        if name == "wandb":
            _check_login()


def _check_login() -> None:
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
        name = f"WANDB_{wrong['loc'][0]}".upper()
        raise SettingError(f"trainer.logger=wandb: {name}={wrong['input']}: {wrong['msg']}") from None
    except wandb.Error as error:
        raise SettingError(f"trainer.logger=wandb: {first_line(error)}") from None
    finally:
        wandb.teardown()  # W&B reads its variables once, and the launcher sets one more: WANDB_DIR
    if not ready:
        raise SettingError(
            "trainer.logger=wandb: W&B has no key: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        )
