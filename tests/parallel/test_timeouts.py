"""``launch.timeout_s`` reaches the groups that do the work, not the world's alone."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.parallel.mesh import build_meshes
from automoe.verify.pool import RankPool


def leave_a_peer_waiting(axis: str) -> str:
    """Rank 0 enters a collective of ``axis`` that its peer never joins; returns how that ends."""
    shape = resolve_mesh(MeshConfig(pp=2, dp_shard=2, ep=2), None)
    meshes = build_meshes(shape, torch.device("cpu"), timedelta(seconds=2))
    if dist.get_rank() != 0:
        return ""
    try:
        dist.all_reduce(torch.zeros(1), group=meshes.group(axis))
    except RuntimeError as error:
        return str(error)
    return "the collective came to an end"


@pytest.mark.faults
def test_a_collective_without_its_peer_times_out(ranks: RankPool) -> None:
    for axis in ("pp", "dp_shard", "ep"):
        message = ranks.run(leave_a_peer_waiting, 4, axis)[0]
        assert "imed out" in message or "timeout" in message.lower(), (axis, message)
