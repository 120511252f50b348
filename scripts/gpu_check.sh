#!/usr/bin/env bash
# Checks and times the per-sequence gradient norms (vcpo/gradnorm) on a GPU, and writes the result under docs/measurements/.
# Needs PyTorch alone. It does not run the whole training step: scripts.bench.step_overhead does, on CPU so far.
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
out="docs/measurements/$(date +%F)-${device}-layers.jsonl"
for dtype in float32 bfloat16; do
    python -m scripts.bench.layer_overhead --device cuda --dtype "$dtype" --json \
        --model Qwen2.5-1.5B --model Qwen2.5-7B | tee /dev/stderr | tail -n 1 >> "$out.part"
done
mv "$out.part" "$out"
echo "written: $out"
