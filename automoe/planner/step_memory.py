"""When a training step holds the most: every forward and backward pass of a rank, layer by layer, on paper.

What stands through the whole step (weights, moments) is not counted here. The rest comes and goes: activations of
micro-batches in flight, weights that FSDP has gathered, gradients before and after their reduction, workspace. The
gradients of a micro-batch that is the first to have any grow while its activations shrink; those of the last shrink
with both where FSDP reduces as it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from automoe.config.mesh_shape import MeshShape
from automoe.config.recompute import recomputed_modules
from automoe.config.schema import Config, is_linear, window_of
from automoe.model.adapters import adapter_activation_bytes
from automoe.model.params import Param
from automoe.planner.activations import TokenLoad, layer_activation_bytes, mask_bytes
from automoe.planner.workspace import Workspace, head_workspace_bytes, layer_workspaces

# Bytes of one number: (stored weights and moments, gathered weights and activations, summed gradients). With
# optim.master_weights=stochastic weights are stored as gathered, and so are moments with optim.moments=bfloat16.
DTYPE_BYTES = {"float64": (8, 8, 8), "float32": (4, 4, 4), "bfloat16": (4, 2, 4)}


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment beside what stands; fields as of ``RankMemory``."""

    name: str
    in_flight: list[int]
    gradients: float = 0.0
    gathered_weights: float = 0.0
    unsharded_gradients: float = 0.0
    receive_buffers: float = 0.0
    activations: float = 0.0
    head: float = 0.0
    recompute: float = 0.0
    temporaries: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        return {
            name: value for name, value in vars(self).items() if name not in ("name", "in_flight")
        }

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Sizes:
    """Bytes of parameters on one rank of a mesh."""

    config: Config
    mesh: MeshShape
    wide: int = 0
    compute: int = 0
    reduced: int = 0

    def __post_init__(self) -> None:
        for name, size in zip(
            ("wide", "compute", "reduced"), DTYPE_BYTES[self.config.train.dtype], strict=True
        ):
            object.__setattr__(self, name, size)

    def total(
        self, numel: Callable[[Param, MeshShape], int], params: Sequence[Param], size: int
    ) -> int:
        """At ``size`` a number; those of the router, which multiplies in at least float32, are always wide."""
        return sum(
            numel(param, self.mesh)
            * param.bytes_each(self.wide if param.part == "router" else size)
            for param in params
        )

    def weights_each(self, param: Param) -> int:
        """Of a number as it is stored; what is frozen is stored as it is multiplied. Routers are always wide."""
        narrow = not param.trained or self.config.optim.master_weights == "stochastic"
        return self.compute if narrow and param.part != "router" else self.wide

    def moments_each(self, param: Param) -> int:
        narrow = self.config.optim.moments == "bfloat16" and param.part != "router"
        return self.compute if narrow else self.wide

    def weights(self, params: Sequence[Param]) -> int:
        """Sharded."""
        return sum(
            local_numel(param, self.mesh) * param.bytes_each(self.weights_each(param))
            for param in params
        )

    def sharded_gradients(self, params: Sequence[Param]) -> int:
        return self.weights(trained(params))

    def moments(self, params: Sequence[Param]) -> int:
        return 2 * sum(
            local_numel(param, self.mesh) * self.moments_each(param) for param in trained(params)
        )

    def whole(self, params: Sequence[Param], size: int) -> int:
        """Gathered over FSDP's ranks."""
        return self.total(gathered_numel, params, size)

    def whole_gradients(self, params: Sequence[Param]) -> int:
        return self.reduced * sum(gathered_numel(param, self.mesh) for param in trained(params))


def trained(params: Sequence[Param]) -> list[Param]:
    return [param for param in params if param.trained]


