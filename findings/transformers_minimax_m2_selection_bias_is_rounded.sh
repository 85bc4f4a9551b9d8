#!/usr/bin/env bash
# A bfloat16 load keeps DeepSeek-V3's selection biases in float32 and rounds MiniMax-M2's.
#
# guess: from_pretrained(dtype=bfloat16) keeps e_score_correction_bias in float32 in every family that has
#   one, since routing depends on small differences of it.
# behaviour: Each class lists what stays in float32. DeepSeek-V3 and GLM-4.5 list the bias; MiniMax-M2 and
#   LongCat-Flash do not: biases of 8.000 to 8.028 in the file are all 8 in the model.
# versions: transformers 5.24.0, torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-28):
#   deepseek_v3 float32: 8 different biases of 8
#   glm4_moe float32: 8 different biases of 8
#   minimax_m2 bfloat16: 1 different biases of 8
#   longcat_flash bfloat16: 1 different biases of 8
# consequence: A usual step of a bias is 0.001, and numbers from 0.25 on are coarser than that in bfloat16: the
#   loaded model routes by other biases than it was trained with, and saves them rounded.
# automoe: writes those of DeepSeek, GLM and MiniMax-M2 in float32
#   (tests/hf/test_hf_meshes.py::test_bfloat16_survives_float32_master_weights); docs/huggingface.md tells users
#   of MiniMax-M2 to load it in float32.
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
transformers.utils.logging.disable_progress_bar()
mla = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
common = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
families = {
    "deepseek_v3": mla | dict(
        intermediate_size=16, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=0,
    ),
    "glm4_moe": dict(
        intermediate_size=16, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=0, head_dim=8,
    ),
    "minimax_m2": dict(intermediate_size=16, num_local_experts=8, num_experts_per_tok=2, head_dim=8, rotary_dim=8),
    "longcat_flash": mla | dict(
        num_hidden_layers=2, ffn_hidden_size=16, expert_ffn_hidden_size=16, n_routed_experts=8, moe_topk=2, zero_expert_num=0,
    ),
}


def bias_of(model):
    state = dict(model.named_buffers()) | dict(model.named_parameters())
    return next(tensor for name, tensor in state.items() if name.endswith("e_score_correction_bias"))


found = {}
for family, sizes in families.items():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(common | sizes)), dtype=torch.float32)
    with torch.no_grad():
        bias_of(model).copy_(8 + 0.004 * torch.arange(8))
    model.save_pretrained(family)
    bias = bias_of(AutoModelForCausalLM.from_pretrained(family, dtype=torch.bfloat16))
    found[family] = (str(bias.dtype).removeprefix("torch."), bias.unique().numel())
    print(f"{family} {found[family][0]}: {found[family][1]} different biases of 8")
kept, rounded = ("float32", 8), ("bfloat16", 1)
assert found == dict(deepseek_v3=kept, glm4_moe=kept, minimax_m2=rounded, longcat_flash=rounded)
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
