#!/usr/bin/env bash
# Under autocast a router that casts to float32 by hand computes in bfloat16.
#
# guess: DeepSeek-V3's router casts tokens and weight to float32 before its product, so bf16 training
#   (Trainer, accelerate, torch.autocast) has float32 scores.
# behaviour: Autocast acts on the product and casts both back: logits are bfloat16, of which a sigmoid near
#   0.5 has few values. Of 64 experts many tie and other ones are chosen. Ernie turns autocast off in its
#   router; DeepSeek-V3 and GLM-4.5 do not.
# versions: transformers 5.24.0, torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-28):
#   deepseek_v3: torch.float32 without autocast, torch.bfloat16 with it; other experts for 18.9% of tokens
#   glm4_moe: torch.float32 without autocast, torch.bfloat16 with it; other experts for 18.7% of tokens
#   ernie4_5_moe: torch.float32 without autocast, torch.float32 with it; other experts for 0.0% of tokens
# consequence: Mixed precision by autocast trains another router than the float32 cast in the source promises,
#   and than a model loaded in bfloat16 (whose cast does work) has at inference.
# automoe: uses no autocast: logits are float32 unless moe.router_dtype says otherwise
#   (tests/moe/test_jitter_and_ties.py::test_bfloat16_logits_are_an_option_and_scores_stay_in_float32).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0'
cat > check.py <<'PY'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

mla = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
common = dict(
    vocab_size=64, hidden_size=64, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=0, n_routed_experts=64,
    num_experts_per_tok=4, n_group=1, topk_group=1,
)
ernie = dict(moe_num_experts=64, moe_k=4, moe_layer_start_index=0)
for family, more in (("deepseek_v3", mla), ("glm4_moe", dict(head_dim=16)), ("ernie4_5_moe", ernie)):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(common | more)), dtype=torch.float32)
    router = next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))
    torch.nn.init.normal_(router.weight, std=0.02)
    tokens = torch.randn(4096, 64).bfloat16().float()  # what a layer in bfloat16 hands on
    router.weight.data = router.weight.data.bfloat16().float()  # no rounding but that of the product
    with torch.no_grad():
        logits, *_, chosen = router(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            other_logits, *_, other_chosen = router(tokens)
    moved = (chosen.sort(-1)[0] != other_chosen.sort(-1)[0]).any(-1).float().mean().item()
    print(f"{family}: {logits.dtype} without autocast, {other_logits.dtype} with it; other experts for {moved:.1%} of tokens")
    assert logits.dtype == torch.float32
    if family == "ernie4_5_moe":
        assert other_logits.dtype == torch.float32 and moved == 0
    else:
        assert other_logits.dtype == torch.bfloat16 and moved > 0.005
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
