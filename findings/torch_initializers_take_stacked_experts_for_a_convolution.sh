#!/usr/bin/env bash
# torch's initializers take stacked experts for a convolution and start them ten times too small.
#
# guess: xavier, kaiming and orthogonal initialization treat a weight [experts, out, in] as a stack of matrices, as
#   matmul, bmm and torch.linalg do.
# behaviour: they take the last dimension for the window of a convolution: the fan-in is out * in and not in, and
#   orthogonal_ makes the flattened experts orthogonal to one another, each with a norm of 1 in all. kaiming_uniform_
#   with a=sqrt(5) is what nn.Linear starts with.
# versions: torch 2.13.0 (2.15.0 is the same); Python 3.11, on a CPU
# seen (2026-11-30): standard deviation of 8 experts [256, 128], stacked and each alone
#   kaiming_uniform_ (a=sqrt(5))  0.0032 and 0.0510, 1/16.0
#   xavier_uniform_               0.0077 and 0.0722, 1/9.4
#   orthogonal_                   0.0055 and 0.0625, 1/11.3
# consequence: An expert multiplies three such matrices: its first outputs are a thousandth of what they should be, and
#   its gradients with them. Nothing fails; experts learn late while attention and the shared expert take over.
# automoe: draws every weight from a normal distribution of a given spread, whatever its number of dimensions
#   (tests/model/test_init.py::test_norms_start_at_one_and_matrices_at_the_given_spread).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import math

import torch
from torch.nn import init

torch.manual_seed(0)
ways = {
    "kaiming_uniform_ (a=sqrt(5))": lambda w: init.kaiming_uniform_(w, a=math.sqrt(5)),
    "xavier_uniform_": init.xavier_uniform_,
    "orthogonal_": init.orthogonal_,
}
ratios = []
for name, fill in ways.items():
    stacked = fill(torch.empty(8, 256, 128)).std().item()
    alone = torch.stack([fill(torch.empty(256, 128)) for _ in range(8)]).std().item()
    ratios.append(alone / stacked)
    print(f"{name:28}  {stacked:.4f} and {alone:.4f}, 1/{ratios[-1]:.1f}")
assert torch.allclose(torch.tensor(ratios), torch.tensor([16.0, 9.4, 11.3]), atol=0.1)
assert torch.nn.Linear(128, 256).weight.std().item() > 0.05
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
