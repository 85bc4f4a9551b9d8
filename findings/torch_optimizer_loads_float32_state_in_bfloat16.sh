#!/usr/bin/env bash
# Loading an optimizer rounds the float32 state of bfloat16 weights to bfloat16, and leaves it so.
#
# guess: an optimizer that keeps float32 moments or master weights for bfloat16 weights loads what it saved.
# behaviour: Optimizer.load_state_dict casts every floating-point tensor of the state, but one named step, to the dtype
#   of its parameter. Moments of transformers' Adafactor are float32 before, bfloat16 after; a float32 master weight
#   that a subclass keeps in its state comes back on bfloat16's grid, and from then on small updates are lost.
# versions: torch 2.13.0 (2.15.0 is the same), transformers 5.24.0; Python 3.11, on a CPU
# seen (2026-11-30): updates of 0.0001, a hundred before and a hundred after loading
#   never stopped: weight 0.98, state torch.float32
#   resumed:       weight 0.9883, state torch.bfloat16
#   Adafactor: exp_avg_sq_row torch.float32, loaded torch.bfloat16; exp_avg_sq_col torch.float32, loaded torch.bfloat16
# consequence: The first run is right and each resumed one trains with the precision that master weights were to avoid:
#   weights stand still and moments lose three digits, with the same loss on the first step.
# automoe: keeps master weights and moments in float32 and loads them through torch.distributed.checkpoint, in place
#   (tests/checkpoint/test_resume.py::test_same_mesh_to_the_bit).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0'
cat > check.py <<'PY'
import copy

import torch
import transformers
from transformers import Adafactor

transformers.logging.set_verbosity_error()


class MasterSGD(torch.optim.Optimizer):
    """Plain steps on a float32 copy of each weight."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.float()
                state["master"] -= group["lr"] * p.grad.to(state["master"].dtype)
                p.copy_(state["master"])


def hundred_steps(p, optimizer):
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()


p = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
optimizer = MasterSGD([p], 1e-4)
hundred_steps(p, optimizer)
weights, saved = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
hundred_steps(p, optimizer)
never_stopped = optimizer.state[p]["master"]
q = torch.nn.Parameter(weights)
resumed = MasterSGD([q], 1e-4)
resumed.load_state_dict(saved)
hundred_steps(q, resumed)
after = resumed.state[q]["master"]
print(f"never stopped: weight {never_stopped.item():.4g}, state {never_stopped.dtype}")
print(f"resumed:       weight {after.item():.4g}, state {after.dtype}")
assert saved["state"][0]["master"].dtype == torch.float32 and after.dtype == torch.bfloat16
assert abs(never_stopped.item() - 0.98) < 1e-5 and after.item() > 0.985

w = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
w.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
settings = dict(lr=1e-3, scale_parameter=False, relative_step=False)
before, loaded = Adafactor([w], **settings), Adafactor([w], **settings)
before.step()
loaded.load_state_dict(before.state_dict())
names = ("exp_avg_sq_row", "exp_avg_sq_col")
kinds = [(before.state[w][name].dtype, loaded.state[w][name].dtype) for name in names]
print("Adafactor: " + "; ".join(f"{name} {a}, loaded {b}" for name, (a, b) in zip(names, kinds)))
assert kinds == [(torch.float32, torch.bfloat16)] * 2
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
