"""GPU memory besides a step's tensors: CUDA context, communicators, fragmentation.

None of this memory can be computed: the numbers are published measurements, and the plan shows them
on a line of their own. A CPU needs no reserve. ``not_modelled`` lists settings that the plan does
not model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from automoe.config.batch import BatchPlan
from automoe.config.mesh_shape import NEIGHBOUR, MeshShape, exchanges_heads
from automoe.config.pipeline import SINGLE
from automoe.config.recipe_args import GRPOArgs
from automoe.config.schema import Config
from automoe.config.tier import tier_of
from automoe.planner.step_memory import RankMemory

CONTEXT = 534 * 2**20  # bytes of a CUDA context with torch's kernels, H100 (torchcomms#777)
# One NCCL communicator of two A100s takes 544 MB, of four 688 MB (nccl#964); 8 H100s took 1.06 GB
# with the context (nccl#1685).
COMMUNICATOR = 544e6
# A communicator's first all-to-all opens channels to every other GPU of its node: 3.28 GB for seven
# GPUs (nccl#1685).
ALL_TO_ALL_PEER = 3.28e9 / 7
NETWORK = 512 * 2**20  # bytes of one buffer on each GPU for all GPUs of other nodes (nccl#2363)
# Share of temporary tensors that fragmentation takes. With expandable segments, 1.83 GiB were
# reserved but free while 75.3 GiB were in use (compressed-tensors#587, which then left 5% free).
FRAGMENTATION = 0.05
# These fields of RankMemory are allocated once and never fragment.
_STANDING = ("weights", "moments", "averages", "inputs")


@dataclass(frozen=True)
class Reserve:
    """GPU memory that one rank needs besides the tensors of its peak, in bytes.

    Attributes:
        context: the CUDA context.
        communicators: buffers of NCCL.
        fragmentation: gaps in the allocator's segments.
    """

    context: float = 0.0
    communicators: float = 0.0
    fragmentation: float = 0.0

    @property
    def total(self) -> float:
        return self.context + self.communicators + self.fragmentation


def reserve(config: Config, mesh: MeshShape, rank: RankMemory) -> Reserve:
    """Return the bytes to leave free on a GPU beyond ``rank``'s peak: context, communicators, fragmentation.

    They are zeros on a CPU.
    """
    if config.cluster.on_cpu:
        return Reserve()
    moving = rank.peak - sum(rank.parts[name] for name in _STANDING)
    return Reserve(CONTEXT, _communicators(config, mesh), FRAGMENTATION * moving)


def standing_reserve(config: Config, mesh: MeshShape) -> float:
    """Return the bytes of CUDA context and communicators: the reserve without fragmentation."""
    return (not config.cluster.on_cpu) * (CONTEXT + _communicators(config, mesh))


def needed(config: Config, mesh: MeshShape, ranks: list[RankMemory]) -> float:
    """Return the bytes of GPU memory that the fullest rank needs: the largest sum of peak and ``reserve``.

    Args:
        ranks: memory of pipeline ranks, each at its fullest moment.
    """
    return max(rank.peak + reserve(config, mesh, rank).total for rank in ranks)


def process_groups(config: Config, mesh: MeshShape) -> list[tuple[str, int]]:
    """Return (name, number of ranks) of each communicator that a rank is in.

    Names are ``world``, mesh axes, ``fsdp`` (dp_shard x cp), ``stage`` (a pipeline stage), ``neighbour`` (with
    either neighbour in a pipeline of several stages per rank), and with a hierarchical dispatcher
    ``ep_nodes`` and ``ep_node`` (across and within nodes).
    """
    named = mesh.process_groups()
    if mesh.pp > 1 and config.parallel.schedule not in SINGLE:
        named += [(NEIGHBOUR, 2)] * 2
    if config.moe.dispatcher == "hierarchical" and mesh.ep > 1:
        per_node = mesh.ep_per_node(config.cluster.gpus_per_node)
        levels = ("ep_nodes", mesh.ep // per_node), ("ep_node", per_node)
        named += levels if min(level[1] for level in levels) > 1 else ()
    return named


def _communicators(config: Config, mesh: MeshShape) -> float:
    if mesh.world_size == 1:
        return 0.0
    node = config.cluster.gpus_per_node
    named = process_groups(config, mesh)
    total = COMMUNICATOR * len(named) + NETWORK * (mesh.world_size > node)
    if config.moe.dispatcher in ("alltoall", "hierarchical"):
        for axis in ("ep", "etp"):
            total += _peers(mesh, "moe", axis, node)
    if exchanges_heads(config, mesh):
        total += _peers(mesh, "default", "cp", node)
    return total


def _peers(mesh: MeshShape, view: str, axis: str, node: int) -> float:
    """Return the bytes on one GPU of NCCL's channels to its node's other GPUs for all-to-alls of ``axis``.

    Args:
        view: mesh with the axis: 'default' or 'moe'.
        node: GPUs per node.
    """
    near = min(getattr(mesh, axis), max(1, node // mesh.stride(view, axis)))
    return ALL_TO_ALL_PEER * (near - 1)


def not_modelled(config: Config, mesh: MeshShape, batch: BatchPlan) -> Iterator[str]:
    """Yield a line for the user on each setting of ``config`` whose cost the plan leaves out.

    The cost is memory unless the line names another one.
    """
    why = tier_of(config.model).layer_bytes(config, mesh.ep, batch.expert_rows_per_rank)
    if isinstance(why, str):
        yield f"{config.model.architecture}: counted as native layers this wide, because {why}"
    if config.moe.dispatcher == "deepep":
        yield "moe.dispatcher=deepep: DeepEP's own buffers for NVLink and RDMA"
    if config.moe.experts == "te":
        buffers = "the gathered rows and both factors of the activation"
        yield f"moe.experts=te: counted as grouped_mm, without {buffers}"
    if config.kernels.attention == "te" or config.kernels.norm == "te":
        yield "transformer-engine's workspaces: its kernels are counted as torch's"
    if config.kernels.attention == "flex":
        yield "time of kernels.attention=flex: rows are counted as one document each"
    if config.train.fp8 != "off":
        yield f"train.fp8={config.train.fp8}: scales, and codes of the product at work, a byte a number"
    if isinstance(args := config.recipe_args, GRPOArgs):
        if args.sampler == "generate":
            yield "recipe_args.sampler=generate: a whole copy of the model on every rank, and the time of answers"
        else:
            yield f"recipe_args.sampler={args.sampler}: the engine, and the time of answers"
        if args.kl and not config.lora.rank:
            yield "recipe_args.kl: the first weights, sharded like the trained ones"
        if args.teacher:
            yield "recipe_args.teacher: its weights, sharded like the trained ones"
    if config.train.compile:
        yield "train.compile: activations are counted as without it"
