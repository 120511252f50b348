#!/usr/bin/env bash
# Countdown, VCPO at lag 10: Qwen2.5-7B on 8 GPUs of one node.
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
launch countdown outputs/countdown/vcpo_k10 async.lag=10 "$@"
