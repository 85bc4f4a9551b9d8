"""Gradients of which several ranks hold a term each, summed once at the end of a step.

Two kinds: under tensor parallelism, parameters that every tp rank keeps whole (norms, routers, latent
projections) while it sees only its part of the tokens; under a pipeline with tied embeddings, the first
and the last stage's copies of one parameter. Copies start equal (initialisation and checkpoints go by
name) and stay equal, because all of them take the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from automoe.config.mesh_shape import DEFAULT_AXES
from automoe.model.decoder import Decoder
from automoe.parallel.mesh import Meshes


def counted_parameters(parts: Iterable[Decoder]) -> Iterator[nn.Parameter]:
    """Parameters of these parts, each of the model's once over all stages."""
    for part in parts:
        copies = part.embed_tokens is not None and not part.embeds  # it only predicts with the embedding
        skipped = {id(p) for p in part.embed_tokens.parameters()} if copies else set()
        yield from (parameter for parameter in part.parameters() if id(parameter) not in skipped)


class SharedGradients:
    """Finds the shared parameters of this rank's parts and adds up their gradients.

    Every rank builds it, since groups are made by all ranks together.
    """

    def __init__(self, parts: dict[int, Decoder], meshes: Meshes) -> None:
        self._by_group: list[tuple[dist.ProcessGroup, list[torch.Tensor]]] = []
        if (tp := meshes.group("tp")) is not None:
            whole = [p for part in parts.values() for p in part.parameters() if _whole_over_tp(p)]
            self._by_group.append((tp, whole))
        if meshes.shape.pp > 1 and any(part.config.tie_embeddings for part in parts.values()):
            tied = [part.embed_tokens.weight for part in parts.values() if part.embed_tokens is not None]
            for stages in meshes.shape.groups("default", "pp"):
                ends = [stages[0], stages[-1]]
                group = dist.new_group(ends, timeout=meshes.timeout)
                if dist.get_rank() in ends:
                    self._by_group.append((group, tied))

    def sum(self) -> None:
        """Replace every shared gradient by its sum over the ranks that hold a term of it.

        The ranks of a group cut a parameter alike, so local shards are summed, all in one collective.
        """
        for group, parameters in self._by_group:
            gradients = [_local(p.grad) for p in parameters if p.grad is not None]
            if not gradients:
                continue
            # Terms may be bfloat16 (optim.master_weights=stochastic); their sum is not.
            flat = torch.cat([g.flatten().to(torch.promote_types(g.dtype, torch.float32)) for g in gradients])
            dist.all_reduce(flat, group=group)
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole_over_tp(parameter: torch.Tensor) -> bool:
    """Whether every tp rank keeps all of it: not cut over tp, and not an expert's (those live on the moe mesh)."""
    axes = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
    dense = all(axis in (*DEFAULT_AXES, "fsdp") for axis in axes)
    return dense and "tp" not in axes
