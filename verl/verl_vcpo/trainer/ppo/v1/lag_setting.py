"""What `async.lag` and `async.max_lag` say, without torch: the planner asks, too."""

from omegaconf import DictConfig

AUTO = "auto"
"""The value of `async.lag` with which the lag governs itself (lag_controller.py)."""


def lag_bound(settings: DictConfig) -> float:
    """The largest lag that a trajectory may have: `async.lag`, or `async.max_lag` where the lag governs itself.

    Args:
        settings: the section `async`.
    """
    return settings.max_lag if settings.lag == AUTO else settings.lag


def bound_setting(settings: DictConfig) -> str:
    """The name of the setting that `lag_bound` comes from."""
    return "async.max_lag" if settings.lag == AUTO else "async.lag"


def lag_in_words(settings: DictConfig) -> str:
    """`8`, or `auto (max 8)`."""
    return f"{AUTO} (max {settings.max_lag})" if settings.lag == AUTO else f"{settings.lag:g}"
