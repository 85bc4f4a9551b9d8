"""``launch.timeout_s`` reaches the groups that do the work, not the world's alone, and not those of saves."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from automoe.comm.agreement import Ranks
from automoe.comm.process_groups import connect_process_groups, set_collective_timeouts
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.interop.gloo import use_one_worker
from automoe.interop.torch_private import process_groups
from automoe.parallel.mesh import build_meshes
from automoe.parallel.pipeline import receives_in_time
from automoe.verify.pool import RankPool


def leave_a_peer_waiting(axis: str) -> str:
    """Rank 0 enters a collective of ``axis`` that its peer never joins; returns how that ends."""
    shape = resolve_mesh(MeshConfig(pp=2, dp_shard=2, ep=2), None)
    meshes = build_meshes(shape, torch.device("cpu"), timedelta(seconds=500))
    connect_process_groups()
    set_collective_timeouts(2)
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


def waits_of_groups(mesh: dict[str, int]) -> tuple[int, int, list[list[float]]]:
    """How many groups there are and were opened, and after how many seconds each gives up, before and after."""
    build_meshes(resolve_mesh(MeshConfig(**mesh), None), torch.device("cpu"), timedelta(seconds=500))
    Ranks(timeout_s=1800)

    def waits() -> list[float]:
        backends = [group._get_backend(torch.device("cpu")) for group in process_groups()]
        return [backend.options._timeout.total_seconds() for backend in backends]

    opened, before = connect_process_groups(), waits()
    assert " process groups open in " in opened
    set_collective_timeouts(7)
    return int(opened.split()[0]), len(process_groups()), [before, waits()]


def waits_for_a_receive(blocking: bool) -> tuple[float, float]:
    """Rank 0's seconds until one arrives that is late while groups are young, and until one fails that never comes."""
    shape, cpu = resolve_mesh(MeshConfig(pp=2, dp_shard=1), None), torch.device("cpu")
    group = build_meshes(shape, cpu, timedelta(seconds=500)).group("pp")
    if dist.get_rank() == 1:
        time.sleep(1.0)
        dist.send(torch.ones(1), 0, group=group)
    seconds = []
    for timeout in (500, 0.5) if dist.get_rank() == 0 else ():
        set_collective_timeouts(timeout)
        began = time.monotonic()
        with receives_in_time(group, cpu), contextlib.suppress(RuntimeError) if seconds else contextlib.nullcontext():
            if blocking:  # looked up as torch's stages do when they agree
                dist.recv(torch.empty(1), src=1, group=group)
            else:
                schedules._wait_batch_p2p([dist.irecv(torch.empty(1), src=1, group=group)])
        seconds.append(time.monotonic() - began)
    return tuple(seconds)


def gives_up_making_a_group() -> str:
    use_one_worker(making_timeout=timedelta(seconds=0.5))
    try:
        if dist.get_rank() == 0:
            dist.new_group(timeout=timedelta(seconds=500))
    except RuntimeError as error:
        return str(error)
    finally:
        use_one_worker()
    return ""


def test_a_group_that_a_rank_does_not_come_to_make_is_given_up(ranks: RankPool) -> None:
    assert "timeout" in ranks.run(gives_up_making_a_group, 2)[0].lower()


@pytest.mark.parametrize("blocking", [False, True])
def test_a_receive_waits_as_long_as_a_collective_of_its_group(ranks: RankPool, blocking: bool) -> None:
    """Made with little time, groups would not wait for ranks that load; with much, a cut link is found too late."""
    late, never = ranks.run(waits_for_a_receive, 2, blocking)[0]
    assert 0.5 < late and 0.4 < never < 30


def test_all_groups_are_opened_and_wait_less_for_a_step_but_for_those_of_saves(ranks: RankPool) -> None:
    for count, made, (before, after) in ranks.run(waits_of_groups, 4, dict(pp=2, dp_shard=2, ep=2)):
        assert count == made == 1 + 2 + 3 + 1  # the world, two views (ep_shard is always there), saves
        assert before == [600, *[500] * 5, 1800] and after == [*[7] * 6, 1800]


def a_rank_missing(_: object) -> str:
    """What rank 0 hears where its sums are those of one rank less."""

    def one_less(ones: torch.Tensor, group: object) -> None:
        ones.fill_(dist.get_world_size() - 1)

    with mock.patch.object(dist, "all_reduce", one_less), pytest.raises(RuntimeError) as error:
        connect_process_groups()
    return str(error.value)


def test_a_group_that_does_not_add_up_is_an_error(ranks: RankPool) -> None:
    assert ranks.run(a_rank_missing, 2, None)[0] == "1 of the 2 ranks of default_pg answered"
