"""Table of the settings in config.json that an inference engine silently ignores.

``make test-llama``, ``make test-mlx`` and ``make test-vllm`` load models with such settings in
these engines, and fail when the table is out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from automoe.config.schema import ModelConfig
from automoe.hf.families.family import value_of
from automoe.hf.families.registry import model_config_from_hf, read_hf_config
from automoe.hf.wrapper import text_config

# Key of ``model`` -> what the engine computes with, whatever config.json says: a value, or a rule of the models that
# it computes.
Taken = Mapping[str, Any]


def _without(scaling: str) -> Callable[[ModelConfig], bool]:
    return lambda model: model.rope.scaling != scaling


def _has_equal_mscales(model: ModelConfig) -> bool:
    rope = model.rope
    return rope.scaling != "yarn" or 0 < rope.mscale == rope.mscale_all_dim


def _alternates(model: ModelConfig) -> bool:
    return model.attention.full_attention_interval < 3


_LLAMA: Taken = {
    "rope.beta_fast": 32,
    "rope.beta_slow": 1,
    "rope.attention_factor": None,
    "rope.truncate": True,
}
_YARN = _LLAMA | {"rope.scaling": _without("llama3")}
_DSV32 = _YARN | {"rope.mscale": _has_equal_mscales}
_MLA = _DSV32 | {"rope.interleaved": True}
_NO_YARN = {"rope.scaling": _without("yarn")}
_SUMS, _NO_SUMS = {"router.norm_topk_prob": True}, {"router.norm_topk_prob": False}
_EPS = {"norm_eps": 1e-5}
# engine -> family -> what it takes for granted
IGNORED: dict[str, dict[str, Taken]] = {
    "llama.cpp (llama-cpp-python 0.3.36)": {
        "deepseek_v3": _MLA,
        "deepseek_v32": _DSV32,
        "glm4_moe": _YARN,
        "glm4_moe_lite": _MLA,
        "glm_moe_dsa": {"rope.scaling": lambda model: model.rope.scaling == "none"},
        "gpt_oss": _YARN | {"swiglu_limit": 7, "attention.full_attention_interval": _alternates},
        "llama": _LLAMA,
        "minimax_m2": _YARN,
        "mixtral": _LLAMA,
        "olmoe": _YARN | _NO_SUMS | _EPS | {"attention.clip_qkv": None},
        "qwen2_moe": _YARN | _NO_SUMS,
        "qwen3": _YARN,
        "qwen3_moe": _YARN | _SUMS,
        "qwen3_next": _YARN | _SUMS,
    },
    "mlx-lm 0.32": {"qwen3_moe": _NO_YARN},
    "vLLM 0.32": {"olmoe": _EPS},
}


def ignored_keys(folder: Path) -> list[str]:
    """Return warnings about inference engines that ignore settings of the checkpoint in ``folder``.

    An example is ``vLLM 0.32 ignores norm_eps=1e-06, and computes another model``.
    """
    kind = str(text_config(read_hf_config(folder)).get("model_type"))
    concerned = {engine: taken[kind] for engine, taken in IGNORED.items() if kind in taken}
    model = model_config_from_hf(folder) if concerned else ModelConfig()
    lines = []
    for engine, takes in concerned.items():
        keys = []
        for key, taken in takes.items():
            value = value_of(model, key)
            if not (taken(model) if callable(taken) else value == taken):
                keys.append(f"{key}={value}")
        if keys:
            lines.append(f"{engine} ignores {', '.join(keys)}, and computes another model")
    return lines
