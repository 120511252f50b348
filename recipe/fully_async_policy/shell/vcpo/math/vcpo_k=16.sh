#!/usr/bin/env bash
# MATH, VCPO at lag 16: Qwen2.5-7B on 8 GPUs of one node.
#   DRY_RUN=1 bash SCRIPT   prints the configuration and the GPU plan, starts nothing
#   CPU=1 bash SCRIPT       2 steps on a laptop, with a small model
set -euo pipefail
cd "$(dirname "$0")/../../../../.."

MODEL=models/Qwen2.5-7B # a Hugging Face checkpoint's folder
DATA=data/math # python -m scripts.prepare_data math --source raw/math --tokenizer MODEL --out data/math
TASK=math RUN=outputs/math/vcpo_k16
LAYOUT=(
  hardware=gpu
  trainer.n_gpus_per_node=4
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.rollout.n_gpus_per_node=4
  actor_rollout_ref.rollout.tensor_model_parallel_size=2
)
# shellcheck source=recipe/fully_async_policy/shell/vcpo/laptop.sh
if [[ "${CPU:-}" == 1 ]]; then source recipe/fully_async_policy/shell/vcpo/laptop.sh; fi

exec python -m recipe.fully_async_policy.main +task="$TASK" async.lag=16 vcpo.enable=true \
  run_dir="$RUN" actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/val.parquet" "${LAYOUT[@]}" "$@"
