#!/usr/bin/env bash
# Checks and times VCPO's packed update on a GPU, and writes the results under docs/measurements/:
#   ...-layers.jsonl  per-sequence gradient norms of single layers (vcpo/gradnorm); needs PyTorch alone
#   ...-steps.jsonl   whole steps of the Megatron actor; needs transformers and, of packages without kernels, what verl,
#                     Megatron-Core, mbridge and tensordict import. Skipped, with the name of what is missing, otherwise
#   bash scripts/gpu_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."

device=$(python - <<'PYTHON'
import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit("gpu_check: PyTorch is missing: pip install torch")
import torch

if not torch.cuda.is_available():
    sys.exit("gpu_check: PyTorch sees no GPU; nothing was measured")
print(torch.cuda.get_device_name().replace(" ", "-"))
PYTHON
)
mkdir -p docs/measurements
out="docs/measurements/$(date +%F)-${device}"

for dtype in float32 bfloat16; do
    python -m scripts.bench.layer_overhead --device cuda --dtype "$dtype" --json \
        --model Qwen2.5-1.5B --model Qwen2.5-7B | tee /dev/stderr | tail -n 1 >> "$out-layers.part"
done
mv "$out-layers.part" "$out-layers.jsonl"
echo "written: $out-layers.jsonl"

if ! missing=$(python -c "import scripts.bench.cost.step_worker" 2>&1); then
    echo "gpu_check: no whole steps: $(tail -n 1 <<< "$missing")" >&2
    exit 1
fi
python -m scripts.bench.step_overhead --json | tee /dev/stderr | tail -n 1 > "$out-steps.part"
mv "$out-steps.part" "$out-steps.jsonl"
echo "written: $out-steps.jsonl"
