#!/usr/bin/env bash
# GSM8K, VCPO at lag 12: Qwen2-1.5B on 8 GPUs of one node.
#   DRY_RUN=1 bash SCRIPT   prints the configuration and the GPU plan, starts nothing
#   CPU=1 bash SCRIPT       2 steps on a laptop, with a small model
set -euo pipefail
cd "$(dirname "$0")/../../../../.."

MODEL=models/Qwen2-1.5B # a Hugging Face checkpoint's folder
DATA=data/gsm8k # python -m scripts.prepare_data gsm8k --source raw/gsm8k --tokenizer MODEL --out data/gsm8k
TASK=gsm8k RUN=outputs/gsm8k/vcpo_k12
LAYOUT=(
  hardware=gpu
  trainer.n_gpus_per_node=2
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
  actor_rollout_ref.rollout.n_gpus_per_node=6
  actor_rollout_ref.rollout.tensor_model_parallel_size=2
)
# shellcheck source=recipe/fully_async_policy/shell/vcpo/laptop.sh
if [[ "${CPU:-}" == 1 ]]; then source recipe/fully_async_policy/shell/vcpo/laptop.sh; fi

exec python -m recipe.fully_async_policy.main +task="$TASK" async.lag=12 vcpo.enable=true \
  run_dir="$RUN" actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/val.parquet" "${LAYOUT[@]}" "$@"
