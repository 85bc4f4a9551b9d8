#!/usr/bin/env bash
# torch's counter of floating point operations does not see grouped products.
#
# guess: FlopCounterMode counts every matrix product, so also the one that computes all experts of a layer.
# behaviour: F.grouped_mm is not in its table: zero operations, forward and backward, without a message. The
#   same product as bmm is counted.
# versions: torch 2.13.0 (2.15.0 alike); Python 3.11, on a CPU
# seen (2026-11-28):
#   bmm: 65536 forward, 196608 with its backward pass
#   grouped_mm: 0 forward, 0 with its backward pass
# consequence: Experts hold most operations of a MoE, and MFU from this counter leaves them out: a layer of
#   128 experts counts as attention and router.
# automoe: counts from shapes; where a test compares with this counter, experts are a loop
#   (tests/planner/test_params_and_flops.py::test_flops_of_what_is_trained_are_those_that_torch_counts).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

tokens, hidden, width, experts = 64, 32, 16, 4
x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
w = torch.randn(experts, hidden, width, dtype=torch.bfloat16)
ends = torch.arange(1, experts + 1, dtype=torch.int32) * (tokens // experts)


def bmm(x, w):
    return torch.bmm(x.view(experts, -1, hidden), w).view(tokens, width)


def grouped_mm(x, w):
    return F.grouped_mm(x, w, offs=ends)


assert torch.allclose(bmm(x, w), grouped_mm(x, w), atol=0.1, rtol=0.02)
found = {}
for product in (bmm, grouped_mm):
    with FlopCounterMode(display=False) as forward:
        product(x, w)
    with FlopCounterMode(display=False) as both:
        product(x.clone().requires_grad_(), w.clone().requires_grad_()).pow(2).sum().backward()
    found[product.__name__] = (forward.get_total_flops(), both.get_total_flops())
    print(f"{product.__name__}: {found[product.__name__][0]} forward, {found[product.__name__][1]} with its backward pass")
once = 2 * tokens * hidden * width
assert found == {"bmm": (once, 3 * once), "grouped_mm": (0, 0)}
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
