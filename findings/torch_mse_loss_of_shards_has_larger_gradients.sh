#!/usr/bin/env bash
# The gradient of mse_loss over a sharded DTensor is multiplied by the number of ranks.
#
# guess: mse_loss of a DTensor is the mean of the squares: its gradient does not depend on the shards, as
#   that of (a - b).square().mean() and of l1_loss.
# behaviour: The loss is right where ranks hold equal parts, and its gradient is the number of ranks times too
#   large; smooth_l1_loss, huber_loss and binary_cross_entropy do the same. Where parts are unequal
#   the loss is wrong too: the mean of the ranks' means.
# versions: torch 2.13.0; Python 3.11, gloo on a CPU
# seen (2026-11-29): the gradient over that of the whole tensor
#   square().mean()       2 ranks: 1.0    3 ranks: 1.0
#   l1_loss               2 ranks: 1.0    3 ranks: 1.0
#   mse_loss              2 ranks: 2.0    3 ranks: 3.0
#   smooth_l1_loss        2 ranks: 2.0    3 ranks: 3.0
#   huber_loss            2 ranks: 2.0    3 ranks: 3.0
#   binary_cross_entropy  2 ranks: 2.0    3 ranks: 3.0
#   mse_loss of 7 rows on 2 ranks: 0.1667, of the whole tensor 0.1429
# consequence: A head or a distillation loss on DTensors learns with a rate that grows with the mesh, and no
#   number that is logged shows it.
# automoe: does not meet it: a loss sees plain tensors of its rank and divides by counts of all ranks
#   (tests/mesh/test_mesh_sessions.py holds gradients equal on ten meshes).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

LOSSES = {
    "square().mean()": lambda x, y: (x - y).square().mean(),
    "l1_loss": F.l1_loss,
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_and_gradient(loss, x, y):
    x = x.detach().requires_grad_()
    value = whole(loss(x, y))
    value.backward()
    return value.item(), whole(x.grad)


def main(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks{ranks}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    parts = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (x, y)]
    for name, loss in LOSSES.items():
        value, gradient = loss_and_gradient(loss, x, y)
        sharded, theirs = loss_and_gradient(loss, *parts)
        ratio = (theirs / gradient)[gradient != 0].mean().item()
        assert abs(sharded - value) < 1e-6
        assert abs(ratio - (1 if name in ("square().mean()", "l1_loss") else ranks)) < 1e-4, (name, ratio)
        if rank == 0:
            print(f"{name:22}{ranks} ranks: {ratio:.1f}", flush=True)
    if ranks == 2:
        seven = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
        parts = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (seven, torch.zeros(7))]
        value, sharded = F.mse_loss(seven, torch.zeros(7)).item(), whole(F.mse_loss(*parts)).item()
        if rank == 0:
            print(f"mse_loss of 7 rows on 2 ranks: {sharded:.4f}, of the whole tensor {value:.4f}", flush=True)
        assert abs(sharded - value) > 0.01
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (2, 3):
        mp.spawn(main, args=(ranks, os.getcwd()), nprocs=ranks)
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
