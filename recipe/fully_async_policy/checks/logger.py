"""Where metrics go: `trainer.logger`."""

import importlib.util

from omegaconf import DictConfig, ListConfig

from recipe.fully_async_policy.checks.errors import SettingError, choices

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
    """Refuse a logger that verl does not have, or whose package is not installed.

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
