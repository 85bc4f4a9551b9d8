#!/usr/bin/env bash
# router_jitter_noise of Mixtral and MiniMax also multiplies what experts compute on.
#
# guess: router_jitter_noise is noise on the router's input, as the name and Switch Transformers say: it moves
#   choices, and experts see clean tokens.
# behaviour: The block multiplies its input in place before the router: router and experts get the same noisy
#   tokens.
# versions: transformers 5.24.0, torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-28):
#   mixtral with jitter 0.1: router's input within 0.100 of the block's, experts' input within 0.100
#   minimax with jitter 0.1: router's input within 0.100 of the block's, experts' input within 0.100
# consequence: Setting it is dropout-like noise on every expert's features, and a trained model differs from
#   one of a trainer that perturbs the router alone.
# automoe: moe.router_jitter is on the router's input alone
#   (tests/moe/test_jitter_and_ties.py::test_jitter_is_for_training_alone_and_may_move_a_choice); a config.json
#   with router_jitter_noise above 0 is refused.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0'
cat > check.py <<'PY'
import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM, MixtralConfig, MixtralForCausalLM

sizes = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1,
)
for name, config, kind in (
    ("mixtral", MixtralConfig, MixtralForCausalLM),
    ("minimax", MiniMaxConfig, MiniMaxForCausalLM),
):
    torch.manual_seed(0)
    model = kind(config(**sizes)).train()
    block = next(module for module in model.modules() if hasattr(module, "gate") and hasattr(module, "experts"))
    seen = {}

    def keep(key):
        return lambda _, inputs: seen.update({key: inputs[0].detach().reshape(-1, 64).clone()})

    block.register_forward_pre_hook(keep("block"))
    block.gate.register_forward_pre_hook(keep("router"))
    block.experts.register_forward_pre_hook(keep("experts"))
    model(torch.randint(0, 64, (1, 32)), use_cache=False)
    router, experts = ((seen[key] / seen["block"] - 1).abs().max().item() for key in ("router", "experts"))
    print(f"{name} with jitter 0.1: router's input within {router:.3f} of the block's, experts' input within {experts:.3f}")
    assert 0.09 < router < 0.101 and 0.09 < experts < 0.101
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
