#!/usr/bin/env bash
# AdamW's second moment in bfloat16 rises and never falls again.
#
# guess: With weights in bfloat16 small updates of weights are lost, and moments are a little rougher: a spike
#   fades from the second moment with a half-life of 693 steps, as beta2 = 0.999 says.
# behaviour: Moments have the dtype of their parameter. A step changes the second moment by a thousandth, and
#   half a unit of bfloat16 is at least two thousandths: every decay is rounded back, by the fused kernel too,
#   which computes in float32. The second moment is the largest that it ever was.
# versions: torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-29):
#   float32: second moment 10.0 after a gradient of 100, 1.0004 after 10,000 gradients of 1
#   bfloat16: second moment 10.0 after a gradient of 100, 10.0 after 10,000 gradients of 1
#   bfloat16, fused: second moment 10.0 after a gradient of 100, 10.0 after 10,000 gradients of 1
# consequence: One large gradient (the first steps, a bad batch) divides every later update of that weight by
#   three, for the rest of the run. No norm and no loss says why.
# automoe: keeps moments of bfloat16 weights in float32, or rounds them stochastically, so that they are right
#   in the mean (tests/optim/test_stochastic.py::test_narrow_moments_are_right_in_the_mean).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import torch


def second_moments(dtype, fused):
    weight = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.999), fused=fused)
    seen = []
    for gradient, steps in ((100.0, 1), (1.0, 10_000)):
        for _ in range(steps):
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
        seen.append(round(optimizer.state[weight]["exp_avg_sq"][0].item(), 4))
    return seen


for name, dtype, fused, last in (
    ("float32", torch.float32, False, 1.0004),
    ("bfloat16", torch.bfloat16, False, 10.0),
    ("bfloat16, fused", torch.bfloat16, True, 10.0),
):
    first, after = second_moments(dtype, fused)
    print(f"{name}: second moment {first} after a gradient of 100, {after} after 10,000 gradients of 1")
    assert first == 10.0 and abs(after - last) < 1e-4
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
