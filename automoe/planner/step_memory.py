"""Memory of a rank at each moment of a training step: every forward and backward pass, by layer.

Weights and moments last for the whole step and are not counted here. The other bytes vary: activations of
micro-batches in flight, weights gathered by FSDP, gradients before and after their reduction, workspace. In the first
backward pass gradients grow while activations shrink. If FSDP reduces each layer at once, gradients and activations
both shrink in the last backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple

from automoe.config.mesh_shape import MeshShape
from automoe.config.recompute import recomputed_modules
from automoe.config.schema import Config, has_indexer, is_linear, ratio_of, window_of
from automoe.config.tier import tier_of
from automoe.model.params import Param, layer_params
from automoe.model.trainable import is_target
from automoe.planner.activations import TokenLoad, layer_activation_bytes, mask_bytes
from automoe.planner.workspace import Workspace, head_workspace_bytes, layer_workspaces

# Bytes of one element: (stored weights and moments, gathered weights and activations, summed
# gradients). With optim.master_weights=stochastic, weights are stored in the size of gathered ones;
# so are moments with optim.moments=bfloat16.
DTYPE_BYTES = {"float64": (8, 8, 8), "float32": (4, 4, 4), "bfloat16": (4, 2, 4)}

PARTS = tuple(
    "weights moments averages gradients gathered_weights unsharded_gradients inputs receive_buffers activations head "
    "recompute widened temporaries".split()
)
_parts_of = attrgetter(*PARTS)


@dataclass(frozen=True)
class RankMemory:
    """Memory at one moment of a training step: bytes of each kind on one rank.

    Of the ranks with pipeline coordinate ``pp_rank``, it is the one with the largest shards. ``weights``, ``moments``,
    ``averages`` and ``inputs`` are the same at every moment, so functions that yield moments leave them at 0, and
    ``plan_rank`` sets them.

    Attributes:
        moment: ``backward`` (in a backward pass), ``loss``, ``reduction`` (of gradients) or ``update`` (of weights).
        layers, params: numbers of the rank's layers, and number of its parameters before sharding, without adapters.
        weights, moments, gradients: sharded weights, optimizer moments, and reduced gradients.
        averages: sharded float32 averages of the weights (``optim.ema_decay``).
        gathered_weights: weights gathered by FSDP; with ``train.fp8`` also their codes if these are kept.
        unsharded_gradients: gradients that wait for their reduction.
        inputs: token ids, labels, positions and document numbers of all rows of the step.
        receive_buffers: gradients received by a pipeline stage, and gradients on their way to the previous stage.
        activations: activations of all micro-batches between their forward and backward pass.
        head: workspace of the cross-entropy, on the last stage.
        recompute: activations of the module that is being recomputed.
        widened: the largest packed matrix (``lora.base``), unpacked.
        temporaries: scratch of the operators.
        micro_batches_in_flight: for each stage of the rank, the number of micro-batches in ``activations``.
    """

    moment: str
    pp_rank: int = 0
    layers: list[int] = field(default_factory=list)
    params: int = 0
    weights: int = 0
    moments: int = 0
    averages: int = 0
    gradients: float = 0.0
    gathered_weights: float = 0.0
    unsharded_gradients: float = 0.0
    inputs: int = 0
    receive_buffers: float = 0.0
    activations: float = 0.0
    head: float = 0.0
    recompute: float = 0.0
    widened: int = 0
    temporaries: float = 0.0
    micro_batches_in_flight: list[int] = field(default_factory=list)

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by kind of memory, such as ``activations``; ``peak`` is their sum."""
        return dict(zip(PARTS, _parts_of(self), strict=True))

    @property
    def peak(self) -> float:
        return sum(_parts_of(self))


class LayerKind(NamedTuple):
    """Properties in which a model's layers may differ; layers of one kind cost the same.

    Attributes:
        routed: the layer has routed experts.
        linear: its attention is a gated delta net.
        window: sliding window in tokens; 0: full attention.
        recomputed: modules that the backward pass recomputes.
        indexed: it has an indexer for sparse attention.
        ratio: positions that compressed attention pools into one key; 0: no pooling.
        mtp: it is a module for multi-token prediction.
    """

    routed: bool
    linear: bool
    window: int
    recomputed: frozenset[str]
    indexed: bool = False
    mtp: bool = False
    ratio: int = 0


def layer_kind(config: Config, layer: int) -> LayerKind:
    model = config.model
    return LayerKind(
        layer in model.moe_layers,
        is_linear(model.attention, layer),
        window_of(model.attention, layer),
        recomputed_modules(config.parallel, layer),
        has_indexer(model.attention, layer),
        layer >= model.num_layers,
        ratio_of(model.attention, layer),
    )


