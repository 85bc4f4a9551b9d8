#!/usr/bin/env bash
# Two reads of a name from one open safetensors file are one tensor: what is done to the first in place stands in the second.
#
# guess: get_tensor of safe_open reads the file, so each call gives the numbers that are in the file.
# behaviour: for torch the file is mapped once, privately, and every get_tensor and get_slice is a view of that mapping.
#   In-place operations change the pages that later reads see; the file does not change, and another safe_open, numpy
#   arrays and load_file (which opens anew) give the file's numbers.
# versions: safetensors 0.8.0, torch 2.13.0
# seen (2026-11-29): of a file that holds ones
#   read, then multiplied in place by 0.5         0.5
#   the same name read again                      0.5
#   its first rows by get_slice                   0.5
#   the same name by another safe_open            1.0
#   numpy, read again after the same              1.0
#   load_file                                     1.0
# consequence: Scripts that merge, rescale or upcycle checkpoints with mul_, add_ or clamp_ on what they read, and read a
#   tensor for several outputs (copies of an expert, tied embeddings), get factors twice, without an error.
# automoe: reads the bytes of checkpoints into tensors of its own (automoe/hf/read.py), never into a mapping of the file.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'safetensors==0.8.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

save_file({"weight": torch.ones(4, 4)}, "model.safetensors")
seen = {}
with safe_open("model.safetensors", framework="pt") as file, safe_open("model.safetensors", framework="pt") as other:
    seen["read, then multiplied in place by 0.5"] = file.get_tensor("weight").mul_(0.5)
    seen["the same name read again"] = file.get_tensor("weight")
    seen["its first rows by get_slice"] = file.get_slice("weight")[:2]
    seen["the same name by another safe_open"] = other.get_tensor("weight")
with safe_open("model.safetensors", framework="numpy") as file:
    first = file.get_tensor("weight")
    first *= 0.5
    seen["numpy, read again after the same"] = file.get_tensor("weight")
seen["load_file"] = load_file("model.safetensors")["weight"]
for name, value in seen.items():
    print(f"{name:44} {float(value.max()):.1f}")
assert [float(value.max()) for value in seen.values()] == [0.5, 0.5, 0.5, 1.0, 1.0, 1.0]
PY
venv/bin/python -W ignore check.py
