"""Exports converted to GGUF files and loaded by llama.cpp: right within rounding, or what is ignored is in the table.

``make test-llama`` makes its environment and names its Python in ``LLAMA_PYTHON``. The converter needs torch and
transformers, so ours runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import automoe
from automoe.hf.engines import IGNORED, ignored_keys
from tests.support.hf_models import save_small_hf

NUM_TOKENS = 40
[ENGINE] = [engine for engine in IGNORED if engine.startswith("llama.cpp")]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
# Of few index heads many keys score zero, and ties are broken otherwise.
INDEXER = {"index_n_heads": 24, "index_head_dim": 64}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_interleaved": True}
DELTA_NET = {"linear_value_head_dim": 16, "rms_norm_eps": 1e-6, "head_dim": 32}
# family -> a small model and the sizes that llama.cpp computes
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("dsv3", {}),
    "deepseek_v32": ("dsv32", INDEXER),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm_moe_dsa": ("glm_moe_dsa", INDEXER),
    "gpt_oss": ("gpt_oss", {"rope_scaling": YARN}),
    "llama": ("llama", {}),
    "minimax_m2": ("minimax_m2", {}),
    "mixtral": ("mixtral", {"head_dim": 8}),
    "olmoe": ("olmoe", {"rms_norm_eps": 1e-5}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_next": ("qwen3_next", DELTA_NET),
    "qwen3_5_moe": ("qwen3_5_moe", DELTA_NET | {"rope_parameters": SECTIONS | {"mrope_section": [3, 3, 2]}}),
}
ALSO_RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "groups": ("dsv3", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    "yarn": ("qwen3_moe", {"rope_scaling": YARN}),
    "yarn of latent attention": ("dsv3", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
    "llama3": ("mixtral", {"head_dim": 8, "rope_scaling": LLAMA3}),
    "tied": ("qwen3_tied", {}),
    "full attention": ("gpt_oss", {"rope_scaling": YARN, "layer_types": ["full_attention"] * 4}),
}
# key -> what a checkpoint may state and the engine does not read
YARN_STATES = {
    "rope.beta_fast": {"beta_fast": 1.2},
    "rope.beta_slow": {"beta_slow": 3},
    "rope.attention_factor": {"attention_factor": 1.4},
    "rope.truncate": {"truncate": False},
    "rope.mscale": {"mscale": 0.7, "mscale_all_dim": 0.5},
}
STATES: dict[str, dict[str, Any]] = {
    "rope.scaling": {"rope_scaling": LLAMA3},
    "rope.interleaved": {"rope_interleave": False},
    "norm_eps": {"rms_norm_eps": 1e-3},
    "swiglu_limit": {"swiglu_limit": 0.8},
    "attention.clip_qkv": {"clip_qkv": 0.8},
    "attention.full_attention_interval": {
        "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]
    },
}


def ignoring(family: str, key: str) -> tuple[str, dict[str, Any]]:
    """A small model that states something at ``key`` which llama.cpp is known to ignore in ``family``."""
    name, sizes = RIGHT[family]
    stated = STATES.get(key, {})
    if key == "router.norm_topk_prob":
        stated = {"norm_topk_prob": not IGNORED[ENGINE][family][key]}
    if key in YARN_STATES:
        equal = MSCALES if "rope.mscale" in IGNORED[ENGINE][family] else {}
        stated = {"rope_theta": 50.0, "rope_scaling": YARN | equal | YARN_STATES[key]}
    if family == "glm_moe_dsa":
        stated = {"rope_scaling": YARN | MSCALES}
    return name, sizes | stated


ROWS = {f"{family} {key}": ignoring(family, key) for family, taken in IGNORED[ENGINE].items() for key in taken}
# As published: GPT-OSS, Kimi-K2; and DeepSeek's shape as a checkpoint without mscales is stretched.
PUBLISHED = {
    "unrounded range": ("gpt_oss", {"head_dim": 16, "rope_theta": 50.0, "rope_scaling": YARN | {"truncate": False}}),
    "one rotation": ("dsv3", {"rope_theta": 50.0, "rope_scaling": YARN | MSCALES | {"beta_fast": 1}}),
    "no mscales": ("dsv3", {"rope_scaling": YARN}),
}
CASES = RIGHT | ALSO_RIGHT | ROWS | PUBLISHED

pytestmark = pytest.mark.llama


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each case the export, with our logits in ours.npy and those of llama.cpp in llama.npy."""
    folders = {}
    for case, (name, sizes) in CASES.items():
        folders[case] = folder = tmp_path_factory.mktemp("case") / "out"
        save_small_hf(name, folder.parent / "source", other_sizes=sizes)
        model = automoe.from_hf(folder.parent / "source").eval()
        automoe.to_hf(model, folder)
        with torch.no_grad():
            np.save(folder / "ours.npy", model(torch.arange(1, NUM_TOKENS + 1)[None])[0].float().numpy())
    python = Path(os.environ["LLAMA_PYTHON"])
    converter = python.parents[1] / "source" / "vendor" / "llama.cpp"
    here = Path(__file__).parent
    subprocess.run([sys.executable, here / "llama_convert.py", converter, *folders.values()], check=True)
    subprocess.run([python, here / "llama_logits.py", str(NUM_TOKENS), *folders.values()], check=True)
    return folders


def difference(folder: Path) -> float:
    refused = folder / "refused.txt"
    assert not refused.exists(), refused.read_text()
    ours, theirs = np.load(folder / "ours.npy"), np.load(folder / "llama.npy")
    assert theirs.shape == ours.shape
    return float(np.abs(ours - theirs).max() / np.abs(ours).max())


@pytest.mark.parametrize("case", RIGHT | ALSO_RIGHT)
def test_an_export_has_the_same_logits_there(folders: dict[str, Path], case: str) -> None:
    assert difference(folders[case]) < 1e-4
    assert [line for line in ignored_keys(folders[case]) if line.startswith(ENGINE)] == []


@pytest.mark.parametrize("case", ROWS)
def test_what_the_table_says_is_ignored(folders: dict[str, Path], case: str) -> None:
    """A row that is stale is red here: then the engine reads the key."""
    _, key = case.split()
    assert difference(folders[case]) > 1e-3
    [line] = [line for line in ignored_keys(folders[case]) if line.startswith(ENGINE)]
    assert f"ignores {key}=" in line and ", " not in line.removesuffix(", and computes another model")


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_numbers_that_are_ignored_are_said(folders: dict[str, Path], case: str) -> None:
    assert difference(folders[case]) > 1e-3
    assert any(line.startswith(ENGINE) for line in ignored_keys(folders[case]))
