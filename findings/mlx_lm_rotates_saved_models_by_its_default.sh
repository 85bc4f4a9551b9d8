#!/usr/bin/env bash
# mlx-lm computes a Llama or Mixtral that transformers 5 saved with another rotary base, without a word.
#
# guess: none was written down before the first run; one expects that mlx-lm reads what transformers 5 saves, or says which
#   key it lacks, as it does for Qwen3-MoE.
# behaviour: transformers 5 writes rope_theta inside rope_parameters alone. Model files of mlx-lm look at the top level,
#   and those of Llama, Qwen2, Mixtral and OLMoE have a default there: 10,000 or 1,000,000, whatever the model has.
#   Qwen3 reads rope_parameters.
# versions: mlx-lm 0.32.2, mlx 0.32.4, transformers 5.24.0, torch 2.13.0; Python 3.11, on a CPU
# seen (2026-11-29):
#   the largest difference of logits over their largest, for a base of 500,000 (Qwen2 and Mixtral: 10,000)
#   llama      as saved 0.8, with rope_theta at the top 0.0
#   qwen2      as saved 0.8, with rope_theta at the top 0.0
#   mixtral    as saved 1.0, with rope_theta at the top 0.0
#   olmoe      as saved 0.5, with rope_theta at the top 0.0
#   qwen3      as saved 0.0, with rope_theta at the top 0.0
# consequence: A model with another base than the default that was finetuned and saved with transformers 5 is another
#   model there: what is converted, served and evaluated was not trained.
# automoe: exports state rope_theta at the top level too
#   (tests/interop/test_mlx_lm.py::test_an_export_has_the_same_logits_there).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0' 'mlx-lm==0.32.2' 'mlx==0.32.4' 'mlx-cpu==0.32.4'
cat > check.py <<'PY'
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model
from transformers import AutoConfig, AutoModelForCausalLM

mx.set_default_device(mx.cpu)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
common = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
)
families = dict(llama={}, qwen2={}, mixtral={}, olmoe=dict(num_experts=4, num_experts_per_tok=2), qwen3=dict(head_dim=16))
tokens = np.arange(24).reshape(2, 12) * 5 % 128


def off(folder, logits):
    model, _ = load_model(folder)
    theirs = np.array(model(mx.array(tokens)))
    return float(np.abs(theirs - logits).max() / np.abs(logits).max())


for family, sizes in families.items():
    torch.manual_seed(0)
    base = 1e4 if family in ("qwen2", "mixtral") else 5e5
    rope = dict(rope_type="default", rope_theta=base)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, rope_parameters=rope, **common, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
        logits = model(torch.tensor(tokens)).logits.numpy()
    folder = Path(family)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert "rope_theta" not in config and config["rope_parameters"]["rope_theta"] == base
    saved = off(folder, logits)
    (folder / "config.json").write_text(json.dumps(config | dict(rope_theta=base)))
    stated = off(folder, logits)
    print(f"{family:10} as saved {saved:.1f}, with rope_theta at the top {stated:.1f}")
    assert stated < 1e-4
    assert saved < 1e-4 if family == "qwen3" else saved > 0.1
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
