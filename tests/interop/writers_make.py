"""Write small checkpoints with other programs, and keep the logits of their own readers. Needs no automoe.

python tests/interop/writers_make.py OUT TOKENS     # writes OUT/NAME and OUT/NAME.npy [1, TOKENS, vocabulary]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MLA = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
SOURCES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "llama": {},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "head_dim": 32, "decoder_sparse_step": 1},
    "deepseek_v3": EXPERTS | MLA | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
ZEROS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "channel"}
BLOCKS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [48, 80]}
# source -> schemes of llm-compressor, by name, or the weights of one
SCHEMES: dict[str, list[str | dict[str, Any]]] = {
    "qwen3_moe": ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4", "NVFP4"],
    "deepseek_v3": [ZEROS, BLOCKS, "FP8", "MXFP8"],
    "qwen3": ["NVFP4A16"],
}


def keep_logits(folder: Path, kept: Path, num_tokens: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).double().eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        np.save(kept.with_name(kept.name + ".npy"), model(torch.arange(1, num_tokens + 1)[None]).logits.numpy())


def decompress(folder: Path, out: Path) -> None:
    """Widen each module with compressed-tensors itself."""
    config = json.loads((folder / "config.json").read_text())
    stated = config.pop("quantization_config")
    [scheme] = QuantizationConfig.model_validate(stated).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format or stated["format"])
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        module, _, name = key.rpartition(".")
        modules.setdefault(module, {})[name] = tensor
    wide = {}
    for module, parts in modules.items():
        if "weight_scale" in parts:
            parts = {"weight": compressor.decompress(parts, scheme)["weight"]}
        wide |= {f"{module}.{name}": tensor.contiguous() for name, tensor in parts.items()}
    out.mkdir()
    save_file(wide, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))


def merge_experts(out: Path, architecture: str, source: Path) -> None:
    """Make a mixture of a dense model with mergekit."""
    lines = [f"base_model: {source}", "gate_mode: random", "dtype: bfloat16", f"architecture: {architecture}"]
    lines += ["experts_per_token: 2", "experts:"]
    lines += [f"  - {{source_model: {source}, positive_prompts: ['1']}}"] * 4
    recipe = out.with_name(out.name + ".yml")
    recipe.write_text("\n".join(lines))
    subprocess.run([sys.executable, "-m", "mergekit.scripts.moe", recipe, out], check=True)


def main() -> None:
    out, num_tokens = Path(sys.argv[1]), int(sys.argv[2])
    transformers.utils.logging.disable_progress_bar()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({str(i): i for i in range(96)}, unk_token="0"))
    )
    for name, sizes in SOURCES.items():
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(name, **COMMON | sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0, 0.08)
        model.save_pretrained(out / "sources" / name)
        tokenizer.save_pretrained(out / "sources" / name)
    for name, schemes in SCHEMES.items():
        for number, scheme in enumerate(schemes):
            model = AutoModelForCausalLM.from_pretrained(out / "sources" / name, dtype=torch.bfloat16)
            how: dict[str, Any] = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}
            if isinstance(scheme, str):
                how = {"scheme": scheme, "targets": "Linear"}
            plain = ["lm_head", "re:.*mlp.gate$"]
            oneshot(model=model, recipe=QuantizationModifier(ignore=plain, **how), pipeline="datafree")
            folder = out / f"llmcompressor-{name}-{scheme if isinstance(scheme, str) else number}"
            model.save_pretrained(folder, save_compressed=True)
            decompress(folder, out / "sources" / folder.name)
            keep_logits(out / "sources" / folder.name, folder, num_tokens)
    for architecture, name in (("qwen3", "qwen3"), ("mixtral", "llama")):
        merge_experts(out / f"mergekit-{architecture}", architecture, out / "sources" / name)
        keep_logits(out / f"mergekit-{architecture}", out / f"mergekit-{architecture}", num_tokens)
    for name in ("qwen3_moe", "deepseek_v3"):
        model = AutoModelForCausalLM.from_pretrained(out / "sources" / name, dtype=torch.bfloat16)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False))
        adapted.merge_and_unload().save_pretrained(out / f"peft-{name}")
        keep_logits(out / f"peft-{name}", out / f"peft-{name}", num_tokens)


if __name__ == "__main__":
    main()
