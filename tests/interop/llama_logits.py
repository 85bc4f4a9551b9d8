"""Load GGUF files with llama.cpp and keep their logits. Run by a Python that has llama-cpp-python.

python tests/interop/llama_logits.py TOKENS FOLDER...     # FOLDER/model.gguf to FOLDER/llama.npy [TOKENS, vocabulary]
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
import numpy as np


def logits(file: Path, num_tokens: int) -> np.ndarray:
    """Of the tokens 1, 2, ...; every number in float32, the cache too."""
    options = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
    if not model:
        raise ValueError(f"llama.cpp does not load {file}")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds the cache to 16 bits
    context = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(num_tokens, 0, 1)
    batch.n_tokens = num_tokens
    for place in range(num_tokens):
        batch.token[place], batch.pos[place] = place + 1, place
        batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, True
    if llama_cpp.llama_decode(context, batch):
        raise ValueError(f"llama.cpp does not run {file}")
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, n), (width,)) for n in range(num_tokens)]
    found = np.stack(rows).copy()
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return found


if __name__ == "__main__":
    number, *folders = sys.argv[1:]
    for folder in map(Path, folders):
        if (folder / "model.gguf").exists():
            try:
                np.save(folder / "llama.npy", logits(folder / "model.gguf", int(number)))
            except ValueError as error:
                (folder / "refused.txt").write_text(str(error))
