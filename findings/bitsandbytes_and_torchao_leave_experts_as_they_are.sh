#!/usr/bin/env bash
# Four and eight bits for a MoE of transformers 5 leave its experts in bfloat16.
#
# guess: load_in_4bit=True (bitsandbytes) or quantize_ (torchao) shrinks a MoE to a quarter or a half, as it
#   does a dense model.
# behaviour: Both replace nn.Linear. Experts are stacked 3-D parameters now, so only attention is quantized;
#   nothing is said.
# versions: transformers 5.24.0, bitsandbytes 0.50.2, torchao 0.18.0, accelerate 1.15.0, torch 2.13.0; Python
#   3.11, on a CPU
# seen (2026-11-28):
#   bitsandbytes 4-bit: q_proj Params4bit, experts torch.bfloat16, 92% of the parameters
#   torchao int8: q_proj Int8Tensor, experts torch.bfloat16, 92% of the parameters
# consequence: QLoRA of a MoE of 30 billion parameters needs near 60 GB of weights, not 17: it runs out of
#   memory on the card that it was planned for.
# automoe: lora.base=nf4 and fp8 pack experts too
#   (tests/quantize/test_packed.py::test_experts_are_those_of_the_wide_weights_and_keep_bytes_alone).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0' 'accelerate==1.15.0' 'bitsandbytes==0.50.2' 'torchao==0.18.0'
cat > check.py <<'PY'
import torch
import transformers
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

transformers.utils.logging.disable_progress_bar()
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2,
)
Qwen3MoeForCausalLM(config).bfloat16().save_pretrained("moe")
models = {
    "bitsandbytes 4-bit": AutoModelForCausalLM.from_pretrained(
        "moe", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    ),
    "torchao int8": AutoModelForCausalLM.from_pretrained("moe", dtype=torch.bfloat16),
}
quantize_(models["torchao int8"], Int8WeightOnlyConfig())
for name, model in models.items():
    parameters = dict(model.named_parameters())
    q_proj = parameters["model.layers.0.self_attn.q_proj.weight"]
    kind = type(q_proj if type(q_proj.data) is torch.Tensor else q_proj.data).__name__
    experts = [tensor for key, tensor in parameters.items() if ".experts." in key]
    count = sum(tensor.numel() for tensor in experts)
    whole = sum(tensor.numel() for tensor in Qwen3MoeForCausalLM(config).parameters())
    print(f"{name}: q_proj {kind}, experts {experts[0].dtype}, "
          f"{count / whole:.0%} of the parameters")
    assert kind == {"bitsandbytes 4-bit": "Params4bit", "torchao int8": "Int8Tensor"}[name]
    assert all(tensor.dtype == torch.bfloat16 and type(tensor.data) is torch.Tensor for tensor in experts)
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
