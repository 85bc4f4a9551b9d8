#!/usr/bin/env bash
# transformers' balance loss is least for a model whose every layer sends all of its tokens to one expert, another in each.
#
# guess: the loss of a model is a mean over its layers' losses, so four layers that use one expert each have the largest
#   value, 4 for 4 experts.
# behaviour: router logits of all layers are put one after another before experts are counted, so the loss sees the mean
#   load over layers. Loads that are opposite in two layers cancel; the gradient is zero too.
# versions: transformers 5.24.0, torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-29):
#   one layer, all tokens to one expert: loss 4.00, of an even layer 1.00
#   four layers, all tokens to one expert, another in each: loss 1.00, largest gradient 0.0e+00; mean of the layers 4.00
# consequence: Mixtral, Qwen-MoE, OLMoE and the other classes that share the function can be trained with collapsed layers
#   while the logged aux_loss says that the load is even; capacity and expert parallelism pay for it layer by layer.
# automoe: every layer has its own loss, in classes of transformers too
#   (tests/mesh/test_class_tier.py::test_balance_losses_take_the_router_logits_of_the_class).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0'
cat > check.py <<'PY'
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func as of_qwen3

EXPERTS, TOKENS = 4, 100


def to_one(expert, size=4.0):
    logits = torch.full((TOKENS, EXPERTS), -size)
    logits[:, expert] = size
    return logits


def measure(layers, loss_of):
    layers = tuple(layer.clone().requires_grad_() for layer in layers)
    loss = loss_of(layers, EXPERTS, 1)
    loss.backward()
    return loss.item(), max(layer.grad.abs().max().item() for layer in layers)


for loss_of in (load_balancing_loss_func, of_qwen3):
    alone = [measure([to_one(expert)], loss_of)[0] for expert in range(EXPERTS)]
    even, _ = measure([torch.cat([to_one(expert)[: TOKENS // EXPERTS] for expert in range(EXPERTS)])], loss_of)
    loss, gradient = measure([to_one(expert) for expert in range(EXPERTS)], loss_of)
    print(f"one layer, all tokens to one expert: loss {alone[0]:.2f}, of an even layer {even:.2f}")
    print(
        f"four layers, all tokens to one expert, another in each: loss {loss:.2f}, largest gradient {gradient:.1e};"
        f" mean of the layers {sum(alone) / EXPERTS:.2f}"
    )
    assert min(alone) > 3.9 and abs(even - 1) < 1e-5 and abs(loss - 1) < 1e-5 and gradient < 1e-7
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
