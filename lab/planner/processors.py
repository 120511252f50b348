"""What the parts of a run take of the processors, from the runs' `vcpo/processor/*`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from lab.planner.rates import PlanError, SharedCores
from verl_vcpo.report.processor_meter import CORES, Role

_VARIES = 0.1  # relative standard deviation of the waits from which on what they take can be told


def fitted_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """y = a + b x by least squares, both at least 0."""
    scale = max(float(np.mean(x)), 1e-12)
    (a, b), _ = nnls(np.stack([np.ones_like(x, dtype=float), x / scale], 1), y)
    return float(a), float(b) / scale


class Processors:
    """Processor seconds of each role in a step.

    A trainer that waits looks for rollouts: it and the data plane take some of the processors in each second of it.

    Raises:
        PlanError: parts of the run were on other machines, whose processors the run does not record.
    """

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.cores = float(lines[0][CORES])
        waits = np.array([line["trainer_idle_share"] * line["step_s"] for line in lines])
        self._of_step, self._looking = {}, 0.0
        for role in Role:
            spent = np.array([line[role] for line in lines])
            self._of_step[role] = float(np.mean(spent))
            if not self._of_step[role]:
                raise PlanError(f"{role.value} is 0: part of the run was on another machine; calibrate on one")
            if role in (Role.TRAINER, Role.OTHERS) and np.std(waits) > _VARIES * np.mean(waits):
                self._of_step[role], a_second = fitted_line(waits, spent)
                self._looking += a_second

    def agent_s(self, responses: int) -> float:
        """Of an agent-loop worker for a response."""
        return self._of_step[Role.AGENT_LOOPS] / responses

    def engine_s(self, busy_s: float) -> float:
        """Of an engine on a core of its own, in a step in which it had requests for `busy_s`.

        Where it had to wait for a core, it took less of the processors. Several processes of an engine take turns, and
        those that wait for another poll, but give way: one core together.
        """
        return min(self._of_step[Role.ENGINES], busy_s)

    def shared(self, trainer_s: float, busy_s: float) -> SharedCores:
        """What each part asks for while it works.

        Args:
            trainer_s: of a step, in which the trainer works.
            busy_s: of a step, in which the samplers have requests, added up over samplers.
        """
        step = self._of_step
        return SharedCores(
            count=self.cores,
            trainer=step[Role.TRAINER] / trainer_s,
            looking=self._looking,
            sampler=1 + step[Role.SERVERS] / max(self.engine_s(busy_s), 1e-9),
            agents=1 + step[Role.OTHERS] / max(step[Role.AGENT_LOOPS], 1e-9),
        )
