#!/usr/bin/env bash
# A LoRA on stacked experts writes all experts anew for every token.
#
# guess: LoRA adds two thin products per expert that a token visits; the frozen weights are only read.
# behaviour: target_parameters makes a parametrization: in each forward pass B A of all experts is multiplied
#   out, scaled and added to a copy of the weight. That is three times the weights of all experts, whether 1 or
#   32 tokens come.
# versions: peft 0.21.2, transformers 5.24.0, torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-28):
#   64 experts of 12288 weights, one token that visits 2 of them
#   numbers written in tensors as large as the experts: 0 without LoRA, 2359296 with it (3.0 times all
#     experts); for 32 tokens 2359296
# consequence: Generating with an unmerged adapter moves gigabytes per layer and token, and a row of few
#   tokens costs as much as one of many: merge before serving, or use a trainer that multiplies tokens by A and
#   B.
# automoe: multiplies tokens by A and B
#   (tests/moe/test_expert_lora.py::test_output_and_gradients_are_those_of_merged_experts).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0' 'peft==0.21.2'
cat > check.py <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=64, num_experts_per_tok=2,
)
model = Qwen3MoeForCausalLM(config).eval()
down, both = 64 * 64 * 64, 3 * 64 * 64 * 64  # numbers in down_proj, and in it and gate_up_proj


class Written(TorchDispatchMode):
    """Count the numbers that operators write into tensors as large as a stack of experts."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, torch.Tensor) and result.numel() >= down and not function.is_view:
                self.count += result.numel()
        return results


def written(tokens):
    with torch.no_grad(), Written() as mode:
        model(torch.ones(1, tokens, dtype=torch.int64), use_cache=False)
    return mode.count


plain = written(1)
parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=parameters)).eval()
adapted, of_many = written(1), written(32)
print(f"64 experts of {both // 64} weights, one token that visits 2 of them")
print(f"numbers written in tensors as large as the experts: {plain} without LoRA, {adapted} with it "
      f"({adapted / both:.1f} times all experts); for 32 tokens {of_many}")
assert plain == 0 and adapted == of_many == 3 * both
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
