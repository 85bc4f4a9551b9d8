"""Inputs of the time model of a layer (``Place``), and its results (``Pass``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from automoe.config.batch import BatchPlan
from automoe.config.context import expanded_width, gathers_latents
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.planner.communication import NOTHING, Cost, Group
from automoe.planner.machine import Machine

AXES = ("tp", "cp", "ep", "etp", "fsdp", "pp")


@dataclass
class Pass:
    """Predicted forward or backward pass of a layer or a pipeline stage on one rank, in seconds.

    Attributes:
        compute: seconds of computation; ``parts`` has them by module.
        communication: exposed cost of collectives, by mesh axis.
        idle: seconds in which the GPU waits for kernel launches.
        weights: seconds of a backward pass in which gradients of weights are computed, except those
            in ``experts``.
        experts: seconds of a backward pass in which the routed experts' matmuls compute both
            gradients, of rows and of weights; 0 if they can be computed apart (``Place.fused``).
        again: {module: {mesh axis: cost}} of collectives that recomputing the module repeats.
    """

    compute: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    communication: dict[str, Cost] = field(default_factory=dict)
    idle: float = 0.0  # seconds that the GPU waits for kernel launches
    # Parts of a backward pass: gradients of all weights but the experts', and gradients of experts.
    weights: float = 0.0
    experts: float = 0.0
    # Communication that the recomputation of a module repeats: module -> axis -> cost.
    again: dict[str, dict[str, Cost]] = field(default_factory=dict)

    def add(self, part: str, seconds: float) -> None:
        self.compute += seconds
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def send(self, axis: str, cost: Cost) -> None:
        if cost is not NOTHING:
            self.communication[axis] = self.communication.get(axis, NOTHING) + cost

    @property
    def seconds(self) -> float:
        return self.compute + sum(cost.seconds for cost in self.communication.values()) + self.idle


class Passes(NamedTuple):
    """Predicted forward and backward pass of a layer or a pipeline stage."""

    forward: Pass
    backward: Pass

    def add(self, part: str, forward: float, backward: float) -> None:
        self.forward.add(part, forward)
        self.backward.add(part, backward)

    def send(self, axis: str, forward: Cost, backward: Cost) -> None:
        self.forward.send(axis, forward)
        self.backward.send(axis, backward)


def busiest(config: Config, mesh: MeshShape, machine: Machine) -> float:
    """Return the rows that experts compute on the busiest rank, as a multiple of the mean.

    It is 1 without expert parallelism, with ``moe.pad_to_capacity`` (each expert computes as many)
    and with ``moe.gate=balanced``; else ``imbalance`` of ``constants.toml``, limited by
    ``moe.capacity_factor``.
    """
    moe = config.moe
    busy = 1.0 if moe.gate == "balanced" else machine.constants.imbalance
    if mesh.ep == 1 or moe.pad_to_capacity:
        return 1.0
    return min(busy, max(1.0, moe.capacity_factor or busy))


def key_of(config: Config) -> str:
    """Return a cache key: text that is equal for equal model, LoRA, trained parameters and dtype."""
    train = config.train
    return repr((config.model, config.lora, train.freeze, train.trainable, train.dtype))


@dataclass(frozen=True)
class Place:
    """Inputs of the time model: everything on which the time of a layer on one rank depends.

    Attributes:
        config, mesh: the configuration and its resolved mesh.
        machine: speeds of the GPU and its links.
        batch: sizes of a step.
        fused: matmuls add weight gradients to FSDP's float32 gradients themselves.
        gradient_bytes: bytes per gradient element in FSDP's reduction; 0: 4, or 8 in float64.
        read_key: text that the property ``key`` shall return, to save computing it; empty: compute it.
    """

    config: Config
    mesh: MeshShape
    machine: Machine
    batch: BatchPlan
    fused: bool = False  # True if matmuls add to the float32 gradients themselves
    gradient_bytes: int = 0  # bytes per gradient element in FSDP's reduction; 0: automoe's width
    read_key: str = ""  # ``key`` if it is known

    @property
    def fused_experts(self) -> bool:
        """True if the experts' matmuls add weight gradients to FSDP's float32 gradients."""
        return self.fused or self.config.parallel.expert_wgrad != "autograd"

    @property
    def tokens(self) -> int:
        return self.batch.tokens_per_micro_batch

    @cached_property
    def rows(self) -> float:
        """(token, expert) pairs of a micro-batch that the experts of the busiest rank compute."""
        return busiest(self.config, self.mesh, self.machine) * self.batch.expert_rows_per_rank

    @cached_property
    def key(self) -> str:
        """Text that is equal for equal model, LoRA, trainable parameters and dtype: ``layer_weights``' key."""
        return self.read_key or key_of(self.config)

    @property
    def gathers_latents(self) -> bool:
        """True if cp gathers MLA's latents instead of the keys and values that they expand to."""
        config = self.config
        attention = config.model.attention
        if self.mesh.cp == 1 or config.parallel.context != "gather" or attention.kind != "mla":
            return False
        device = "cpu" if config.cluster.on_cpu else "cuda"
        expanded = expanded_width(attention, self.mesh.tp)
        return gathers_latents(attention.kv_lora_rank, expanded, device, self.machine.number_bytes)

    def group(self, axis: str) -> Group:
        """Return size, number of nodes and stride of the groups of mesh axis ``axis``.

        ``axis`` may also be ``fsdp``: dp_shard and cp together.
        """
        return _group(self.mesh, axis, self.machine.gpus_per_node)


@lru_cache(maxsize=1000)
def _group(mesh: MeshShape, axis: str, node: int) -> Group:
    if axis == "fsdp":
        return Group.of(mesh.fsdp, mesh.tp, node)
    view = "moe" if axis.startswith("e") else "default"
    return Group.of(getattr(mesh, axis), mesh.stride(view, axis), node)
