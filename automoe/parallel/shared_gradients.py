"""Parameters that several ranks or stages hold: their gradients are summed once, and they count once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automoe.comm.local_shard import local_shard
from automoe.config.mesh_shape import DEFAULT_AXES
from automoe.model.causal_lm import CausalLM
from automoe.parallel.mesh import Meshes


def counted_parameters(model_parts: Iterable[CausalLM]) -> Iterator[nn.Parameter]:
    """Yield the parameters of these stages, without copies of the embedding.

    The first stage yields the embedding, so all stages together yield each parameter once.
    """
    for part in model_parts:
        # The first stage counts the embedding.
        copies = part.embedding is not None and not part.embeds
        skipped = {id(p) for p in part.embedding.parameters()} if copies else set()
        yield from (parameter for parameter in part.parameters() if id(parameter) not in skipped)


@contextmanager
def earlier_gradients_added(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within the context gradients of ``parameters`` start from None; on exit add the gradients from before."""
    earlier = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in earlier:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class SharedGradients:
    """Gradients of which several ranks hold a term each, summed once at the end of a step.

    There are three kinds. Under tensor parallelism: parameters that every tp rank keeps whole
    (norms, routers, latent projections) while it sees only its shard of the tokens. Under expert
    tensor parallelism: adapters that etp ranks keep whole while each has a part of the width. Under
    a pipeline with tied embeddings or multi-token prediction: all copies of the embedding, of which
    a rank may hold several. Copies start equal, since initialisation and checkpoints go by name,
    and stay equal, since all of them take the sum. Every rank must make this object, because making
    its groups is collective.

    Args:
        holders: pp coordinate of each stage with an embedding, one entry per stage.
    """

    def __init__(
        self, model_parts: dict[int, CausalLM], meshes: Meshes, holders: Sequence[int]
    ) -> None:
        # by group: the parameters of which its ranks hold terms, each a list of this rank's copies
        self._by_group: list[tuple[dist.ProcessGroup | None, list[list[Tensor]]]] = []
        parts = model_parts.values()
        if (tp := meshes.group("tp")) is not None:
            parameters = (p for part in parts for p in part.parameters())
            self._by_group.append((tp, [[p] for p in parameters if _whole_over_tp(p)]))
        if (etp := meshes.group("etp")) is not None:
            experts = (layer.experts for part in parts for _, layer in part.moe_layers())
            named = ((e.WIDTH_DIMS[name], p) for e in experts for name, p in e.named_parameters())
            self._by_group.append((etp, [[p] for dim, p in named if dim is None]))
        copies = [part.embedding.weight for part in parts if part.embedding is not None]
        places = sorted(set(holders))
        self._on_stages = copies if len(places) > 1 or len(copies) > 1 else []
        if len(places) > 1:
            self._by_group.append((meshes.pipeline_members(places), [copies] if copies else []))
        elif len(copies) > 1:
            self._by_group.append((None, [copies]))

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Context manager: on exit, sum the shared parameters' gradients over ranks and copies.

        Gradients from before the context are sums already: they are only added to the results.
        """
        shared = [p for _, parameters in self._by_group for copies in parameters for p in copies]
        with earlier_gradients_added(shared):  # these are sums already
            yield
            self.sum()

    def sum(self) -> None:
        """Replace each shared parameter's gradient by the sum of its terms, over copies and ranks.

        The copies are those of this rank (tied embedding and head, also of MTP), the ranks those
        of the parameter's process group. These ranks shard the parameter alike, so local shards
        are summed; all parameters of a group are in one all-reduce.
        """
        for parameter in self._on_stages:
            # A step without the modules for multi-token prediction uses the first copy alone.
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for group, parameters in self._by_group:
            shared = [
                [local_shard(p.grad) for p in copies if p.grad is not None] for copies in parameters
            ]
            shared = [terms for terms in shared if terms]
            if not shared:
                continue
            flat = torch.cat([_added(terms).flatten() for terms in shared])
            if group is not None:
                dist.all_reduce(flat, group=group)
            sizes = [terms[0].numel() for terms in shared]
            for terms, total in zip(shared, flat.split(sizes), strict=True):
                for term in terms:
                    term.copy_(total.view_as(term))


def _added(terms: list[Tensor]) -> Tensor:
    # Terms may be bfloat16 (optim.master_weights=stochastic); their sum is not.
    wide = torch.promote_types(terms[0].dtype, torch.float32)
    return reduce(torch.add, [term.to(wide) for term in terms])


def _whole_over_tp(parameter: Tensor) -> bool:
    """Return True if every tp rank keeps the full parameter: no tp shard, and not an expert's.

    Parameters of experts are on the moe mesh.
    """
    axes = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
    dense = all(axis in (*DEFAULT_AXES, "fsdp") for axis in axes)
    return dense and "tp" not in axes
