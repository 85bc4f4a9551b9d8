#!/usr/bin/env bash
# torch casts infinity to 448 in float8_e4m3fn, where numpy's type gives NaN.
#
# guess: E4M3 has no infinity, so whatever is out of range becomes NaN, as in ml_dtypes (numpy, JAX); or
#   finite numbers are clipped and infinity stays visible.
# behaviour: torch clips all to 448, infinity included. Its other types do not agree with that: float8_e5m2
#   keeps infinity and float8_e4m3fnuz makes NaN of any number out of range. ml_dtypes makes NaN from 465 on.
# versions: torch 2.13.0 (2.15.0 alike), ml_dtypes 0.6.0, numpy 2.4.6; Python 3.11, on a CPU
# seen (2026-11-28):
#   of [449.0, 465.0, 1000.0, inf]
#   torch float8_e4m3fn: [448.0, 448.0, 448.0, 448.0]
#   ml_dtypes float8_e4m3fn: [448.0, nan, nan, nan]
#   torch float8_e5m2: [448.0, 448.0, 1024.0, inf]
#   torch float8_e4m3fnuz: [nan, nan, nan, nan]
# consequence: An activation that overflowed passes an FP8 cast as an ordinary large number: no check of
#   finite values behind the cast sees it, and the same bytes made in JAX hold NaN.
# automoe: lets infinity be seen
#   (tests/quantize/test_fp8_formats.py::test_out_of_range_is_the_largest_code_but_infinity_is_seen).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
cat > check.py <<'PY'
import ml_dtypes
import numpy as np
import torch

numbers = [449.0, 465.0, 1000.0, float("inf")]
found = {
    "torch float8_e4m3fn": torch.tensor(numbers).to(torch.float8_e4m3fn).float().tolist(),
    "ml_dtypes float8_e4m3fn": np.array(numbers).astype(ml_dtypes.float8_e4m3fn).astype(float).tolist(),
    "torch float8_e5m2": torch.tensor(numbers).to(torch.float8_e5m2).float().tolist(),
    "torch float8_e4m3fnuz": torch.tensor(numbers).to(torch.float8_e4m3fnuz).float().tolist(),
}
print("of", numbers)
for name, values in found.items():
    print(f"{name}: {values}")
assert [str(values) for values in found.values()] == [
    "[448.0, 448.0, 448.0, 448.0]",
    "[448.0, nan, nan, nan]",
    "[448.0, 448.0, 1024.0, inf]",
    "[nan, nan, nan, nan]",
]
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
