# shellcheck shell=bash
# What all launch scripts share. A script sets MODEL, DATA and LAYOUT, and calls launch.
#   bash SCRIPT [setting=value ...]   trains; these settings come last, so they win: method=none is GRPO without VCPO
#                                     (synchronous: a script of VCPO with async.lag=0 method=none)
#   DRY_RUN=1 bash SCRIPT             prints the configuration and the GPU plan, starts nothing
#   bash SCRIPT 'trainer.logger=[tensorboard,wandb]'    W&B too, after `wandb login`: docs/guide/read-a-run.md
#   CPU=1 bash SCRIPT                 2 steps on a laptop, with a small model
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../../.."

# launch TASK RUN_DIR [setting=value ...]: trains MODEL on DATA, on the GPUs of LAYOUT. Does not return.
launch() {
  local TASK=$1 RUN=$2
  shift 2
  LAYOUT+=(hardware=gpu)
  # shellcheck source=recipe/fully_async_policy/shell/vcpo/laptop.sh
  if [[ "${CPU:-}" == 1 ]]; then source recipe/fully_async_policy/shell/vcpo/laptop.sh; fi
  exec python -m recipe.fully_async_policy.main +task="$TASK" run_dir="$RUN" \
    actor_rollout_ref.model.path="$MODEL" data.train_files="$DATA/train.parquet" data.val_files="$DATA/val.parquet" \
    "${LAYOUT[@]}" method=vcpo "$@"
}
