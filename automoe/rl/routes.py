"""Expert ids ("routes") that an inference engine chose: readers of its formats, and checks.

The training step uses the expert ids of a sample's tokens instead of its router's choices. A token
whose ids are -1 has no route, and the router chooses its experts. Routes are passed along with the
tokens and sliced like them, so the order in which layers run does not matter.

Letters: n tokens of a sample, T tokens that have an entry, L MoE layers without those of
multi-token prediction, K top-k.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from automoe.config.schema import ModelConfig
from automoe.errors import DataError
from automoe.training.stats import StepStats

ROUTES_DTYPE = torch.int16
# Largest part of the difference that chance makes. Rounding to bfloat16 makes 0.02 of it, eight
# updates at a rate of 1e-3 make 0.33, a shift by a token 0.7, by a layer or a sample all of it.
MAX_DIFFER = 0.5
_ROUNDING = 0.1  # is never refused: tokens of a collapsed router all choose alike
_LEAST_CHOICES = 64  # fewer are not judged


def read_vllm(routes: Any, model: ModelConfig, num_tokens: int, start: int = 0) -> torch.Tensor:
    """Return a sample's expert ids [n - 1, L, K] from vLLM's ``CompletionOutput.routed_experts``.

    Args:
        routes: [n - 1 - start, layers, K] integers for prompt and answer, concatenated, with top-k
            K. The layers are all decoder layers (with zeros for dense ones), or the L MoE layers
            alone.
        num_tokens: n, tokens of prompt and answer. The last token has no entry.
        start: ``routed_experts_prompt_start``: number of first tokens without an entry; their ids
            become -1, so that the router chooses.

    Raises:
        DataError: entries are missing, a dense layer has expert ids, or an id is wrong.
    """
    lines_TLK = np.asarray(routes)
    count = num_tokens - 1 - start
    dense = [layer for layer in range(model.num_layers) if layer not in model.moe_layers]
    if (
        lines_TLK.dtype.kind not in "iu"
        or lines_TLK.ndim != 3
        or len(lines_TLK) != count
        or start < 0
    ):
        raise DataError(
            f"routes are {lines_TLK.dtype} {list(lines_TLK.shape)}; {num_tokens} tokens from {start} on have integers "
            f"[{count}, layers, K]. An engine leaves lines out after hits in its prefix cache: switch the cache off"
        )
    if dense and lines_TLK.shape[1] == model.num_layers:
        if lines_TLK[:, dense].any():
            token, place, _ = np.argwhere(lines_TLK[:, dense])[0].tolist()
            raise DataError(
                f"routes give token {token + start} experts in layer {dense[place]}, which is dense: the layers are "
                "shifted, or routes are of another model"
            )
        lines_TLK = np.delete(lines_TLK, dense, axis=1)
    read_TLK = torch.from_numpy(lines_TLK.astype(np.int64))
    if (wrong := check_routes(read_TLK, model, start)) is not None:
        raise DataError(f"routes: {wrong}")
    before = read_TLK.new_full((start, *read_TLK.shape[1:]), -1)
    return torch.cat((before, read_TLK)).to(ROUTES_DTYPE)


def read_sglang(meta_info: Mapping[str, Any], model: ModelConfig, num_tokens: int) -> torch.Tensor:
    """Return a sample's expert ids [n - 1, L, K] from the ``meta_info`` of an SGLang answer.

    Args:
        meta_info: ``routed_experts`` is base64 of int32 [n - 1 - start, layers, K] with top-k K
            (all decoder layers, or the L MoE layers alone); ``routed_experts_start_len`` is
            ``start``, the number of first tokens without an entry. Their ids become -1, so that the
            router chooses.
        num_tokens: n, tokens of prompt and answer. The last token has no entry.

    Raises:
        DataError: entries are missing, a dense layer has expert ids, or an id is wrong.
    """
    start, top_k = int(meta_info.get("routed_experts_start_len") or 0), model.num_experts_per_token
    count = num_tokens - 1 - start
    try:
        ids = np.frombuffer(base64.b64decode(meta_info["routed_experts"], validate=True), "<i4")
        layers = len(ids) // (count * top_k) if count else model.num_layers
        lines = ids.reshape(count, layers, top_k)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise DataError(
            f"routed_experts are not int32 [{count}, layers, {top_k}] in base64, as {num_tokens} tokens from {start} on "
            f"have ({error}). Ask for return_routed_experts, of the model in training"
        ) from None
    return read_vllm(lines, model, num_tokens, start)


def check_routes(routes_TLK: torch.Tensor, model: ModelConfig, start: int = 0) -> str | None:
    """Return what is wrong with the expert ids of a sample, naming token and layer; None if valid.

    Args:
        routes_TLK: expert ids of T tokens in L MoE layers; a token may have -1 for all K ids of a
            layer, where the router chooses.
        start: index in the sample of the first token of ``routes_TLK``, for the message.
    """
    num_experts = model.num_scored_experts
    expected = [model.num_moe_layers - model.num_mtp_layers, model.num_experts_per_token]
    if list(routes_TLK.shape[1:]) != expected:
        return (
            f"{routes_TLK.shape[1]} layers and K={routes_TLK.shape[2]}, and the model has {expected[0]} MoE layers and "
            f"K={expected[1]}: routes of another model"
        )
    native = (routes_TLK == -1).all(-1)
    outside = ((routes_TLK < 0) | (routes_TLK >= num_experts)).any(-1) & ~native
    ordered = routes_TLK.sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~native
    rules = {
        f"the model has experts 0 to {num_experts - 1}: routes of another model": outside,
        "a token has K different experts, or -1 for each: the engine wrote no route here": repeated,
    }
    for rule, wrong in rules.items():
        if wrong.any():
            token, layer = wrong.nonzero()[0].tolist()
            ids = routes_TLK[token, layer].tolist()
            return f"token {token + start}, layer {model.moe_layers[layer]}: experts {ids}; {rule}"
    return None


def check_replay(stats: StepStats, top_k: int, most: float = MAX_DIFFER) -> None:
    """Raise if an engine's expert ids, used in a step, differ too much from the router's choices.

    The measure is the share of these ids that the router would not choose, divided by the share
    expected for random tokens: 1 - K * sum over experts of (expert's share of all ids)^2, or 1 -
    K/E if the load of the E experts is even. Call this after the backward pass of a step.

    Args:
        stats: statistics of the step, equal on every rank.
        top_k: K.
        most: largest allowed ratio of the two shares.

    Raises:
        DataError: the ratio is larger in one layer, or over all layers together, with at least 64
            ids there. Up to 10% of other choices, which rounding may cause, never raise.
    """
    repeated_L, differing_L = stats.replayed.unbind(1)
    counts_LE = stats.expert_counts
    # Each expert's share of the choices; all sum to one, so K of them are a token's.
    shares_LE = counts_LE / counts_LE.sum(1, keepdim=True).clamp_min(1)
    chance_L = 1 - top_k * shares_LE.square().sum(1)
    layers = {f"MoE layer {n}": slice(n, n + 1) for n in range(len(repeated_L))}
    for where, at in ({"all MoE layers": slice(None)} | layers).items():
        repeated, differing = float(repeated_L[at].sum()), float(differing_L[at].sum())
        chance = float((chance_L[at] * repeated_L[at]).sum()) / max(repeated, 1)
        if repeated >= _LEAST_CHOICES and differing > max(most * chance, _ROUNDING) * repeated:
            raise DataError(
                f"routes: {differing / repeated:.1%} of the repeated choices of {where} are not the router's own. "
                f"Rounding makes a few per cent, routes of other tokens {chance:.1%} (allowed {most:g} of that). They "
                "are shifted by a token, a layer or a sample, or of other weights: raise Session.max_routes_differ if "
                "these are many updates old"
            )
