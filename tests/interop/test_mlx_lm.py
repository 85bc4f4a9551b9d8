"""Exports loaded by mlx-lm: what is written is read by others than ``transformers``.

mlx-lm takes ``config.json`` literally, where ``transformers`` fills in what is missing, and knows only the published
names of tensors. ``make test-mlx`` makes its environment and names its Python in ``MLX_PYTHON``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import automoe
from automoe.errors import CheckpointError
from automoe.hf.engines import IGNORED, ignored_keys
from tests.support.class_models import save_class
from tests.support.hf_models import save_small_hf
from tests.support.wrappers import save_wrapper

NUM_TOKENS = 30
# Sizes that mlx-lm computes as transformers does. Of one or two index heads, many keys score zero, and ties are broken
# otherwise; inner norms of GLM-4.7-Flash have an epsilon of 1e-6 there, and config.json's here.
CASES: dict[str, dict[str, Any]] = {
    "dsv3_groups_yarn": {},
    "kimi": {"moe_intermediate_size": 32},
    "dsv32": {"index_n_heads": 8},
    "dsv32_odd": {"index_n_heads": 8},
    "glm_moe_dsa": {"index_n_heads": 8},
    "glm4_moe_odd": {},
    "glm4_moe_lite": {"rms_norm_eps": 1e-6},
    "gpt_oss": {"intermediate_size": 32},
    "llama_odd": {},
    "minimax_m2": {},
    "mixtral_odd": {},
    "olmoe": {},
    "qwen2_moe": {},
    "qwen3_moe_tied": {},
    "qwen3_next": {},
    "qwen3_tied": {},
}
ENCODINGS = {"gpt_oss": "mxfp4", "kimi": "int4"}  # mlx-lm reads GPT-OSS in MXFP4 alone
WRAPPERS = ("qwen3_5_moe",)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
# A key in the table of ``automoe.hf.engines``, and a model that states something else there.
IGNORED_KEYS = {"rope.scaling": ("qwen3_moe", {"rope_scaling": YARN})}
CLASSES = ("lfm2_moe",)  # run from their transformers class
# Of folders that mlx-lm saves these are read, and the others are refused by name.
READ = ("glm4_moe_odd", "llama_odd", "minimax_m2", "mixtral_odd", "olmoe", "qwen2_moe", "qwen3_moe_tied", "qwen3_tied")

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def saved() -> dict[str, Path]:
    """Folders that mlx-lm saved, by case; ``exports`` fills it."""
    return {}


@pytest.fixture(scope="module")
def exports(
    tmp_path_factory: pytest.TempPathFactory, saved: dict[str, Path]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of each case our logits and those of mlx-lm, both of the exported folder's weights."""
    folders = {name: tmp_path_factory.mktemp(name) for name in (*CASES, *WRAPPERS, *CLASSES, *IGNORED_KEYS)}
    ours = {}
    for name, folder in folders.items():
        if name in WRAPPERS:
            save_wrapper(name, folder / "source", num_hidden_layers=4, layer_types=None)
        elif name in CLASSES:
            save_class(name, folder / "source")
        else:
            small, sizes = IGNORED_KEYS.get(name) or (name, CASES[name])
            save_small_hf(small, folder / "source", other_sizes=sizes)
        model = automoe.from_hf(folder / "source").eval()
        automoe.to_hf(model, folder / "out", encoding=ENCODINGS.get(name, "plain"))
        noted = any(line.startswith("mlx-lm") for line in ignored_keys(folder / "out"))
        assert noted == (name in IGNORED_KEYS)
        if name in ENCODINGS:  # codes are of other numbers
            model = automoe.from_hf(folder / "out").eval()
        with torch.no_grad():
            ours[name] = model(torch.arange(1, NUM_TOKENS + 1)[None]).float().numpy()
    script = Path(__file__).with_name("mlx_logits.py")
    written = [str(folder / "out") for folder in folders.values()]
    subprocess.run([os.environ["MLX_PYTHON"], script, str(NUM_TOKENS), *written], check=True)
    saved |= {name: folder / "out" / "mlx" for name, folder in folders.items()}
    return {name: (ours[name], np.load(folder / "out" / "mlx.npy")) for name, folder in folders.items()}


@pytest.mark.parametrize("name", [*CASES, *WRAPPERS, *CLASSES])
def test_an_export_has_the_same_logits_there(exports: dict[str, tuple[np.ndarray, np.ndarray]], name: str) -> None:
    ours, theirs = exports[name]
    assert theirs.shape == ours.shape
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(ours).max()


@pytest.mark.parametrize("name", [*CASES, *WRAPPERS])
def test_a_folder_that_it_saves_is_read_or_named(
    exports: dict[str, tuple[np.ndarray, np.ndarray]], saved: dict[str, Path], name: str
) -> None:
    if name not in READ:
        with pytest.raises(CheckpointError, match="mlx-lm"):
            automoe.from_hf(saved[name])
        return
    with torch.no_grad():
        again = automoe.from_hf(saved[name])(torch.arange(1, NUM_TOKENS + 1)[None]).float().numpy()
    assert np.abs(again - exports[name][1]).max() < 1e-5 * np.abs(again).max()


@pytest.mark.parametrize("key", IGNORED_KEYS)
def test_what_the_table_says_is_ignored(exports: dict[str, tuple[np.ndarray, np.ndarray]], key: str) -> None:
    """A row that is stale is red here: then mlx-lm reads the key."""
    ours, theirs = exports[key]
    assert np.abs(ours - theirs).max() > 1e-3 * np.abs(ours).max()
    [rows] = [families for engine, families in IGNORED.items() if engine.startswith("mlx-lm")]
    assert set(IGNORED_KEYS) == {key for taken in rows.values() for key in taken}
