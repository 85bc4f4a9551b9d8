"""Simulated pipelines against closed forms; collectives against the ranks of real meshes."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import pytest

from automoe.config.mesh_shape import MeshShape
from automoe.config.pipeline import rank_of_stage
from automoe.planner.communication import Group, all_to_all, dispatch_once, distinct, gather
from automoe.planner.machine import Constants, Machine
from automoe.planner.schedule import HIDDEN, StageTimes, simulate, stretch
from tests.support.configurations import quick_config

F, B = 1.0, 2.0


def idle(schedule: str, pp: int, stages_per_rank: int, count: int) -> float:
    """Time beyond a rank's own work, over that of one micro-batch on it."""
    stages = (StageTimes(F / stages_per_rank, B / stages_per_rank),) * (pp * stages_per_rank)
    return (simulate(schedule, stages, pp, count) - count * (F + B)) / (F + B)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_bubbles_are_those_of_the_closed_forms(pp: int) -> None:
    # arXiv 2104.04473, section 2.2.
    for schedule in ("GPipe", "1F1B"):
        assert idle(schedule, pp, 1, 3 * pp) == pytest.approx(pp - 1)
    for stages_per_rank in (2, 4):
        assert idle("Interleaved1F1B", pp, stages_per_rank, 2 * pp) == pytest.approx((pp - 1) / stages_per_rank)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_dual_pipe_v_has_the_bubble_of_its_formula(pp: int) -> None:
    # (p-1)/2 (F&B + B - 3W) of chunks half as long on twice the stages; without overlap F&B is F + B.
    stages = (StageTimes(F, B),) * (2 * pp)
    bubble = simulate("DualPipeV", stages, pp, 4 * pp) - 4 * pp * 2 * (F + B)
    assert bubble == pytest.approx((pp - 1) * (F + B + B - 3 * B / 2) / 2)


def test_all_to_alls_hide_behind_other_micro_batches() -> None:
    sent = 1.0
    pair = F + B - HIDDEN * sent
    for pp, per_rank, count in ((4, 1, 32), (2, 1, 8), (1, 1, 8), (4, 2, 16), (8, 4, 32)):
        stages = (StageTimes(F / per_rank, B / per_rank, sent / per_rank),) * (pp * per_rank)
        hidden = simulate("Interleaved1F1B" if per_rank > 1 else "1F1B", stages, pp, count, overlap=True)
        # p (F+B) + (m-p) (F&B) + (p-1)/v (F&B)
        assert hidden == pytest.approx(pp * (F + B) + (count - pp + (pp - 1) / per_rank) * pair)
    pp, count = 4, 32
    stages = (StageTimes(F, B, sent),) * pp
    for schedule in ("Interleaved1F1B", "DualPipeV"):
        both = [simulate(schedule, stages * 2, pp, count, overlap=overlap) for overlap in (False, True)]
        assert both[1] == pytest.approx(both[0] - 2 * count * HIDDEN * sent, rel=0.1)


def test_the_slowest_stage_and_the_border_set_the_pace() -> None:
    stages = (StageTimes(F, B), StageTimes(F, B), StageTimes(2 * F, 2 * B), StageTimes(F, B))
    assert simulate("1F1B", stages, 4, 64) == pytest.approx(64 * 2 * (F + B) + 3 * (F + B), rel=0.02)
    even = (StageTimes(F, B),) * 4
    assert simulate("1F1B", even, 4, 4, border=0.5) >= simulate("1F1B", even, 4, 4) + 2 * 3 * 0.5


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipeV"])
def test_many_micro_batches_are_the_rounds_that_repeat(schedule: str) -> None:
    pp, per_rank = 4, 1 if schedule == "1F1B" else 2
    stages = [StageTimes(F + 0.1 * i, B + 0.2 * i) for i in range(pp * per_rank)]
    for count in (4 * pp, 16 * pp):
        whole = simulate(schedule, tuple(stages), pp, count)
        ranks = [
            [stages[i] for i in range(len(stages)) if rank_of_stage(i, pp, schedule) == rank] for rank in range(pp)
        ]
        busy = count * max(sum(s.forward + s.backward for s in held) for held in ranks)
        assert busy * stretch(schedule, stages, pp, count) == pytest.approx(whole, rel=5e-3)


