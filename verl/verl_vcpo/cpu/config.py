"""The Megatron engine's settings on CPU."""

from dataclasses import dataclass

from verl.workers.config import McoreEngineConfig


@dataclass
class CPUMcoreEngineConfig(McoreEngineConfig):
    """verl's config class, which also allows `dtype=float32`.

    On a CPU bfloat16 is slower, and makes the log-probs of trainer and sampler differ by 0.1.
    """

    def __post_init__(self) -> None:
        dtype = self.dtype
        object.__setattr__(self, "dtype", "bfloat16")  # the only value that verl's checks accept
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype)
