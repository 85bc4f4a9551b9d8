#!/usr/bin/env bash
# Inside one autocast block every forward pass computes with the weights of the first.
#
# guess: autocast casts a weight each time it is used, or notices that the optimizer changed it; a block around the
#   whole loop is no more than untidy.
# behaviour: the bfloat16 copy of a weight is kept until the outermost block ends. Gradients, updates and the stored
#   float32 weights go on, and each forward pass in the block takes the copy of the first. cache_enabled=False, or a
#   block around the forward pass alone, is right.
# versions: torch 2.13.0 (2.15.0 is the same); Python 3.11, on a CPU
# seen (2026-11-30): losses of six steps
#   block around the loop           0.329 0.329 0.329 0.329 0.329 0.329, weights moved by 1.96
#   the same, cache_enabled=False   0.329 0.233 0.170 0.128 0.097 0.076, weights moved by 1.26
#   block around the forward pass   0.329 0.233 0.170 0.128 0.097 0.076, weights moved by 1.26
# consequence: With new data in every step the flat loss looks like a hard task. The optimizer adds up gradients of one
#   and the same point, and the saved weights are not those that were computed with.
# automoe: uses no autocast; FSDP casts the weights anew in every pass.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import contextlib

import torch

x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


def train(around_loop, around_forward):
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 16, bias=False)
    first = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    losses = []
    with around_loop():
        for _ in range(6):
            with around_forward():
                loss = layer(x).float().pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, (layer.weight - first).norm().item()


def cast(**options):
    return lambda: torch.autocast("cpu", torch.bfloat16, **options)


plain = contextlib.nullcontext
ways = {
    "block around the loop": (cast(), plain),
    "the same, cache_enabled=False": (cast(cache_enabled=False), plain),
    "block around the forward pass": (plain, cast()),
}
results = {}
for name, way in ways.items():
    losses, moved = results[name] = train(*way)
    print(f"{name:30}  {' '.join(f'{loss:.3f}' for loss in losses)}, weights moved by {moved:.2f}")
stale, fresh, usual = results.values()
assert len(set(stale[0])) == 1 and stale[1] > 0.1
assert usual[0][-1] < 0.8 * usual[0][0] and fresh == usual
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
