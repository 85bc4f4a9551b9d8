#!/usr/bin/env bash
# A tied weight that is loaded with assign=True is updated twice a step.
#
# guess: load_state_dict(assign=True) keeps the tie of embedding and head, or breaks it into two tensors that
#   drift apart.
# behaviour: Neither: the two names of the file become two parameters over one storage. The values stay equal,
#   so comparing them finds nothing, but the optimizer has both and applies AdamW, its decay included, twice to
#   the same numbers; each holds only the gradient of its own use.
# versions: torch 2.13.0 (2.15.0 alike); Python 3.11, on a CPU
# seen (2026-11-28):
#   copied: 1 parameter, one storage: True, weight 1.0 after a step of lr 0.1 and decay 1 is 0.8
#   assigned: 2 parameters, one storage: True, weight 1.0 after a step of lr 0.1 and decay 1 is 0.62
# consequence: The usual way to fill a model made on the meta device trains its largest matrix at twice the
#   rate, without a message; counts of parameters and gradient norms are wrong as well.
# automoe: loads by copying into the parameters of one owner (tests/mesh/test_mesh_float64.py, the mappings
#   named qwen3-tied).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import io

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 1)
        self.head = nn.Linear(1, 2, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


saved = Tied()
nn.init.ones_(saved.embed.weight)
file = io.BytesIO()
torch.save(saved.state_dict(), file)

found = []
for assign in (False, True):
    file.seek(0)
    model = Tied()
    model.load_state_dict(torch.load(file), assign=assign)
    parameters = list(model.parameters())
    one_storage = model.embed.weight.data_ptr() == model.head.weight.data_ptr()
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=1.0)
    model(torch.arange(2)).sum().backward()  # every gradient is positive: AdamW's first step is lr
    optimizer.step()
    after = round(model.embed.weight[0].item(), 3)
    found.append((len(parameters), one_storage, after))
    count = f"{len(parameters)} parameter" + "s" * (len(parameters) > 1)
    print(f"{'assigned' if assign else 'copied'}: {count}, one storage: {one_storage}, "
          f"weight 1.0 after a step of lr 0.1 and decay 1 is {after}")
assert found == [(1, True, 0.8), (2, True, 0.62)]
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