def test_rounds_take_at_least_the_work_of_the_busiest_rank() -> None:
    """With uneven stages its queue fills only after more rounds than are simulated; passes that overlap take less than it."""
    stages = [StageTimes(2.0, 2.0), StageTimes(1.0, 2.0), StageTimes(2.0, 2.0), StageTimes(2.0, 2.0)]
    whole = simulate("Interleaved1F1B", tuple(stages), 2, 80)
    assert 80 * 8.0 * stretch("Interleaved1F1B", stages, 2, 80) == pytest.approx(whole, rel=5e-3)
    exchanging = [StageTimes(2.0, 4.0, 2.0)] * 4
    merged = simulate("Interleaved1F1B", tuple(exchanging), 2, 80, overlap=True)
    busy = 80 * 12.0
    assert merged < 0.95 * busy
    assert busy * stretch("Interleaved1F1B", exchanging, 2, 80, overlap=True) == pytest.approx(merged, rel=5e-3)


def test_halves_fill_the_bubble_where_they_take_as_long_as_a_forward_pass() -> None:
    """(p-1) (F+I-W) of arXiv 2401.10241; ZBV would have none if the first stage had a half without its weights."""
    pp, count = 4, 16
    stages = (StageTimes(F, 2 * F, halves=(F, F)),) * (2 * pp)
    work = count * 2 * 3 * F
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert simulate(name, stages, pp, count) - work == pytest.approx((pp - 1) * F), name
    for name in ("Interleaved1F1B", "LoopedBFS"):
        assert simulate(name, stages, pp, count) - work == pytest.approx((pp - 1) * 3 * F), name


@pytest.mark.parametrize("gpus_per_node", [2, 4, 8])
def test_groups_lie_where_the_ranks_of_a_mesh_do(gpus_per_node: int) -> None:
    for pp, tp, cp, ep, etp in product((1, 2), (1, 2, 4), (1, 2), (1, 4, 8), (1, 2)):
        world = 32
        rest, moe = world // (pp * tp * cp), world // pp // (ep * etp)
        mesh = MeshShape(
            pp=pp, dp_replicate=1, dp_shard=rest, cp=cp, tp=tp, ep_replicate=1, ep_shard=moe, ep=ep, etp=etp
        )
        for view in ("default", "moe"):
            for axis in mesh.axes(view):
                group = Group.of(getattr(mesh, axis), mesh.stride(view, axis), gpus_per_node)
                ranks = mesh.groups(view, axis)
                assert group.nodes == fmean(len({rank // gpus_per_node for rank in one}) for one in ranks)
                off = fmean(
                    sum(a // gpus_per_node != b // gpus_per_node for b in one) / len(one) for one in ranks for a in one
                )
                assert group.off_node == pytest.approx(off)


def machine() -> Machine:
    config = quick_config("qwen3_30b_a3b", [])
    return Machine.of(config, Constants.load("prior"))


@pytest.mark.parametrize(("ep", "measured"), [(8, 1265e-6), (16, 5774e-6), (32, 8059e-6), (64, 9164e-6)])
def test_all_to_alls_take_what_was_measured(ep: int, measured: float) -> None:
    # H 7168, 4,096 tokens, K 8, two bytes; H100, NCCL.
    cost = all_to_all(machine(), Group.of(ep, 1, 8), 4096 * 8 * 7168 * 2)
    assert cost.seconds == pytest.approx(measured, rel=0.04)
    assert cost.bytes == pytest.approx(4096 * 8 * 7168 * 2 * (1 - 1 / ep))


def test_collectives_send_what_they_must() -> None:
    here = machine()
    assert gather(here, Group(1, 1), 1e9).bytes == 0
    assert gather(here, Group(8, 1), 1e9).bytes == pytest.approx(7 / 8 * 1e9)
    # Eight ranks of a node share its adapters, one has its own alone.
    wide, narrow = gather(here, Group(64, 8), 1e9), gather(here, Group(8, 8), 1e9)
    assert narrow.seconds > 4 * wide.seconds - gather(here, Group(8, 1), 1e9).seconds
    assert distinct(8, 1) == 1 and distinct(1, 8) == pytest.approx(1)
    whole, once = all_to_all(here, Group(64, 8), 8e9), dispatch_once(here, Group(64, 8), 1e9, 8)
    limited = dispatch_once(here, Group(64, 8), 1e9, 8, most_nodes=4)
    assert limited.seconds < once.seconds < whole.seconds
