# shellcheck shell=bash
# What the scripts in math/ share: Qwen2.5-7B on 8 GPUs of one node.
# shellcheck source=recipe/fully_async_policy/shell/vcpo/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" || exit

MODEL=models/Qwen2.5-7B # a Hugging Face checkpoint's folder
DATA=data/math # python -m scripts.prepare_data math --source raw/math --out data/math
LAYOUT=(
  trainer.n_gpus_per_node=4
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.rollout.n_gpus_per_node=4
  actor_rollout_ref.rollout.tensor_model_parallel_size=2
)
