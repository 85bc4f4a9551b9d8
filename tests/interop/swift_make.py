"""Train a small model with ms-swift, whole and with LoRA, and keep the logits of its own readers. Needs no automoe.

python tests/interop/swift_make.py OUT TOKENS     # writes OUT/NAME and OUT/NAME.npy [1, TOKENS, vocabulary]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
OFFLINE = {"USE_HF": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def swift(*words: str | Path) -> None:
    program = [sys.executable, "-m", "swift.cli.main"]  # an environment that was moved has no scripts
    subprocess.run([*program, *words], check=True, env=os.environ | OFFLINE, stdout=subprocess.DEVNULL)


def save_source(folder: Path) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen3_moe", **SIZES), dtype=torch.bfloat16
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.08)
    model.save_pretrained(folder)
    marks = {"<|im_start|>": 93, "<|im_end|>": 94, "<|endoftext|>": 95}
    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(93)} | marks, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    whole.save_pretrained(folder)


def main() -> None:
    out, num_tokens = Path(sys.argv[1]), int(sys.argv[2])
    source = out / "sources" / "qwen3_moe"
    save_source(source)
    turns = [{"role": "user", "content": "1 2 3"}, {"role": "assistant", "content": "4 5 6"}]
    data = out / "sources" / "chats.jsonl"
    data.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    settings = (
        "--model_type qwen3_moe --template qwen3 --max_steps 2 --save_steps 2 --torch_dtype bfloat16 --use_cpu true"
    )
    settings += " --per_device_train_batch_size 1 --learning_rate 1e-2 --add_version false --report_to none"
    settings += " --split_dataset_ratio 0 --dataset_num_proc 1"
    for kind in ("full", "lora"):
        made = out / "sources" / kind
        options = ["--model", source, "--dataset", data, "--output_dir", made, "--tuner_type", kind]
        swift("sft", *options, *settings.split())
        (made / "checkpoint-2").rename(out / f"swift-{kind}")
    swift("export", "--adapters", out / "swift-lora", "--merge_lora", "true", "--output_dir", out / "swift-merged")
    for name in ("full", "lora", "merged"):
        base = source if name == "lora" else out / f"swift-{name}"
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        if name == "lora":
            model = PeftModel.from_pretrained(model, str(out / "swift-lora"))
        model = model.double().eval()
        model.set_experts_implementation("eager")
        with torch.no_grad():
            np.save(out / f"swift-{name}.npy", model(torch.arange(1, num_tokens + 1)[None]).logits.numpy())


if __name__ == "__main__":
    main()
