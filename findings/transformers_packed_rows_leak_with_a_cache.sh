#!/usr/bin/env bash
# position_ids that start again separate documents only without a cache and without a mask.
#
# guess: A row of two documents whose position_ids start again computes each as if alone; whether keys are
#   cached changes no number.
# behaviour: Documents are separated only if attention_mask is None and there is no cache, and use_cache is on
#   by default, in training mode too. With a cache, or with a mask of ones, the second document attends to the
#   first. Gradient checkpointing separates them: it turns the cache off and says so, not what follows from it.
# versions: transformers 5.24.0, torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-28):
#   logits of the second document against the document alone (largest difference):
#   default 3.08, use_cache=False 0.00, use_cache=False with a mask of ones 3.08
#   train() 3.08, train() with gradient checkpointing 0.00
# consequence: A loop that packs rows trains across documents until somebody turns recomputation on, which
#   then changes the loss; evaluation with defaults disagrees with training.
# automoe: passes use_cache=False and no mask to a class of transformers, and tries before training whether it
#   keeps documents apart (tests/mesh/test_class_tier.py::test_documents_are_isolated_or_refused).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0'
cat > check.py <<'PY'
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2,
    initializer_range=0.1,
)
model = Qwen3MoeForCausalLM(config).eval()
tokens = torch.randint(0, 64, (1, 10))
positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
with torch.no_grad():
    alone = model(tokens[:, 4:]).logits


def apart(**arguments):
    logits = model(tokens, position_ids=positions, **arguments).logits
    return (logits[:, 4:] - alone).abs().max().item()


ones = torch.ones_like(tokens)
default, without, masked = apart(), apart(use_cache=False), apart(use_cache=False, attention_mask=ones)
model.train()
training = apart()
model.gradient_checkpointing_enable()
recomputed = apart()
print("logits of the second document against the document alone (largest difference):")
print(f"default {default:.2f}, use_cache=False {without:.2f}, use_cache=False with a mask of ones {masked:.2f}")
print(f"train() {training:.2f}, train() with gradient checkpointing {recomputed:.2f}")
assert max(without, recomputed) < 1e-4 and min(default, masked, training) > 0.05
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
