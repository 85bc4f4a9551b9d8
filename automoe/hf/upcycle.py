"""Upcycling of a dense checkpoint to a mixture of experts that computes the same function.

Every expert is a copy of the layer's FFN (arXiv 2212.05055) or, fine-grained, one of G parts of a
copy (arXiv 2410.07524). Experts x*G ... x*G + G-1 are the parts of copy x. Their rows of the router
are equal at first, so that a token chooses whole copies. The weights of a token's K experts sum to
one, K is a multiple of G, and down projections are multiplied by G: so the layer has the output of
the dense layer, whatever the routers choose.

Letters: E experts, K top-k, G granularity, F width of the dense FFN, I = F / G width of an expert,
    H hidden.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from automoe.config.schema import ModelConfig
from automoe.errors import ConfigError
from automoe.hf.families.registry import family_of, model_config_from_hf, read_hf_config
from automoe.hf.keys import DOWN, GATE_UP, ROUTER, KeyMap
from automoe.hf.wrapper import is_wrapper

if TYPE_CHECKING:
    from automoe.hf.shards import LocalShard

# Dense family -> family with the same attention, and experts instead of the FFN.
TARGETS = {"llama": "mixtral", "qwen3": "qwen3_moe"}


def fill_upcycled(shard: LocalShard, keys: KeyMap) -> None:
    """Complete ``shard`` of an upcycled mixture: scale a down projection, or fill a router.

    A copy of the dense FFN is cut along its inner dimension into ``keys.ffn_parts`` experts, whose
    down projections are multiplied by that number; a router gets random weights. Other shards, and
    all shards of models that are not upcycled, stay unchanged.

    Args:
        keys: map of tensor names, which says if experts are made of a dense FFN.
    """
    if keys.ffn_parts and shard.name.endswith(DOWN):
        shard.local.mul_(keys.ffn_parts)
    elif keys.ffn_parts and shard.name.endswith(ROUTER):
        import torch  # imported late: command lines are checked without torch

        from automoe.kernels.counter_random import normal_at

        rows, hidden = shard.local.shape
        first, column = shard.start
        copy_R1 = torch.arange(first, first + rows).unsqueeze(1) // keys.ffn_parts
        index_RH = copy_R1 * shard.shape[1] + torch.arange(column, column + hidden)
        drawn = normal_at(index_RH, shard.name, keys.router_seed) * keys.router_std
        shard.local.copy_(drawn.to(shard.local.dtype))


def upcycled_model(model: ModelConfig, seed: int = 0) -> tuple[ModelConfig, KeyMap]:
    """Return the mixture's configuration and map of tensor names for the dense ``model.hf_path``.

    The mixture has the experts that ``model`` asks for. The map names the dense tensors that each
    weight is filled from.

    Args:
        seed: seed of the routers' initial weights.

    Raises:
        ConfigError: the mixture would not compute the dense model's function, the family has no
            mixture counterpart, or the expert width does not divide the dense one.
    """
    assert model.hf_path is not None
    full = model_config_from_hf(model.hf_path).intermediate_size
    width = model.moe_intermediate_size
    if width < 1 or full % width:
        rest = f"{full} % {width} = {full % width}" if width > 0 else "not 0"
        raise ConfigError(
            "model.moe_intermediate_size",
            width,
            f"an expert is an equal part of the FFN of {model.hf_path}, whose width is {full}: {rest}",
            f"Set model.moe_intermediate_size={full} for whole copies",
        )
    sizes = model.num_experts, model.num_experts_per_token, full // width
    mixture, keys = upcycled(model.hf_path, *sizes, seed=seed)
    std = model.initializer_range
    # If two copies tie, a token must choose all parts of one of them.
    router = replace(mixture.router, exact_ties=full > width)
    mixture = replace(mixture, upcycle=True, initializer_range=std, router=router)
    return mixture, replace(keys, router_std=std)


def upcycled(
    path: str | Path,
    num_experts: int,
    num_experts_per_token: int,
    granularity: int = 1,
    seed: int = 0,
) -> tuple[ModelConfig, KeyMap]:
    """Return the mixture's configuration and map of tensor names for the dense model at ``path``.

    The map names the dense tensors that each weight is filled from.

    Args:
        granularity: number of equal parts into which each dense FFN is cut; an expert is one part.
        seed: seed of the routers' random weights, which are drawn when the model is loaded.

    Raises:
        ConfigError: with these sizes the mixture would not compute the same function, the family
            has no mixture counterpart, or the checkpoint has a vision or audio part.
    """
    dense = model_config_from_hf(path)
    if is_wrapper(read_hf_config(path)):
        rule = "the mixture of a text model would not fit the parts beside it"
        raise ConfigError("upcycle", path, rule, "Name a checkpoint of only the text model")
    G = granularity
    width = dense.intermediate_size

    if dense.family not in TARGETS:
        there = ", ".join(f"{source} (to {target})" for source, target in TARGETS.items())
        rule = f"model_type={dense.family} has no family with the same attention and experts in place of the FFN"
        raise ConfigError("upcycle", path, rule, f"Dense families that have one: {there}")
    if G < 1 or width % G:
        near = max(n for n in range(1, width + 1) if width % n == 0 and n <= max(G, 1))
        rule = f"an expert is one of G equal parts of the FFN's width {width}, and {width} % {G} is not 0"
        raise ConfigError(
            "granularity", G, rule if G > 0 else "at least 1", f"Nearest valid choice: {near}"
        )
    counts = {"num_experts": num_experts, "num_experts_per_token": num_experts_per_token}
    for key, value in counts.items():
        if value < 1 or value % G:
            rule = f"whole copies of the FFN have G={G} experts each, and {value} is not a multiple of that"
            near = max(1, math.ceil(value / G)) * G
            raise ConfigError(key, value, rule, f"Nearest valid choice: {near}")
    if num_experts_per_token > num_experts:
        rule = f"a token cannot choose {num_experts_per_token} of {num_experts} experts"
        raise ConfigError(
            "num_experts_per_token", num_experts_per_token, rule, f"Set at most {num_experts}"
        )
    mixture = replace(
        dense,
        family=TARGETS[dense.family],  # type: ignore[arg-type]
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        moe_intermediate_size=width // G,
        first_k_dense=0,
        router=replace(dense.router, score="softmax", norm_topk_prob=True),
    )
    # A round trip through config.json gives the configuration that readers of the mixture get.
    family = family_of(mixture)
    described = family.read_config(family.write_config(mixture, read_hf_config(path)), str(path))
    rows = {
        ROUTER: "",
        GATE_UP: "mlp.gate_proj.weight mlp.up_proj.weight",
        DOWN: "mlp.down_proj.weight",
    }
    return described, KeyMap(rows, G, dense.initializer_range, seed)
