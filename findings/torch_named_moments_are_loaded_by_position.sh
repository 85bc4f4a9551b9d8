#!/usr/bin/env bash
# An optimizer that was given names loads its moments by position.
#
# guess: An optimizer made of named_parameters() saves param_names, so loading matches moments to parameters
#   by name, or refuses another order.
# behaviour: The names are saved and then not looked at: moments go to the parameter at the same position, and
#   the names of the new optimizer are replaced by the saved ones, so that a check of names afterwards passes.
#   A note in the manual of load_state_dict says both; at run time nothing does.
# versions: torch 2.13.0 (2.15.0 alike); Python 3.11, on a CPU
# seen (2026-11-28):
#   saved: gate 0.1, up 0.5
#   loaded into an optimizer of (up, gate): gate 0.5, up 0.1; its names are now ['gate', 'up']
# consequence: Gate and up of an expert have one shape: a model whose modules were reordered, or a new
#   division into groups, resumes with exchanged moments and no error.
# automoe: keeps moments under the names of parameters
#   (tests/checkpoint/test_resume.py::test_to_another_mesh_and_back).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import torch
from torch import nn


def optimizer_of(names):
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in names}
    return parameters, torch.optim.AdamW(parameters.items(), lr=0.1)


def moments(parameters, optimizer):
    return {name: round(optimizer.state[parameters[name]]["exp_avg"][0].item(), 3) for name in ("gate", "up")}


parameters, optimizer = optimizer_of(["gate", "up"])
parameters["gate"].grad = torch.full((2,), 1.0)
parameters["up"].grad = torch.full((2,), 5.0)
optimizer.step()
saved = moments(parameters, optimizer)

others, resumed = optimizer_of(["up", "gate"])
resumed.load_state_dict(optimizer.state_dict())
loaded, names = moments(others, resumed), resumed.param_groups[0]["param_names"]
print(f"saved: gate {saved['gate']}, up {saved['up']}")
print(f"loaded into an optimizer of (up, gate): gate {loaded['gate']}, up {loaded['up']}; its names are now {names}")
assert saved == {"gate": 0.1, "up": 0.5} and loaded == {"gate": 0.5, "up": 0.1} and names == ["gate", "up"]
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
