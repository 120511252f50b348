# shellcheck shell=bash
# What all launch scripts share. A script sets MODEL, DATA and LAYOUT, and calls launch.
#   bash SCRIPT [setting=value ...]   trains; these settings come last, so they win: method=none is GRPO without VCPO
#                                     (synchronous: a script of VCPO with async.lag=0 method=none)
#   DRY_RUN=1 bash SCRIPT             prints the configuration and the GPU plan, starts nothing
#   bash SCRIPT 'trainer.logger=[tensorboard,wandb]'    W&B too, after `wandb login`: docs/guide/read-a-run.md
#   CPU=1 bash SCRIPT                 2 steps on a laptop, with a small model
# As the published scripts, it reads MODEL_PATH, TRAIN_FILE, TEST_FILE, NNODES (the trainer's and the samplers', each),
# NGPUS_PER_NODE (the trainer has those that the samplers leave), SANDBOX_PORT, wandb_entity and wandb_group.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../../.."

# launch TASK RUN_DIR [setting=value ...]: trains MODEL on DATA, on the GPUs of LAYOUT. Does not return.
launch() {
  local TASK=$1 RUN=$2
  shift 2
  LAYOUT+=(hardware=gpu)
  if [[ -n ${wandb_entity:-} ]]; then export WANDB_ENTITY=$wandb_entity; fi
  if [[ -n ${wandb_group:-} ]]; then export WANDB_RUN_GROUP=$wandb_group; fi
  if [[ "${CPU:-}" == 1 ]]; then
    # shellcheck source=recipe/fully_async_policy/shell/vcpo/laptop.sh
    source recipe/fully_async_policy/shell/vcpo/laptop.sh
  else
    # shellcheck source=recipe/fully_async_policy/shell/vcpo/published.sh
    source recipe/fully_async_policy/shell/vcpo/published.sh
  fi
  exec python -m recipe.fully_async_policy.main +task="$TASK" run_dir="$RUN" \
    actor_rollout_ref.model.path="$MODEL" data.train_files="$TRAIN" data.val_files="$TEST" \
    "${LAYOUT[@]}" method=vcpo "$@"
}