@dataclass
class Sizes:
    """Bytes that a rank of the resolved ``mesh`` holds of given parameters: weights, moments and gradients."""

    config: Config
    mesh: MeshShape

    def __post_init__(self) -> None:
        self.wide, self.compute, self.reduced = DTYPE_BYTES[self.config.train.dtype]

    def weights_each(self, param: Param) -> int:
        """Return the bytes of one stored element of ``param``.

        Trained parameters have at least float32. Frozen ones, and with ``optim.master_weights=stochastic`` all, have
        the compute dtype; routers and hyper-connections always have at least float32.
        """
        narrow = not param.trained or self.config.optim.master_weights == "stochastic"
        return self.compute if narrow and not param.spec.wide else self.wide

    def moments_each(self, param: Param) -> int:
        narrow = self.config.optim.moments == "bfloat16" and not param.spec.wide
        return self.compute if narrow else self.wide

    def weights(self, params: Sequence[Param]) -> int:
        """Return the bytes of the shards of ``params`` that the rank stores."""
        return sum(
            local_numel(param, self.mesh) * param.bytes_each(self.weights_each(param))
            for param in params
        )

    def moments(self, params: Sequence[Param]) -> int:
        return sum(
            self.num_moments(param) * local_numel(param, self.mesh) * self.moments_each(param)
            for param in trained(params)
        )

    def num_moments(self, param: Param) -> int:
        """Return the optimizer's number of moments: 1 for a matrix that Muon updates, else 2 (AdamW)."""
        return 1 if self.config.optim.algorithm == "muon" and param.spec.orthogonalized else 2

    def whole(self, params: Sequence[Param]) -> int:
        """Return the bytes of ``params`` once FSDP has gathered them.

        They are in the compute dtype, those with ``ParamSpec.wide`` in at least float32.
        """
        return sum(
            gathered_numel(param, self.mesh)
            * param.bytes_each(self.wide if param.spec.wide else self.compute)
            for param in params
        )

    def whole_gradients(self, params: Sequence[Param]) -> int:
        return self.reduced * sum(gathered_numel(param, self.mesh) for param in trained(params))


def trained(params: Sequence[Param]) -> list[Param]:
    return [param for param in params if param.trained]


