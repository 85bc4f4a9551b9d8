"""Load checkpoints with mlx-lm, keep their logits and save them again. Run by mlx-lm's own Python, which has neither torch nor automoe.

python tests/interop/mlx_logits.py TOKENS FOLDER...     # writes FOLDER/mlx.npy [1, TOKENS, vocabulary] and FOLDER/mlx
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model, save_config, save_model

if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    num_tokens, *folders = sys.argv[1:]
    for folder in map(Path, folders):
        model, config = load_model(folder)
        logits = model(mx.arange(1, int(num_tokens) + 1)[None])
        np.save(folder / "mlx.npy", np.array(logits.astype(mx.float32)))
        save_model(folder / "mlx", model)
        save_config(config, folder / "mlx" / "config.json")
