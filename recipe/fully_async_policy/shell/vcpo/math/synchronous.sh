#!/usr/bin/env bash
# MATH, synchronous GRPO: Qwen2.5-7B on 8 GPUs of one node.
# VCPO's estimator without VCPO's two controls: the baseline is the group's mean, the step size constant.
# CPU=1, DRY_RUN=1 and further settings: see launch.sh.
# shellcheck source=recipe/fully_async_policy/shell/vcpo/math.sh
source "$(dirname "$0")/../math.sh" || exit
launch math outputs/math/synchronous async.lag=0 vcpo.step_size_rule=none vcpo.baseline=mean "$@"
