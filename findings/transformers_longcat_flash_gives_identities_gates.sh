#!/usr/bin/env bash
# A quarter of transformers' LongCat-Flash are gates of its identity experts, which nothing reads.
#
# guess: experts that pass their token through have no weights: the class has the release's 560 B parameters.
# behaviour: Its stacked gate_up_proj has a row for each identity expert too, 741 B parameters in all; down_proj has
#   none. NaN in those rows changes no logit, also where identity experts are chosen.
# versions: transformers 5.24.0, torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-30):
#   741 B parameters, 180 B of them gates of identity experts
#   gates (8, 32, 32), down (4, 32, 16)
#   identity experts chosen: 48 times; logits with NaN as their gates: equal
# consequence: Memory, optimizer states, decay and parameter counts include them, and a checkpoint in the release's
#   layout, which has no such tensors, does not fit the class.
# automoe: identity experts have no weights; exports are compared with the class without those rows
#   (tests/hf/test_longcat_flash.py::test_files_have_experts_that_compute_alone_and_transformers_needs_gates_of_the_others).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0'
cat > check.py <<'PY'
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
published = AutoConfig.for_model("longcat_flash")  # its defaults are LongCat-Flash's numbers
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(published, dtype=torch.bfloat16)
total, unread = 0, 0
for name, weight in model.named_parameters():
    total += weight.numel()
    if name.endswith("mlp.experts.gate_up_proj"):
        unread += (weight.shape[0] - published.n_routed_experts) * weight[0].numel()
print(f"{total / 1e9:.0f} B parameters, {unread / 1e9:.0f} B of them gates of identity experts")

sizes = dict(
    vocab_size=64, hidden_size=32, num_layers=1, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    ffn_hidden_size=16, expert_ffn_hidden_size=16, n_routed_experts=4, zero_expert_num=4, moe_topk=4,
    q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8,
)
torch.manual_seed(0)
small = AutoModelForCausalLM.from_config(AutoConfig.for_model("longcat_flash", **sizes), dtype=torch.float32).eval()
tokens = torch.arange(64)[None]
router = small.model.layers[0].mlp.router
torch.nn.init.normal_(router.classifier.weight)
logits = small(tokens).logits
chosen = []
router.register_forward_hook(lambda module, args, out: chosen.append(out[1]))
rows = small.model.layers[0].mlp.experts.gate_up_proj
with torch.no_grad():
    rows[4:] = torch.nan
same = torch.equal(small(tokens).logits, logits)
print(f"gates {tuple(rows.shape)}, down {tuple(small.model.layers[0].mlp.experts.down_proj.shape)}")
print(f"identity experts chosen: {int((chosen[0] >= 4).sum())} times; logits with NaN as their gates: {'equal' if same else 'others'}")
assert (round(total / 1e9), round(unread / 1e9)) == (741, 180), (total, unread)
assert same and (chosen[0] >= 4).any() and len(rows) == 8
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
