"""VCPO: Variance-Controlled Policy Optimization (arXiv 2602.17616), in torch alone.

Read in this order: `importance` (how far off policy is each sequence), `ess` (how far to step),
`baseline` (what to subtract), `estimator` (all of it together: one coefficient per sequence).
"""

from vcpo.config import (
    Baseline,
    EssPart,
    OpobScope,
    OpobWeights,
    StepSizeRule,
    VCPOConfig,
)
from vcpo.estimator import Estimate, estimate
from vcpo.mismatch import Mismatch

__all__ = [
    "Baseline",
    "EssPart",
    "Estimate",
    "Mismatch",
    "OpobScope",
    "OpobWeights",
    "StepSizeRule",
    "VCPOConfig",
    "estimate",
]
