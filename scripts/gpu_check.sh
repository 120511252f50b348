#!/usr/bin/env bash
# Checks and times VCPO's packed update on a GPU; `--help` says how. Exit code 0: all was measured, and is exact.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
bash scripts/gpu_check.sh [--minutes M] [--dtype bfloat16|float32] [--out FOLDER] [--tests] [--run] [--rehearse]

  --minutes   after which nothing more is measured (default 9)
  --dtype     one precision only
  --out       where the results go (default docs/measurements/gpu)
  --tests     first the tests of the engines on this GPU (with pytest and hypothesis; 4 minutes on an H200)
  --run       instead: 20 steps of a whole run, with a small model made here; one GPU for the trainer and one for a
              sampler, or the only GPU for both
  --rehearse  the smallest cases, on a CPU: does the command itself work?

Most telling first: single layers (vcpo/gradnorm, PyTorch alone), then whole steps of the Megatron actor, on Megatron's
own layers (verl, Megatron-Core, Megatron-Bridge, tensordict and what they import; no packages with kernels) and, where it is
installed, on Transformer Engine's. Results, a line for each case once it is measured, whatever becomes of the next one:

  FOLDER/DATE-DEVICE-layers.jsonl
  FOLDER/DATE-DEVICE-steps.jsonl
TEXT
}

minutes=9 dtypes=(bfloat16 float32) folder=docs/measurements/gpu device=cuda tests=0 whole_run=0
models=(--model Qwen2.5-1.5B --model Qwen2.5-7B) of_layers=()
while (($#)); do
  case "$1" in
    --minutes) minutes=${2:?} && shift ;;
    --dtype) dtypes=("${2:?}") && shift ;;
    --out) folder=${2:?} && shift ;;
    --tests) tests=1 ;;
    --run) whole_run=1 ;;
    --rehearse) device=cpu models=(--model d512) of_layers=(--lengths 64-256 --rounds 1) ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
  esac
  shift
done

[[ $minutes =~ ^[1-9][0-9]*$ ]] || { echo "gpu_check: --minutes $minutes: give a whole number of at least 1" >&2 && exit 2; }
[[ ${dtypes[0]} =~ ^(bfloat16|float32)$ ]] || { echo "gpu_check: --dtype ${dtypes[0]}: bfloat16 or float32" >&2 && exit 2; }

name=$(python - "$device" <<'PYTHON'
import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit("gpu_check: PyTorch is missing: pip install torch")
import torch

if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("gpu_check: PyTorch sees no GPU; nothing was measured (--rehearse takes a CPU)")
print(torch.cuda.get_device_name().replace(" ", "-") if sys.argv[1] == "cuda" else "CPU")
PYTHON
)
if ((whole_run)); then
  assets=build/gpu_check/$device program=(python -m)
  run=(+task=countdown_lag method=vcpo async.lag=8 data.train_batch_size=16 trainer.total_training_steps=20)
  if [[ $device == cpu ]]; then run+=(hardware=cpu); else
    run+=(hardware=gpu trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.3)
    if (($(python -c 'import torch; print(torch.cuda.device_count())') == 1)); then
      program=(python -m tests.kit.one_gpu -m) run+=(+ray_kwargs.ray_init.num_gpus=2)
    fi
  fi
  python -m scripts.prepare_data countdown --out "$assets/data"
  python -m recipe.warm_start.train --data "$assets/data" --out "$assets/model" --steps 300
  exec timeout --signal=TERM "$((minutes * 60))" "${program[@]}" recipe.fully_async_policy.main "${run[@]}" \
    actor_rollout_ref.model.path="$assets/model" data.train_files="$assets/data/train.parquet" \
    data.val_files="$assets/data/val.parquet" run_dir=outputs/gpu_check
fi

mkdir -p "$folder"
out="$folder/$(date +%F)-$name" end=$((SECONDS + minutes * 60)) worst=0

# part KIND COMMAND...: measures within the time that is left. Rows are added to those that an earlier call has measured.
part() {
  local left=$((end - SECONDS)) code=0
  local rows="$out-$1.jsonl"
  if ((left <= 0)); then
    echo "gpu_check: not begun, --minutes $minutes are over: ${*:2}" >&2
    worst=1
    return
  fi
  timeout --signal=TERM "$left" "${@:2}" --out "$rows" || code=$?
  if ((code)); then
    echo "gpu_check: exit code $code (124: the time was over): ${*:2}" >&2
    worst=1
  fi
}

if ((tests)) && [[ $device == cuda ]]; then
  # Transformer Engine's attention adds in any order otherwise, and the tests compare bits.
  VCPO_TEST_ON_GPU=1 NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 timeout --signal=TERM $((minutes * 60)) \
    python -m pytest -q -p no:cacheprovider --disable-warnings tests/gpu_rehearsal || worst=1
fi
for dtype in "${dtypes[@]}"; do
  part layers python -m lab.cost.layers --device "$device" --dtype "$dtype" "${models[@]}" "${of_layers[@]}"
done
part steps python -m lab.cost.steps --smallest --rounds 1 # does the whole stack run at all?
if [[ $device == cpu ]]; then part steps python -m lab.cost.steps --smallest --rounds 1 --layers te; fi
if [[ $device == cuda ]]; then
  for dtype in "${dtypes[@]}"; do part steps python -m lab.cost.steps --dtype "$dtype"; done
fi
for kind in layers steps; do
  if [[ -s $out-$kind.jsonl ]]; then echo "written: $out-$kind.jsonl, $(wc -l < "$out-$kind.jsonl") rows"; fi
done
exit "$worst"
