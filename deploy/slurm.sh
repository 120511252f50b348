#!/usr/bin/env bash
# One SLURM job: Ray on its nodes, and a launch script on the first. Submit it from the checkout: sbatch deploy/slurm.sh.
# Never run: no SLURM here. One node of 8 GPUs needs neither Ray's part nor what follows the script's name.
#SBATCH --job-name=vcpo-math-k10
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=48:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source "${VENV:-.venv}/bin/activate"
export RAY_AUTH_MODE=token HF_HUB_OFFLINE=1 CUDA_DEVICE_MAX_CONNECTIONS=1 # the token: docs/guide/cluster.md, "Several nodes"
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # srun takes no --cpus-per-task from its job
loggers=tensorboard # tensorboard,wandb: W&B too, after `wandb login`, or with WANDB_MODE=offline
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$head" | awk '!/^127[.]/ {print $1; exit}')
address=${address:-$(hostname -I | awk '{print $1}')} # a head whose own name is 127.0.1.1 in /etc/hosts

srun --nodes=1 --ntasks=1 -w "$head" ray start --head --node-ip-address="$address" --port=6379 --block &
sleep 20
if ((SLURM_JOB_NUM_NODES > 1)); then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) -x "$head" \
    ray start --address="$address:6379" --block &
  sleep 20
fi

export RAY_ADDRESS="$address:6379"
bash recipe/fully_async_policy/shell/vcpo/math/vcpo_k=10.sh run_dir=/shared/runs/k10 \
  trainer.nnodes=2 trainer.n_gpus_per_node=8 \
  actor_rollout_ref.rollout.nnodes=2 actor_rollout_ref.rollout.n_gpus_per_node=8 \
  trainer.save_freq=25 trainer.max_actor_ckpt_to_keep=2 trainer.resume_mode=auto "trainer.logger=[$loggers]" &
run=$!
trap 'kill -TERM "$run"' TERM # SLURM's warning: the run ends cleanly, and the next job goes on from its last checkpoint
wait "$run" || wait "$run" # the trap ends the first wait, and SLURM ends all that this script leaves
