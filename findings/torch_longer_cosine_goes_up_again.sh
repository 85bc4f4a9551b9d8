#!/usr/bin/env bash
# A cosine schedule that is resumed with more steps climbs back to its peak.
#
# guess: CosineAnnealingLR(T_max=20) that loads the state of a finished T_max=10 goes on at half of the new
#   curve, or stays at its end, 0.
# behaviour: The state holds T_max too: loading replaces 20 by 10. The rate is computed from the one before,
#   and past T_max the curve comes back up: 0 to the full peak in 10 steps.
# versions: torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-28):
#   T_max after loading: 10 (was 20)
#   rates of steps 11 to 20: 0.024 0.095 0.206 0.345 0.5 0.655 0.794 0.905 0.976 1.0
#   a schedule of 20 steps: 0.422 0.345 0.273 0.206 0.146 0.095 0.054 0.024 0.006 0.0
# consequence: 'Train it a little longer' begins with a second warm-up to the highest rate, which destroys
#   what the decay had won; schedules that are a LambdaLR (transformers') take the new length instead.
# automoe: computes the rate from the step and the configuration; a resume names settings that changed
#   (tests/checkpoint/test_resume.py::test_settings_that_change_the_numbers_are_said).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR


def made(steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, CosineAnnealingLR(optimizer, T_max=steps)


def rates(optimizer, schedule, steps):
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append(round(optimizer.param_groups[0]["lr"], 3))
    return found


optimizer, schedule = made(10)
assert rates(optimizer, schedule, 10)[-1] == 0
longer, resumed = made(20)
longer.load_state_dict(optimizer.state_dict())
resumed.load_state_dict(schedule.state_dict())
print(f"T_max after loading: {resumed.T_max} (was 20)")
second = rates(longer, resumed, 10)
whole = rates(*made(20), 20)[10:]
print("rates of steps 11 to 20:", *second)
print("a schedule of 20 steps:", *whole)
assert resumed.T_max == 10 and second == sorted(second) and second[-1] == 1.0 and whole[-1] == 0
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
