"""Routing and dropping in plain Python, one token and one choice at a time: what the tensors must agree with."""

from __future__ import annotations

import math

from automoe.config.schema import RouterConfig


def best(values: list[float], k: int) -> list[int]:
    """Indices of the k largest, equal ones in order."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(v - max(values)) for v in values]
    return [p / sum(powers) for p in powers]


def route(
    logits: list[float], bias: list[float] | None, config: RouterConfig, k: int
) -> tuple[list[int], list[float], list[int], list[float]]:
    """One token: chosen experts, their weights, plain top-k, shares that sum to one."""
    if config.score == "softmax":
        shares = softmax(logits)
        scores = logits if config.softmax_after_topk else shares
    else:
        squash = {
            "sigmoid": lambda z: 1 / (1 + math.exp(-z)),
            "sqrt_softplus": lambda z: math.sqrt(math.log1p(math.exp(z))),
        }[config.score]
        scores = [squash(z) for z in logits]
        shares = [s / sum(scores) for s in scores]
    biased = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(logits) // config.num_groups
    groups = [biased[g * size : (g + 1) * size] for g in range(config.num_groups)]
    strengths = [sum(sorted(group, reverse=True)[: config.group_score_topk]) for group in groups]
    kept = best(strengths, config.topk_groups if config.num_groups > 1 else 1)
    allowed = [b if e // size in kept else -math.inf for e, b in enumerate(biased)]
    chosen = best(allowed, k)
    weights = [scores[e] for e in chosen]
    if config.softmax_after_topk:
        weights = softmax(weights)
    elif config.norm_topk_prob:
        weights = [w / sum(weights) for w in weights]
    return chosen, [w * config.routed_scaling_factor for w in weights], best(scores, k), shares


def keep(choices: list[tuple[int, float, bool]], capacity: int, policy: str) -> list[bool]:
    """Which of the choices (expert, weight, not padding), in order, find room."""
    order = range(len(choices))
    if policy == "probs":
        order = sorted(order, key=lambda i: (-round(choices[i][1] * 2**16), i))
    taken: dict[int, int] = {}
    kept = [False] * len(choices)
    for i in order:
        expert, _, valid = choices[i]
        if valid and taken.get(expert, 0) < capacity:
            taken[expert], kept[i] = taken.get(expert, 0) + 1, True
    return kept
