#!/usr/bin/env bash
# MATH, VCPO at lag 10: Qwen2.5-7B on 8 GPUs of one node.
# CPU=1, DRY_RUN=1 and further settings: see launch.sh.
# shellcheck source=recipe/fully_async_policy/shell/vcpo/math.sh
source "$(dirname "$0")/../math.sh" || exit
launch math outputs/math/vcpo_k10 async.lag=10 "$@"
