#!/usr/bin/env bash
# A pipeline schedule divides the gradients of earlier calls once more.
#
# guess: Two calls of schedule.step before one step of the optimizer give the sum of two means: the second
#   call adds as much as the first.
# behaviour: With scale_grads=True, the default, each call divides whatever is in .grad by its number of
#   micro-batches when it ends, what earlier calls left there included. After n calls of m micro-batches the
#   first one counts m**(1-n).
# versions: torch 2.13.0 (2.15.0 alike); Python 3.11, on a CPU
# seen (2026-11-28):
#   ScheduleGPipe: gradient after 1, 2, 3 calls on one batch, over the first: 1.0, 1.25, 1.3125
#   Schedule1F1B: gradient after 1, 2, 3 calls on one batch, over the first: 1.0, 1.25, 1.3125
# consequence: Gradient accumulation around a pipeline trains almost on its last call alone (with the 4
#   micro-batches of this script calls count 1/16, 1/4 and 1), and the loss shows nothing.
# automoe: turns it off and scales by the step's tokens (automoe/parallel/pipeline.py;
#   tests/mesh/test_mesh_float64.py compares pipelines with one process).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for kind in (ScheduleGPipe, Schedule1F1B):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)
    stage = PipelineStage(layer, 0, 1, torch.device("cpu"))
    schedule = kind(stage, 4, loss_fn=lambda y, target: (y - target).square().mean())
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    gradients = []
    for _ in range(3):
        schedule.step(x, target=target, losses=[])
        gradients.append(layer.weight.grad.clone())
    whole = torch.autograd.grad((layer(x) - target).square().mean(), layer.weight)[0]
    assert torch.allclose(gradients[0], whole)  # one call is right
    ratios = [round((gradient / gradients[0]).mean().item(), 4) for gradient in gradients]
    print(f"{kind.__name__}: gradient after 1, 2, 3 calls on one batch, over the first: {', '.join(map(str, ratios))}")
    assert ratios == [1.0, 1.25, 1.3125]  # a sum would be 1, 2, 3
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
