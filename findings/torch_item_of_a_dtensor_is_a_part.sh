#!/usr/bin/env bash
# float(tensor) and tensor.item() of a sharded DTensor's sum, norm or maximum give each rank the number of its own shard.
#
# guess: .item() of a sum or a norm of DTensors is the global number on every rank, or it raises.
# behaviour: a reduction over a sharded dim returns a DTensor that is not reduced yet (Partial). .item(), float() and
#   int() read what lies on the rank; tolist() raises, and bool(x.sum() > 10) reduces first, on the same tensor.
# versions: torch 2.13.0; Python 3.11, two gloo ranks on a CPU
# seen (2026-11-29):
#   of 0, 1, .. 7 over two ranks       rank 0    rank 1    all
#   sum().item()                          6.0      22.0   28.0
#   float(norm())                         3.7      11.2   11.8
#   max().item()                          3.0       7.0    7.0
#   mean().item()                         1.5       5.5    3.5
#   clip_grad_norm_(...).item()          11.8      11.8   11.8
#   sum().full_tensor().item()           28.0      28.0   28.0
#   bool(sum() > 10)                      1.0       1.0    1.0
# consequence: The norm of one weight, a loss or the largest logit in a log is a rank's own part, and a rule in Python on that
#   number (skip above a norm, stop at a NaN) acts on some ranks and not on others. The total norm of clip_grad_norm_ is
#   right, so that the difference is not seen where people look first.
# automoe: norms and counters are summed over ranks before anybody reads them
#   (tests/optim/test_grad_norm.py::test_every_mesh_has_the_norm_of_one_process).
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
from torch.distributed.tensor import Shard, distribute_tensor


def clipped(x):
    weight = torch.nn.Parameter(torch.zeros_like(x))
    weight.grad = x
    return torch.nn.utils.clip_grad_norm_([weight], 1e9)


READ = {
    "sum().item()": lambda x: x.sum().item(),
    "float(norm())": lambda x: float(x.norm()),
    "max().item()": lambda x: x.max().item(),
    "mean().item()": lambda x: x.mean().item(),
    "clip_grad_norm_(...).item()": lambda x: clipped(x).item(),
    "sum().full_tensor().item()": lambda x: (x.sum().full_tensor() if hasattr(x, "full_tensor") else x.sum()).item(),
    "bool(sum() > 10)": lambda x: float(bool(x.sum() > 10)),
}


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    plain = torch.arange(8.0)
    sharded = distribute_tensor(plain, init_device_mesh("cpu", (2,)), [Shard(0)])
    rows = [None, None]
    dist.all_gather_object(rows, [read(sharded) for read in READ.values()])
    if rank == 0:
        print(f"{'of 0, 1, .. 7 over two ranks':32} rank 0    rank 1    all")
        for name, first, second, right in zip(READ, *rows, (read(plain) for read in READ.values())):
            print(f"{name:32} {first:6.1f}    {second:6.1f} {right:6.1f}")
            own_part = name.startswith(("sum().item", "float", "max", "mean"))
            assert (abs(first - right) < 1e-5 and abs(second - right) < 1e-5) != own_part
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, (os.path.abspath("store"),), nprocs=2)
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
