"""The dense mesh and the mesh of experts, two DeviceMeshes over the same ranks, and their groups."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from automoe.config.mesh_shape import DEFAULT_AXES, DISPATCH_AXES, NEIGHBOUR, MeshShape
from automoe.interop.torch_private import concatenate_meshes, flatten_mesh, set_group_timeout

# FSDP needs a mesh even where it has nothing to cut, for mixed precision and deferred reduction.
_ALWAYS_PRESENT = ("dp_shard", "ep_shard")


@dataclass(frozen=True)
class Meshes:
    """Device meshes of a run: one for experts, one for all other parameters, over the same ranks.

    Attributes:
        shape: sizes of all axes.
        default: pp x dp_replicate x dp_shard x cp x tp, axes of size one left out (dp_shard stays).
        moe: pp x ep_replicate x ep_shard x ep x etp, axes of size one left out (ep_shard stays).
        fsdp: mesh over which FSDP shards non-expert parameters: dp_shard and cp flattened; with
            dp_replicate as a first axis if that has several ranks.
        expert_fsdp: mesh over which FSDP shards experts: ep_shard; with ep_replicate as a first
            axis if that has several ranks.
        timeout: timeout of every group made here; None: torch's default.
        stage: group of the ranks of this rank's pipeline stage; None: this rank is alone.
    """

    shape: MeshShape
    default: DeviceMesh
    moe: DeviceMesh
    fsdp: DeviceMesh
    expert_fsdp: DeviceMesh
    timeout: timedelta | None  # timeout of every group made here; None: torch's default
    stage: dist.ProcessGroup | None  # the ranks of this rank's pipeline stage; None: it is alone

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return this rank's group along ``axis``, such as "tp" or "ep"; None if the axis has one rank."""
        mesh = self.submesh(axis)
        return None if mesh is None else mesh.get_group()

    def submesh(self, axis: str) -> DeviceMesh | None:
        """Return the submesh of one axis, such as "cp"; None if the axis has one rank."""
        if getattr(self.shape, axis) == 1:
            return None
        return (self.default if axis in DEFAULT_AXES else self.moe)[axis]

    def coordinate(self, axis: str) -> int:
        """Return this rank's position on ``axis``, such as "tp" or "ep"; 0 if the axis has one rank."""
        view = "default" if axis in DEFAULT_AXES else "moe"
        return self.shape.coordinates(dist.get_rank(), view)[axis]

    def stage_group(self) -> dist.ProcessGroup | None:
        """Return the group of all ranks of this pipeline stage; None if this rank is alone."""
        return self.stage

    def pipeline_group(self) -> dist.ProcessGroup:
        """Return this rank's group along pp; with pp = 1 a group of this rank alone."""
        group = self.group("pp")
        return group or _make_group("pp", [dist.get_rank()], self.timeout)

    def pipeline_members(self, places: list[int]) -> dist.ProcessGroup:
        """Return a group of those ranks of this rank's pipeline that have the pp coordinates ``places``.

        A rank with another coordinate gets a group of itself alone. Collective over the world.
        """
        ranks = _ranks_along(self.shape, "default", "pp")
        members = places if self.coordinate("pp") in places else [self.coordinate("pp")]
        return _make_group("members", [ranks[place] for place in members], self.timeout)

    def pipeline_neighbours(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return two new groups: with the pipeline rank before this one, and with the one after it.

        The first and the last rank are neighbours too. With pp = 2 both groups have the same two
        ranks. NCCL runs a group's sends and receives in the order in which they were started, so
        that in one group of all pipeline ranks an early receive delays a later send to another
        rank. Collective over the world.
        """
        pp = self.shape.pp
        place = self.coordinate("pp")
        ranks = _ranks_along(self.shape, "default", "pp")
        before = behind = None
        # NCCL splits the world, so groups are made in rounds: in each, every rank is at one end of
        # an edge of the ring, or alone.
        for edges in (range(0, pp - 1, 2), range(1, pp, 2), range(pp - 1, pp - 1 + pp % 2)):
            edge = next((e for e in edges if place in (e, (e + 1) % pp)), None)
            ends = [place] if edge is None else [edge, (edge + 1) % pp]
            group = _make_group(NEIGHBOUR, [ranks[end] for end in ends], self.timeout)
            if edge == place:
                behind = group
            elif edge is not None:
                before = group
        assert before is not None and behind is not None
        return before, behind

    @property
    def dp_rank(self) -> int:
        """Index of the slice of the global batch's rows that this rank reads, 0 ... dp - 1."""
        return self.coordinate("dp_replicate") * self.shape.dp_shard + self.coordinate("dp_shard")


def build_meshes(
    shape: MeshShape, device: torch.device, timeout: timedelta | None = None
) -> Meshes:
    """Return the meshes and groups of the initialised process group's ranks. Collective.

    Args:
        device: device of this rank, whose type the meshes get.
        timeout: time after which a collective of any of the meshes' groups fails. Groups do not
            inherit the world's timeout: by default they wait as long as torch lets new groups wait.

    Raises:
        ValueError: the process group and the shape differ in their number of ranks.
    """
    if dist.get_world_size() != shape.world_size:
        sizes = "*".join(map(str, shape.sizes("default")))
        raise ValueError(
            f"pp*dp_replicate*dp_shard*cp*tp = {sizes} = {shape.world_size}, but there are "
            f"{dist.get_world_size()} ranks"
        )

    def view(name: str) -> DeviceMesh:
        axes = shape.axes(name)
        present = [axis for axis in axes if getattr(shape, axis) > 1 or axis in _ALWAYS_PRESENT]
        layout = torch.arange(shape.world_size).view([getattr(shape, axis) for axis in present])
        groups = [_make_group(axis, _ranks_along(shape, name, axis), timeout) for axis in present]
        return DeviceMesh.from_group(groups, device.type, layout, mesh_dim_names=tuple(present))

    default = view("default")
    moe = view("moe")
    fsdp = flatten_mesh(default["dp_shard", "cp"], "fsdp") if shape.cp > 1 else default["dp_shard"]
    if shape.dp_replicate > 1:
        fsdp = concatenate_meshes([default["dp_replicate"], fsdp])
    expert_fsdp = moe["ep_replicate", "ep_shard"] if shape.ep_replicate > 1 else moe["ep_shard"]
    if timeout is not None:
        for group in fsdp.get_all_groups():  # torch itself made the group of a flattened axis
            set_group_timeout(timeout, group)
    axes = [axis for axis in DEFAULT_AXES if axis != "pp" and getattr(shape, axis) > 1]
    stage = default[axes[0]].get_group() if axes else None
    if len(axes) > 1:
        size = shape.world_size // shape.pp
        first = dist.get_rank() // size * size
        stage = _make_group("stage", list(range(first, first + size)), timeout)
    return Meshes(shape, default, moe, fsdp, expert_fsdp, timeout, stage)


def _ranks_along(shape: MeshShape, view: str, axis: str) -> list[int]:
    """Return this rank and those that differ from it only in the coordinate on ``axis``.

    Args:
        shape: sizes of all axes.
        view: which of the two meshes: "default" or "moe".
        axis: axis of that mesh, such as "tp".
    """
    stride = shape.stride(view, axis)
    size = getattr(shape, axis)
    rank = dist.get_rank()
    first = rank - rank // stride % size * stride
    return list(range(first, first + size * stride, stride))


def _make_group(name: str, ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """Return a process group of ``ranks``, this one among them. Collective over the world.

    It is new, except that the world's own group is returned if ``ranks`` are all ranks and ``name``
    is neither an axis over which tokens are dispatched nor that of pipeline neighbours.

    DeviceMesh does not make the groups, since it would split every backend of a world that is
    bound to a device, and give the gloo backend torch's default options. Torch names a group by
    its ranks and the number of groups that this rank has made, so all ranks must make equally many
    groups.

    Args:
        name: name of the group in logs.
        timeout: timeout of the group's collectives; None is torch's default.
    """
    if len(ranks) == dist.get_world_size() and name not in (*DISPATCH_AXES, NEIGHBOUR):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return dist.new_group(ranks, timeout, use_local_synchronization=True, group_desc=f"mesh_{name}")