def local_numel(param: Param, mesh: MeshShape, fsdp_rank: int = 0) -> int:
    """Return the number of elements of ``param`` that one FSDP rank stores.

    Args:
        fsdp_rank: index of the rank within (dp_shard, cp), whose last ranks may store less. It has no effect for
            routed experts: every rank of ep_shard stores equally much of them.
    """
    if param.expert:
        return gathered_numel(param, mesh) // mesh.ep_shard
    rows = rows_of(param, mesh)
    chunk = ceil(rows / mesh.fsdp)
    mine = max(0, min(chunk, rows - fsdp_rank * chunk))
    return mine * (gathered_numel(param, mesh) // rows)


def rows_of(param: Param, mesh: MeshShape) -> int:
    """Return the size of dim 0 of a parameter outside experts, after tp has sharded it."""
    return param.shape[0] // (mesh.tp if param.tp_dim(mesh.tp) == 0 else 1)


def gathered_numel(param: Param, mesh: MeshShape) -> int:
    """Return the number of elements of ``param``'s shard over tp, or over ep and etp, as FSDP gathers it."""
    if param.expert:
        return param.numel // (mesh.ep * (1 if param.whole_over_etp else mesh.etp))
    return param.numel // (1 if param.tp_dim(mesh.tp) is None else mesh.tp)


@dataclass(frozen=True)
class LayerPlan:
    """Bytes of one layer of a pipeline stage, for one micro-batch.

    Attributes:
        kept: activations that the micro-batch keeps for its backward pass.
        workspaces: temporary bytes of each part of the backward pass, in its order.
        weights, gradients: weights gathered by FSDP, and unsharded gradients.
        sharded: reduced gradients.
        experts: unsharded gradients of the routed experts, which are an FSDP unit of their own.
    """

    kept: float
    workspaces: list[Workspace]
    weights: int
    gradients: int
    sharded: int
    experts: int


@dataclass(frozen=True)
class StagePlan:
    """Bytes of one pipeline stage on one rank; it yields the memory at each moment of a pass.

    Attributes:
        layers: bytes of each layer.
        last: True if the stage has the output head.
        received, border: activations from the previous stage, and activations sent to the next one.
        shared: activations that a micro-batch keeps once for all layers: rotary angles and masks.
        head: workspace of the loss.
        head_kept: bytes kept from the loss to the backward pass: input of the last norm, both gradients of the head.
        rest_weights, rest_gradients, rest_sharded: gathered weights, unsharded gradients and reduced gradients outside
            layers: embedding, last norm, head.
        mtp: number of the stage's last layers that are modules for multi-token prediction.
        deeper: number of such modules on earlier stages, whose hidden states are sent along.
    """

    layers: list[LayerPlan]
    last: bool
    received: float
    border: float
    shared: float
    head: float
    head_kept: float
    rest_weights: int
    rest_gradients: int
    rest_sharded: int
    mtp: int = 0
    deeper: int = 0

    @cached_property
    def kept(self) -> float:
        """Bytes of activations that one micro-batch keeps on this stage from its forward to its backward pass."""
        return (
            self.shared
            + (self.head_kept * (1 + self.deeper) if self.last else self.border)
            + sum(layer.kept for layer in self.layers)
        )

    def loss(self, adds: bool, others: float = 0.0) -> RankMemory:
        """Return the memory at the end of a micro-batch's forward pass, where the loss is computed.

        Args:
            adds: True if unsharded gradients of earlier micro-batches exist.
            others: bytes of the activations of other micro-batches.
        """
        return RankMemory(
            "loss",
            activations=others + (self.kept - self.head_kept * self.last),
            head=self.head,
            unsharded_gradients=self.gradients * adds,
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

    def grown(self, num_layers: int) -> float:
        """Return the bytes of activations that a micro-batch keeps after the stage's first ``num_layers`` layers."""
        return self.shared + sum(layer.kept for layer in self.layers[:num_layers])

    def backward(
        self, adds: bool, reduces: bool, experts_ranks: int, merged: StagePlan | None = None
    ) -> Iterator[RankMemory]:
        """Yield this rank's memory at each moment of a backward pass that may be its peak.

        These are, for each layer from last to first, each part of its backward (``LayerPlan.workspaces``), then with
        ``reduces`` the reduction of its experts' gradients. A stage without layers yields a single moment.
        Activations of other micro-batches are excluded.

        Args:
            adds: True if gradients are added to existing unsharded gradients of earlier micro-batches.
            reduces: True if FSDP reduces the gradients of each layer at once and frees the layer's weights.
            experts_ranks: number of ranks over which FSDP shards the experts.
            merged: stage whose forward pass runs at the same time, layer by layer; None: there is none.
        """
        num_bytes = self.shared + (self.head_kept * self.deeper if self.last else self.border)
        weights = self.weights
        below = num_bytes + sum(layer.kept for layer in self.layers)
        # Without earlier gradients, those of the head come first.
        whole = self.gradients if adds else self.rest_gradients * self.last
        sharded = 0
        if not self.layers:  # the embedding or the head alone, or nothing
            yield RankMemory(
                "backward",
                activations=below,
                gathered_weights=weights,
                unsharded_gradients=self.gradients if adds else self.rest_gradients,
                temporaries=self.rest_gradients * adds,  # this micro-batch's gradients
            )
        for place, layer in enumerate(reversed(self.layers)):
            # Modules for multi-token prediction come before the main loss.
            held = below + self.head_kept * (self.last and place < self.mtp)
            held += 0.0 if merged is None else merged.grown(place + 1)
            common: dict[str, Any] = dict(
                gathered_weights=weights, unsharded_gradients=whole, gradients=sharded
            )
            for work in layer.workspaces:
                yield RankMemory(
                    "backward", activations=held - work.done,
                    recompute=work.recompute, temporaries=work.temporaries, **common,
                )  # fmt: skip
            if reduces and layer.experts:
                # The reduction copies gradients into one tensor; with a single rank it copies once
                # more.
                copies = 1 + (experts_ranks == 1) + (not adds)
                below_now = held - layer.workspaces[-1].done
                flat = layer.experts * copies
                yield RankMemory("reduction", activations=below_now, temporaries=flat, **common)
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
    before: int,
    last: bool,
) -> StagePlan:
    """Compute the bytes of the pipeline stage that stores ``params`` and runs ``layers``.

    Args:
        sizes: bytes of parameters on the rank; ``load``: sizes of a micro-batch.
        layers: numbers of the layers.
        before: tensors [tokens, H] from the previous stage: 1 + MTP modules on earlier stages; 0: this is the first.
        last: True if the stage has the output head.
    """
    model = config.model
    mesh = sizes.mesh
    compute = sizes.compute
    of_layer: dict[int | None, list[Param]] = {}
    for param in params:
        of_layer.setdefault(param.layer, []).append(param)
    rest = of_layer.get(None, [])
    kinds = {layer: layer_kind(config, layer) for layer in layers}
    modules = sum(kind.mtp for kind in kinds.values())
    head_trained = any(param.trained for param in rest if param.part in ("embedding", "head"))
    hidden = compute * load.tokens * load.tp * model.hidden_size
    head = -(-model.vocab_size // mesh.tp) * model.hidden_size * compute * head_trained
    plans: dict[Any, LayerPlan] = {}
    planned = []
    head_kept = 2 * hidden + head
    border = compute * load.tokens * model.residual_width * (mesh.pp > 1)
    # Modules for multi-token prediction have angles and masks of their own.
    again: dict[bool, dict[int, frozenset[str]]] = {} if kinds else {False: {}}
    for layer, kind in kinds.items():
        again.setdefault(kind.mtp, {})[layer] = kind.recomputed
    counted = tier_of(model).layer_bytes(config, mesh.ep, load.expert_rows)
    once, by_layer = counted if isinstance(counted, tuple) else (0.0, ())
    measured = dict(enumerate(by_layer))
    for layer in layers:
        # Equal layers are planned once. If names select the trained parameters, no two layers are
        # equal.
        alike = not (config.lora.rank or config.train.freeze or measured)
        key = kinds[layer] if alike else layer
        if key not in plans:
            recomputed = kinds[layer].recomputed
            layer_sizes = measured.get(layer)
            plan = _plan_layer(config, sizes, load, layer, of_layer[layer], recomputed, layer_sizes)
            if kinds[layer].mtp and last:
                plan = replace(plan, kept=plan.kept + head_kept)
            plans[key] = plan
        planned.append(plans[key])
    return StagePlan(
        layers=planned,
        last=last,
        received=border * before,
        border=border * (max(1, before) + modules),
        # Stages with modules for multi-token prediction keep the states that they received besides
        # the copies that they send on.
        shared=(once or sum(mask_bytes(config, load, alike) for alike in again.values()))
        + border * max(1, before) * (modules > 0 and not last),
        head=head_workspace_bytes(
            model,
            load.tokens,
            compute,
            mesh.tp,
            head_trained,
            load.on_cpu,
            config.kernels.loss == "triton",
        )
        * last,
        head_kept=head_kept,
        rest_weights=sizes.whole(rest),
        rest_gradients=sizes.whole_gradients(rest),
        rest_sharded=sizes.weights(trained(rest)),
        mtp=modules,
        deeper=max(0, before - 1),
    )


def _plan_layer(
    config: Config,
    sizes: Sizes,
    load: TokenLoad,
    layer: int,
    params: list[Param],
    again: frozenset[str],
    layer_sizes: tuple[float, float] | None,
) -> LayerPlan:
    model = config.model
    mesh = sizes.mesh
    experts = [param for param in trained(params) if param.expert]
    ffn = [param for param in trained(params) if param.part in ("dense_ffn", "shared_experts")]
    expert_numbers = sum(gathered_numel(param, mesh) for param in experts)
    ffn_numbers = sum(gathered_numel(param, mesh) for param in ffn)
    if layer_sizes is None:
        num_bytes = sum(layer_activation_bytes(model, layer, load, again).values())
        workspaces = layer_workspaces(model, layer, load, again, expert_numbers, ffn_numbers)
    else:
        num_bytes, work = layer_sizes
        again_bytes = 0.0
        if again:  # full recomputation keeps a layer's input and its choice of experts
            again_bytes = num_bytes - load.tokens * (
                load.number_bytes * model.hidden_size + 8.0 * model.num_experts_per_token
            )
        num_bytes -= again_bytes
        workspaces = [Workspace(0.0, again_bytes, work)]
    num_bytes += adapter_activation_bytes(config, layer, load, again)
    return LayerPlan(
        kept=num_bytes,
        workspaces=workspaces,
        weights=sizes.whole(params),
        gradients=sizes.whole_gradients(params),
        sharded=sizes.weights(trained(params)),
        experts=sizes.reduced * expert_numbers,
    )


# Parts of a layer that ``parallel.recompute`` may run again, and the part of their adapters.
_RUN_AGAIN = {"mlp": "dense_ffn", "shared_experts": "shared_experts", "moe": "routed_experts"}


def adapter_activation_bytes(
    config: Config, layer: int, load: TokenLoad, recompute: frozenset[str]
) -> float:
    """Return the bytes that the LoRA adapters of layer number ``layer`` keep for their backward pass.

    An adapter of rank r keeps r elements per token; of routed experts r per row (a token at one expert), for gate and
    up together, none for down. In ``recompute``, ``mlp``, ``shared_experts`` and ``moe`` drop those of adapters in
    them, ``full`` drops all. ``load`` has the sizes of the micro-batch on the rank.
    """
    again = {_RUN_AGAIN[name] for name in recompute if name in _RUN_AGAIN}
    num_bytes = 0.0
    for param in layer_params(config.model, layer):
        if is_target(param, config.lora) and param.part not in again and "full" not in recompute:
            if not param.name.endswith("experts.down_proj"):
                rows = load.expert_rows if param.expert else load.tokens
                num_bytes += config.lora.rank * rows * load.number_bytes
    return num_bytes
