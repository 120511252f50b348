#!/usr/bin/env bash
# Countdown, synchronous GRPO: Qwen2.5-7B on 8 GPUs of one node.
# VCPO's estimator without VCPO's two controls: the baseline is the group's mean, the step size constant.
# CPU=1, DRY_RUN=1 and further settings: see launch.sh.
# shellcheck source=recipe/fully_async_policy/shell/vcpo/launch.sh
source "$(dirname "$0")/../launch.sh" || exit

MODEL=models/Qwen2.5-7B # a Hugging Face checkpoint's folder
DATA=data/countdown # python -m scripts.prepare_data countdown --out data/countdown
LAYOUT=(
  trainer.n_gpus_per_node=4
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.rollout.n_gpus_per_node=4
  actor_rollout_ref.rollout.tensor_model_parallel_size=2
)
launch countdown outputs/countdown/synchronous async.lag=0 vcpo.step_size_rule=none vcpo.baseline=mean "$@"
