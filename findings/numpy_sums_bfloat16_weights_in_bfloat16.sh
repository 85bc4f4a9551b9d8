#!/usr/bin/env bash
# numpy's sum, mean and count over a bfloat16 checkpoint stop at 256.
#
# guess: safetensors.numpy gives float32 for bfloat16 tensors, or numpy adds them as it adds float16: in
#   pairs, which keeps the error small.
# behaviour: It gives ml_dtypes' bfloat16 (once ml_dtypes is imported; without it loading raises), whose
#   reductions add one number after the other in bfloat16: 1,000 ones are 256, their mean is 0.256. float16 is
#   right, and so are a dot product and a norm of the same bfloat16 array.
# versions: safetensors 0.8.0, ml_dtypes 0.6.0, numpy 2.4.6, torch 2.13.0 (it writes the file); Python 3.11,
#   on a CPU
# seen (2026-11-28):
#   dtype bfloat16: sum 256.0, mean 0.255859375, dot 1000.0, norm 31.6
#   the same in float16: sum 1000; in torch's bfloat16: sum 1000
# consequence: Inspecting a checkpoint (mean of a router's row, share of tokens of an expert, checksums of
#   weights) is wrong by any factor, more so for larger tensors, without a message.
# automoe: reads tensors with torch and compares in float32 or wider; none of its code adds numpy's bfloat16.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'safetensors==0.8.0' 'ml_dtypes==0.6.0'
cat > check.py <<'PY'
import ml_dtypes  # noqa: F401  (gives numpy the type)
import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

save_file({"w": torch.ones(1000, dtype=torch.bfloat16)}, "one.safetensors")
w = load_file("one.safetensors")["w"]
print(f"dtype {w.dtype}: sum {w.sum()}, mean {w.mean()}, dot {w @ w}, norm {np.linalg.norm(w):.1f}")
in_float16 = w.astype(np.float16).sum()
in_torch = torch.ones(1000, dtype=torch.bfloat16).sum().item()
print(f"the same in float16: sum {in_float16:.0f}; in torch's bfloat16: sum {in_torch:.0f}")
assert (str(w.dtype), float(w.sum()), float(w @ w)) == ("bfloat16", 256.0, 1000.0)
assert abs(float(w.mean()) - 0.256) < 1e-3 and in_float16 == in_torch == 1000
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
