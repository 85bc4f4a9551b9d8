"""AdamW and Muon over parameters on several device meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from automoe.config.schema import OptimConfig
from automoe.model.params import find_spec, is_wide
from automoe.optim import muon
from automoe.optim.ema import KEY, first_average
from automoe.optim.stochastic import StochasticAdamW


def build_optimizer(
    model_parts: Iterable[nn.Module],
    optim: OptimConfig,
    seed: int = 0,
    ranks: dist.ProcessGroup | None = None,
) -> torch.optim.Optimizer:
    """Build AdamW (arXiv 1711.05101) or Muon, with a parameter group per device mesh and decay.

    With ``optim.algorithm=muon``, matrices of the layers are in groups of their own, which Muon
    updates (``automoe.optim.muon``); the call is then collective.

    A multi-tensor (``foreach``) update is one operation over a whole group, and DTensor refuses to
    mix meshes in one operation. Experts and all other parameters are therefore in different groups.
    ``automoe.model.params`` lists which parameters decay; a parameter that a recipe adds to the
    model decays if it has two dims or more. Groups and their parameters follow the order of
    ``named_parameters`` over the parts, so every rank that holds the same parameters builds the
    same groups. Parameters that do not require gradients are left out. A parameter that two parts
    or names share is updated once.

    The state of every parameter is allocated here, as zeros, so the first checkpoint has the same
    tensors as every later one. With ``optim.ema_decay`` the state includes the parameter's average
    (``automoe.optim.ema``). Each group carries ``names``, the global names of its parameters, and
    ``mesh``, the mesh axes of its parameters as text for logs.

    Args:
        model_parts: this rank's pipeline stages.
        optim: the ``optim`` section of the configuration.
        seed: seed of stochastic rounding (``optim.master_weights=stochastic`` and
            ``optim.moments=bfloat16``).
        ranks: group of the stage's ranks (``Meshes.stage_group``), which share Muon's work; None
            if this rank holds every parameter whole.
    """
    groups: dict[Any, dict[str, Any]] = {}  # by mesh, decay and algorithm
    seen: set[int] = set()
    for part in model_parts:
        for name, parameter in part.named_parameters():
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            spec = find_spec(name)
            decays = parameter.dim() > 1 if spec is None else spec.decays
            by_muon = optim.algorithm == "muon" and spec is not None and spec.orthogonalized
            axes = ("local",) if mesh is None else mesh.mesh_dim_names or ("unnamed",)
            new = {
                "params": [],
                "names": [],
                "weight_decay": optim.weight_decay if decays else 0.0,
                "mesh": " x ".join(axes),
            }
            group = groups.setdefault((mesh, decays, by_muon), new)
            if by_muon:
                group |= {"muon": True, "momentum": optim.momentum}
            group["params"].append(parameter)
            group["names"].append(name)
    # A pipeline stage may have no trainable parameters.
    param_groups = list(groups.values()) or [{"params": [], "names": [], "mesh": "local"}]
    options: dict[str, Any] = dict(lr=optim.lr, betas=optim.betas, eps=optim.eps)
    narrow_moments = optim.moments == "bfloat16"
    stochastic = optim.master_weights == "stochastic" or narrow_moments
    optimizer: torch.optim.Optimizer
    if stochastic:
        optimizer = StochasticAdamW(param_groups, **options, seed=seed)
    elif optim.algorithm == "muon":
        narrow = torch.bfloat16 if optim.muon_dtype == "bfloat16" else None
        optimizer = muon.Muon(param_groups, narrow, ranks, **options, fused=True)
    else:
        optimizer = torch.optim.AdamW(param_groups, **options, fused=True)
    for group in param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            dtype = parameter.dtype
            if stochastic:
                dtype = torch.promote_types(dtype, torch.float32)
            # A router's weights are kept wide, so its moments are, too.
            if narrow_moments and not is_wide(name):
                dtype = torch.bfloat16
            state = optimizer.state[parameter]
            moments: tuple[str, ...] = (muon.KEY,)
            if not group.get("muon"):  # This is the layout of torch's fused AdamW.
                # The counter is on the parameter's device, so the host never waits for it.
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments = "exp_avg", "exp_avg_sq"
            for moment in moments:
                state[moment] = torch.zeros_like(parameter, dtype=dtype)
            if optim.ema_decay:
                state[KEY] = first_average(parameter)
    return optimizer
