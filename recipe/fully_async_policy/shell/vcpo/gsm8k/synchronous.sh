#!/usr/bin/env bash
# GSM8K, synchronous GRPO: Qwen2-1.5B on 8 GPUs of one node.
# VCPO's estimator without VCPO's two controls: the baseline is the group's mean, the step size constant.
# CPU=1, DRY_RUN=1 and further settings: see launch.sh.
# shellcheck source=recipe/fully_async_policy/shell/vcpo/launch.sh
source "$(dirname "$0")/../launch.sh" || exit

MODEL=models/Qwen2-1.5B # a Hugging Face checkpoint's folder
DATA=data/gsm8k # python -m scripts.prepare_data gsm8k --source raw/gsm8k --out data/gsm8k
LAYOUT=(
  trainer.n_gpus_per_node=2
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
  actor_rollout_ref.rollout.n_gpus_per_node=6
  actor_rollout_ref.rollout.tensor_model_parallel_size=2
)
launch gsm8k outputs/gsm8k/synchronous async.lag=0 vcpo.step_size_rule=none vcpo.baseline=mean "$@"