def local_numel(param: Param, mesh: MeshShape, fsdp_rank: int = 0) -> int:
    """Numbers of ``param`` that the rank at ``fsdp_rank`` of (dp_shard, cp), or of ep_shard, stores."""
    if param.expert:
        return gathered_numel(param, mesh) // mesh.ep_shard
    rows = param.shape[0] // (mesh.tp if param.tp_dim(mesh.tp) == 0 else 1)
    chunk = ceil(rows / mesh.fsdp)
    mine = max(0, min(chunk, rows - fsdp_rank * chunk))
    return mine * (gathered_numel(param, mesh) // rows)


def gathered_numel(param: Param, mesh: MeshShape) -> int:
    """Numbers of ``param`` on a rank while FSDP has it gathered."""
    if param.expert:
        return param.numel // (mesh.ep * (1 if param.whole_over_etp else mesh.etp))
    return param.numel // (1 if param.tp_dim(mesh.tp) is None else mesh.tp)


@dataclass(frozen=True)
class LayerPlan:
    """One layer of a stage. Bytes."""

    kept: float  # activations of a micro-batch
    workspaces: list[Workspace]
    weights: int  # gathered
    gradients: int  # whole
    sharded: int
    experts: int  # whole gradients of the routed experts: a unit of FSDP's own


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage on one rank. Bytes; ``border`` is what one stage gives the next."""

    layers: list[LayerPlan]
    first: bool
    last: bool
    border: float
    shared: float  # a micro-batch keeps for all layers: angles and masks
    head: float
    head_kept: float  # after the loss until the backward pass: the last norm's input, both gradients of the head
    rest_weights: int  # outside layers: embedding, last norm, head; gathered
    rest_gradients: int
    rest_sharded: int

    @cached_property
    def kept(self) -> float:
        """Activations of one micro-batch."""
        return (
            self.shared
            + (self.head_kept if self.last else self.border)
            + sum(layer.kept for layer in self.layers)
        )

    def loss(self, adds: bool, others: float = 0.0) -> Moment:
        """At the end of a micro-batch's forward pass; ``others`` are activations of other micro-batches."""
        kept = self.kept - self.head_kept * self.last
        whole = self.gradients if adds else 0
        return Moment(
            "loss", [], activations=others + kept, head=self.head, unsharded_gradients=whole
        )

    @cached_property
    def weights(self) -> int:
        return self.rest_weights + sum(layer.weights for layer in self.layers)

    @cached_property
    def gradients(self) -> int:
        return self.rest_gradients + sum(layer.gradients for layer in self.layers)

    @cached_property
    def sharded(self) -> int:
        return self.rest_sharded + sum(layer.sharded for layer in self.layers)

    def backward(self, adds: bool, reduces: bool, experts_ranks: int) -> Iterator[Moment]:
        """Moments of one micro-batch's backward pass; activations without those of other micro-batches.

        Args:
            adds: to whole gradients that are there from micro-batches before.
            reduces: gradients as each layer is done, and frees the layer's weights.
            experts_ranks: over which FSDP shards the experts.
        """
        kept, weights = self.shared + self.border * (not self.last), self.weights
        below = kept + sum(layer.kept for layer in self.layers)
        whole = self.gradients if adds else 0
        rest = self.rest_gradients * self.last  # of the head, that comes first
        sharded = 0
        if not adds:
            whole = rest
        for layer in reversed(self.layers):
            common = dict(gathered_weights=weights, unsharded_gradients=whole, gradients=sharded)
            for work in layer.workspaces:
                yield Moment(
                    "backward", [], activations=below - work.done,
                    recompute=work.recompute, temporaries=work.temporaries, **common,
                )  # fmt: skip
            if reduces and layer.experts:
                # Copied into one tensor, which a sum over one rank copies once more.
                flat = layer.experts * (1 + (experts_ranks == 1))
                if not adds:
                    flat += layer.experts
                yield Moment(
                    "reduction",
                    [],
                    activations=below - layer.workspaces[-1].done,
                    temporaries=flat,
                    **common,
                )
            below -= layer.kept
            if reduces:
                sharded += layer.sharded
                weights -= layer.weights
                whole -= layer.gradients * adds
            elif not adds:
                whole += layer.gradients


def plan_stage(
    config: Config,
    sizes: Sizes,
    load: TokenLoad,
    layers: list[int],
    params: list[Param],
    first: bool,
    last: bool,
) -> StagePlan:
    """The stage that holds ``params``, of which ``layers`` are the numbers of its layers."""
    model, mesh, compute = config.model, sizes.mesh, sizes.compute
    of_layer: dict[int | None, list[Param]] = {}
    for param in params:
        of_layer.setdefault(param.layer, []).append(param)
    rest = of_layer.get(None, [])
    again = {layer: recomputed_modules(config.parallel, layer) for layer in layers}
    head_trained = any(param.trained for param in rest if param.part in ("embedding", "head"))
    hidden = compute * load.tokens * load.tp * model.hidden_size
    head = -(-model.vocab_size // mesh.tp) * model.hidden_size * compute * head_trained
    plans: dict[Any, LayerPlan] = {}
    kinds: dict[int, Any] = {}
    for layer in layers:
        # Layers alike are planned once; where names say what is trained, none is alike.
        named = layer if config.lora.rank or config.train.freeze else None
        kinds[layer] = (
            *(
                layer >= model.first_k_dense,
                is_linear(model.attention, layer),
                window_of(model.attention, layer),
            ),
            *(again[layer], named),
        )
        if kinds[layer] not in plans:
            plans[kinds[layer]] = _plan_layer(
                config, sizes, load, layer, of_layer[layer], again[layer]
            )
    return StagePlan(
        layers=[plans[kinds[layer]] for layer in layers],
        first=first,
        last=last,
        border=compute * load.tokens * model.hidden_size * (mesh.pp > 1),
        shared=mask_bytes(config, load, layers, again),
        head=head_workspace_bytes(model, load.tokens, compute, mesh.tp, head_trained, load.on_cpu)
        * last,
        head_kept=2 * hidden + head,
        rest_weights=sizes.whole(rest, compute),
        rest_gradients=sizes.whole_gradients(rest),
        rest_sharded=sizes.sharded_gradients(rest),
    )


def _plan_layer(
    config: Config,
    sizes: Sizes,
    load: TokenLoad,
    layer: int,
    params: list[Param],
    again: frozenset[str],
) -> LayerPlan:
    model, mesh = config.model, sizes.mesh
    kept = sum(layer_activation_bytes(model, layer, load, again).values())
    kept += adapter_activation_bytes(
        config, layer, load.tokens, load.expert_rows, load.number_bytes, again
    )
    experts = [param for param in trained(params) if param.expert]
    ffn = [param for param in trained(params) if param.part in ("dense_ffn", "shared_experts")]
    expert_numbers, ffn_numbers = (
        sum(gathered_numel(param, mesh) for param in each) for each in (experts, ffn)
    )
    return LayerPlan(
        kept=kept,
        workspaces=layer_workspaces(model, layer, load, again, expert_numbers, ffn_numbers),
        weights=sizes.whole(params, sizes.compute),
        gradients=sizes.whole_gradients(params),
        sharded=sizes.sharded_gradients(params),
        experts=sizes.reduced * expert_numbers,
    )
