"""How long a call waits before its program runs: as tools wait in practice, for a network, a queue, another service."""

import math
import random
import zlib
from collections.abc import Sequence


def seconds(median_s: float, sigma: float, prompt: Sequence[int], sample: int, turn: int) -> float:
    """Draw the wait of a call from a log-normal distribution: exp(N(log median_s, sigma^2)), in seconds.

    The draw depends on the arguments alone, so that a call of a turn waits as long in every run. Its mean is
    median_s exp(sigma^2 / 2); one in a hundred is longer than median_s exp(2.33 sigma).

    Args:
        prompt: the prompt's tokens.
        sample, turn: the place of the trajectory among those of its prompt; of the call in the trajectory.
    """
    if median_s == 0:
        return 0.0
    seed = zlib.crc32(repr((list(prompt), sample, turn)).encode())
    return median_s * math.exp(sigma * random.Random(seed).gauss())
