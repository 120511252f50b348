#!/usr/bin/env bash
# Multi-turn tool use (DAPO, AIME 2025), VCPO at lag 2: Qwen2.5-7B on 4 GPUs of one node.
# The published GPUs are B200 of 180 GB. These settings are for 80 GB; +gpus=141gb and +gpus=180gb are for larger cards.
# CPU=1, DRY_RUN=1 and further settings: see launch.sh.
# shellcheck source=recipe/fully_async_policy/shell/vcpo/launch.sh
source "$(dirname "$0")/../launch.sh" || exit

MODEL=models/Qwen2.5-7B # a Hugging Face checkpoint's folder
DATA=data/tool_use # python -m scripts.prepare_data tool_use --source raw/tool_use --out data/tool_use
LAYOUT=(
  trainer.n_gpus_per_node=2
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
  actor_rollout_ref.rollout.n_gpus_per_node=2
  actor_rollout_ref.rollout.tensor_model_parallel_size=2
)
launch tool_use outputs/multiturn/vcpo_k2 async.lag=2 "$@"
