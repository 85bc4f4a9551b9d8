"""AdamW over parameters that live on different meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from automoe.config.schema import OptimConfig
from automoe.optim.stochastic import StochasticAdamW


def build_optimizer(model_parts: Iterable[nn.Module], optim: OptimConfig, seed: int = 0) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) with one parameter group per device mesh and weight decay.

    A multi-tensor (``foreach``) update is one operation over a whole group, and DTensor refuses to mix
    meshes in an operation: experts and everything else are in different groups. Matrices decay; tensors of
    one dimension (norm weights, biases) and the biases of experts do not. Groups and their parameters are in the order of
    ``named_parameters`` over the parts, so every rank that holds the same parameters builds the same
    groups. Parameters that do not require gradients are left out, and a parameter that two parts or names
    share is updated once.

    Each group carries ``mesh``, the axes its parameters are sharded over, as text for logs, and ``names``.

    Args:
        seed: of the roundings of ``optim.master_weights=stochastic``.
    """
    groups: dict[tuple[object, bool], dict[str, Any]] = {}
    seen: set[int] = set()
    for part in model_parts:
        for name, parameter in part.named_parameters():
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            decays = parameter.dim() > 1 and not name.endswith((".b_gate_up", ".b_down"))
            if (mesh, decays) not in groups:
                groups[mesh, decays] = {
                    "params": [],
                    "names": [],
                    "weight_decay": optim.weight_decay if decays else 0.0,
                    "mesh": " x ".join(mesh.mesh_dim_names or ("unnamed",)) if mesh is not None else "local",
                }
            groups[mesh, decays]["params"].append(parameter)
            groups[mesh, decays]["names"].append(name)
    empty: list[dict[str, Any]] = [{"params": [], "names": [], "mesh": "local"}]  # a stage without parameters
    options: dict[str, Any] = dict(lr=optim.lr, betas=optim.betas, eps=optim.eps)
    if optim.master_weights == "stochastic":
        moments = getattr(torch, optim.moments)
        return StochasticAdamW(list(groups.values()) or empty, **options, seed=seed, moments=moments)
    return torch.optim.AdamW(list(groups.values()) or empty, **options, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
