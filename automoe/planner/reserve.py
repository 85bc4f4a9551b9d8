"""GPU memory that no tensor of a step explains: context, communicators, fragmentation; and what is not modelled.

None of it can be computed. The numbers are of people who measured, and stand in the plan as a line of its own. On a CPU
there is none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.planner.memory import RankMemory

CONTEXT = 534 * 2**20  # of CUDA, with torch's kernels, on an H100 (torchcomms#777)
# A communicator, two A100s (nccl#964: 544 MB, and 688 MB of four); 8 H100s had 1.06 GB with the context (nccl#1685).
COMMUNICATOR = 544e6
# Its first all-to-all opens channels to every other GPU of the node: 3.28 GB for seven (nccl#1685).
ALL_TO_ALL_PEER = 3.28e9 / 7
NETWORK = 512 * 2**20  # and one buffer for all GPUs of other nodes (nccl#2363)
# Of what comes and goes. With expandable segments 1.83 GiB were reserved and free beside 75.3 (compressed-tensors#587,
# which then left 5%).
FRAGMENTATION = 0.05
_STANDING = ("weights", "moments", "averages", "inputs")  # allocated once


@dataclass(frozen=True)
class Reserve:
    """Bytes on one rank beside the peak."""

    context: float = 0.0
    communicators: float = 0.0
    fragmentation: float = 0.0

    @property
    def total(self) -> float:
        return self.context + self.communicators + self.fragmentation


def reserve(config: Config, mesh: MeshShape, rank: RankMemory) -> Reserve:
    """What to leave free beside the peak of ``rank``."""
    if config.cluster.gpu == "cpu":
        return Reserve()
    moving = rank.peak - sum(rank.parts[name] for name in _STANDING)
    return Reserve(CONTEXT, _communicators(config, mesh), FRAGMENTATION * moving)


def needed(config: Config, mesh: MeshShape, ranks: list[RankMemory]) -> float:
    """Bytes of a GPU that the rank with the most of peak and reserve together takes."""
    return max(rank.peak + reserve(config, mesh, rank).total for rank in ranks)


def process_groups(config: Config, mesh: MeshShape) -> list[tuple[str, int]]:
    """(name, ranks) of every communicator of a rank, those within and between nodes with them."""
    named = mesh.process_groups()
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
    # The world of one axis alone is that axis's group too, but another communicator.
    total = COMMUNICATOR * len(named) + NETWORK * (mesh.world_size > node)
    sizes = dict(named)
    if config.moe.dispatcher in ("alltoall", "hierarchical"):
        for axis in ("ep", "etp"):
            near = min(sizes.get(axis, 1), max(1, node // mesh.stride("moe", axis)))
            total += ALL_TO_ALL_PEER * (near - 1)
    return total


def not_modelled(config: Config) -> Iterator[str]:
    """What the plan has no number for, a line each. A line is about memory unless it says otherwise."""
    if config.moe.dispatcher == "deepep":
        yield "moe.dispatcher=deepep: DeepEP's own buffers for NVLink and RDMA"
    if config.moe.experts in ("te", "quack"):
        kept = (
            "the gathered rows and both factors of the activation"
            if config.moe.experts == "te"
            else "scratch"
        )
        yield f"moe.experts={config.moe.experts}: counted as grouped_mm, without {kept}"
    if config.kernels.attention == "te" or config.kernels.norm == "te":
        yield "transformer-engine's workspaces: its kernels are counted as torch's"
    if config.train.fp8 != "off":
        yield f"train.fp8={config.train.fp8}: codes and scales of the product at work, a byte a number of both operands"
    if config.train.compile:
        yield "train.compile: activations are counted as without"
