#!/usr/bin/env bash
# A scheduler's state does not hold the learning rate: with a new optimizer a cosine goes on at twice its rate.
#
# guess: scheduler.load_state_dict brings the schedule back to its step, so the next rates are those of a run that never
#   stopped, whether or not the optimizer's state is loaded too.
# behaviour: the state has the step and the last rate, and loading changes no group of the optimizer. CosineAnnealingLR,
#   LinearLR, StepLR and SequentialLR multiply the rate that the optimizer has, so they keep the wrong factor to the end
#   of the run. LambdaLR and OneCycleLR compute each rate from the step: only their first step is wrong.
# versions: torch 2.13.0 (2.15.0 is the same); Python 3.11, on a CPU
# seen (2026-11-30): rates of the steps 50, 51, 60 and 90 of 100, uninterrupted, and with the scheduler's state of step 50
#   CosineAnnealingLR   0.500 0.484 0.345 0.024   resumed: 1.000 0.969 0.691 0.049
#   LinearLR            0.500 0.490 0.400 0.100   resumed: 1.000 0.980 0.800 0.200
#   StepLR              0.100 0.100 0.010 0.001   resumed: 1.000 1.000 0.100 0.010
#   SequentialLR        0.587 0.570 0.413 0.030   resumed: 0.100 0.097 0.070 0.005
#   LambdaLR            0.500 0.490 0.400 0.100   resumed: 1.000 0.490 0.400 0.100
#   OneCycleLR          0.794 0.775 0.589 0.040   resumed: 0.040 0.775 0.589 0.040
# consequence: Who drops the moments (another optimizer, a smaller checkpoint, new parameters) and keeps the schedule
#   trains the rest of the run at two or ten times the rate, or with a warm-up before the cosine at a sixth, while
#   last_epoch is right.
# automoe: computes a step's rate from the configuration and the step alone and writes it into every group before each
#   step (tests/optim/test_schedule.py::test_every_step_has_a_rate_and_the_decay_never_climbs).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import copy

import torch
from torch.optim import lr_scheduler as S

makers = {
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 100),
    "LinearLR": lambda o: S.LinearLR(o, 1.0, 0.0, 100),
    "StepLR": lambda o: S.StepLR(o, 30, 0.1),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1.0, 10), S.CosineAnnealingLR(o, 90)], [10]),
    "LambdaLR": lambda o: S.LambdaLR(o, lambda step: 1 - step / 100),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 1.0, 100),
}


def rates(make, first, state=None):
    """The rates of the steps from ``first`` to 99, and the scheduler's state before step 50."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    if state:
        scheduler.load_state_dict(state)
    seen = []
    for step in range(first, 100):
        if step == 50:
            state = copy.deepcopy(scheduler.state_dict())
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen, state


for name, make in makers.items():
    whole, state = rates(make, 0)
    resumed, _ = rates(make, 50, state)
    shown = [" ".join(f"{run[at]:.3f}" for at in (0, 1, 10, 40)) for run in (whole[50:], resumed)]
    print(f"{name:18}  {shown[0]}   resumed: {shown[1]}")
    off = [abs(a - b) > 1e-6 for a, b in zip(whole[50:], resumed)]
    assert off[0] and all(off[1:45]) == any(off[1:]) == (name not in ("LambdaLR", "OneCycleLR"))
    if name == "CosineAnnealingLR":
        assert abs(resumed[40] / whole[90] - 2) < 1e-6
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
