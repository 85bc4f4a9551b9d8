"""A step of DeepSeek-V3's configuration on the mesh published for 1,024 ranks, with tiny widths, as single ranks see it:
who talks to whom, how often and with how many bytes, against the counts that plans and papers use.

Torch's fake process group answers at once and moves nothing, so routing is even and numbers mean nothing; the model, its
61 layers, the schedule, FSDP, the optimizer's norm and the statistics are those of a run.
"""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from automoe.comm.collectives import DispatchGroup
from automoe.comm.tokens import StepBatch
from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.schema import Config
from automoe.model.decoder import Decoder
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from automoe.verify.fake_world import fake_world
from automoe.verify.pool import leave_world
from tests.support.communication import CommunicationLog, Message
from tests.support.configurations import quick_config

ROWS, SEQ, HIDDEN, BYTES = 512, 32, 32, 4
TINY = f"""
    model.hidden_size={HIDDEN} model.intermediate_size=64 model.moe_intermediate_size=16 model.vocab_size=64
    model.attention.num_heads=4 model.attention.q_lora_rank=16 model.attention.kv_lora_rank=16
    model.attention.qk_nope_head_dim=8 model.attention.qk_rope_head_dim=8 model.attention.v_head_dim=8
    train.seq_len={SEQ} train.global_batch_size={ROWS} train.dtype=float32 moe.gate=balanced moe.experts=loop
    data=benchmark launch.device=cpu mesh=steady_dsv3_671b mesh.pp=8 mesh.tp=2 mesh.dp_shard=64 mesh.ep=64 parallel.stages_per_rank=4
    parallel.recompute=[layernorm,mla_up_proj,mlp,moe]
""".split()


def flagship() -> tuple[Config, MeshShape]:
    config = quick_config("dsv3_671b", TINY)
    return config, resolve_mesh(config.mesh, None)


@functools.cache
def step_of(rank: int) -> tuple[list[Message], dict[int, Decoder]]:
    """What ``rank`` sends in its first step, in order, and its stages."""
    config, shape = flagship()
    cpu, rows = torch.device("cpu"), ROWS // shape.dp
    tokens, index = torch.zeros(rows, SEQ, dtype=torch.int64), torch.arange(SEQ).expand(rows, -1)
    with ExitStack() as stack:
        stack.enter_context(fake_world(rank, shape.world_size))
        meshes = build_meshes(shape, cpu)
        parts = build_parts(config, meshes)
        materialize(parts, config, cpu)
        runner, state = (
            build_runner(parts, meshes, config, cpu),
            TrainState(parts, build_optimizer(parts.values(), config.optim)),
        )
        # Of what others would have answered: as many rows as they get, and (torch's stages) that all metadata is known.
        even = mock.patch.object(DispatchGroup, "exchange_counts", lambda self, counts: counts.clone())
        stack.enter_context(even)
        stack.enter_context(mock.patch.object(dist, "recv", lambda tensor, *args, **kwargs: tensor.fill_(1)))
        log = stack.enter_context(CommunicationLog())
        inputs, trained = prepare_inputs(StepBatch(tokens, tokens, index, tokens, 0, 0), meshes, config, cpu)
        stats = forward_backward(state, runner, inputs, config)
        optimizer_step(state, stats, trained, meshes, config)
    leave_world([])  # caches that know groups by their names
    return log.messages, parts


def sums(messages: list[Message]) -> dict[tuple[str, int, int, torch.dtype], tuple[int, int]]:
    """(operation, ranks of the group, from one to the next, dtype) -> (how many, bytes)."""
    count, size = Counter[tuple](), Counter[tuple]()
    for message in messages:
        key = message.op, len(message.ranks), message.ranks[1] - message.ranks[0], message.dtype
        count[key] += 1
        size[key] += message.sent
    return {key: (count[key], size[key]) for key in count}


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 517, 897])
def test_a_flagships_step_talks_as_counted(rank: int) -> None:
    config, shape = flagship()
    assert (shape.pp, shape.dp_shard, shape.tp, shape.ep_shard, shape.ep, shape.world_size) == (8, 64, 2, 2, 64, 1024)
    messages, parts = step_of(rank)
    found = sums(messages)
    micro, stages, last = ROWS // shape.dp, len(parts), shape.pp * config.parallel.stages_per_rank - 1
    layers = sum(len(part.layers) for part in parts.values())
    routed = sum(1 for part in parts.values() for _ in part.moe_layers())
    ends = (0 in parts) + (last in parts)
    at = shape.coordinates(rank, "default") | shape.coordinates(rank, "moe")

    # Every group is the rank's own, or a pair of neighbours on pp: each direction has a communicator of its own.
    [stages_of] = [group for group in shape.groups("default", "pp") if rank in group]
    pairs = {tuple(sorted((rank, stages_of[(at["pp"] + way) % shape.pp]))) for way in (-1, 1)}
    own = pairs | {
        tuple(group)
        for view in ("default", "moe")
        for axis in shape.axes(view)
        for group in shape.groups(view, axis)
        if rank in group
    }
    assert {message.ranks for message in messages} <= {*own, tuple(range(shape.world_size))}

    # ep: rows of the K experts of every token of this tp rank; the weights of 32 bytes beside them one way. The forward
    # pass runs twice (parallel.recompute has moe), and the backward pass sends the same back.
    rows = SEQ // shape.tp * config.model.num_experts_per_token
    chosen = torch.arange(at["tp"] * rows, (at["tp"] + 1) * rows) % config.model.num_experts  # by the balanced gate
    away = int((chosen // (config.model.num_experts // shape.ep) != at["ep"]).sum())
    there, back = away * (HIDDEN * BYTES + 32), away * HIDDEN * BYTES
    assert found.pop(("all_to_all", 64, 1, torch.float32)) == (6 * routed * micro, 3 * routed * micro * (there + back))

    # pp: activations forward to the next stage and gradients back, but at the ends.
    borders = 2 * stages - ends
    one = SEQ // shape.tp * HIDDEN * BYTES
    sent = [found.pop(("send", 2, after - before, torch.float32)) for before, after in pairs if after - before != 128]
    sent.append(found.pop(("send", 2, 128, torch.float32)))  # to one neighbour or both
    assert tuple(map(sum, zip(*sent, strict=True))) == (micro * borders, micro * borders * one)
    del found["send", 8, 128, torch.int32]  # torch's stages ask once whether all metadata is known

    # FSDP (the first shards of short parameters are whole): parallel.reshard=step gathers every unit once a step and
    # parallel.grad_sync=step reduces it once.
    dense, experts = {}, {}
    for part in parts.values():
        for name, parameter in part.named_parameters():
            into = experts if ".experts." in name else dense
            unit = name.split(".")[1] if name.startswith("layers.") else "root"
            into[id(part), unit] = into.get((id(part), unit), 0) + parameter.to_local().numel() * BYTES
    for op, times in (("all_gather", 1), ("reduce_scatter", 1)):
        count, size = found.pop((op, 64, 2, torch.float32))
        assert (count, size) == (times * len(dense), sum(dense.values()) * 63 * times), op
        count, size = found.pop((op, 2, 64, torch.float32))
        assert (count, size) == (times * len(experts), sum(experts.values()) * times), op

    # The world: the statistics, and what is agreed on in one exchange. The dp group: the tokens of a step.
    count, _ = found.pop(("all_reduce", 1024, 1, torch.float64))
    assert count == 2
    assert found.pop(("all_reduce", 64, 2, torch.int64))[0] == 1

    # tp, of a rank with MoE layers alone: the latents of queries and keys, the rotary part and the shared expert's rows are
    # gathered, the latents again (mla_up_proj) and the gradients of what is reduced: attention's and the shared expert's output.
    tp = {op: found.pop((op, 2, 1, torch.float32)) for op in ("all_gather", "reduce_scatter")}
    if routed == layers and not ends:
        attention, times = config.model.attention, routed * micro
        latents = attention.q_lora_rank + attention.kv_lora_rank
        down = latents + attention.qk_rope_head_dim + HIDDEN
        numbers = SEQ // shape.tp * BYTES
        assert tp["all_gather"] == (8 * times, times * numbers * (down + latents + 2 * HIDDEN))
        assert tp["reduce_scatter"] == (6 * times, times * numbers * (down + 2 * HIDDEN))
    # What is left: the sums of the sequence balance loss, of gradients that tp ranks share, and the norm's scalars.
    norm = [(2, 64), (64, 1), (64, 2), (8, 128)]
    assert {key[0] for key in found} == {"all_reduce"} and {key[1:3] for key in found} == {*norm, (2, 1)}
    assert all(found["all_reduce", *group, torch.float64][1] < 100 for group in norm)


@pytest.mark.exhaustive
def test_ranks_of_a_group_call_it_in_one_order() -> None:
    """What keeps a run from waiting for ever: neighbours on tp, and with them on ep, in another test's steps."""
    ours, theirs = (step_of(rank)[0] for rank in (516, 517))
    shared = {message.ranks for message in ours} & {message.ranks for message in theirs}
    assert sorted(map(len, shared)) == [2, 64, 1024]
    for ranks in shared:
        first, second = ([(m.op, m.dtype) for m in messages if m.ranks == ranks] for messages in (ours, theirs))
        assert first == second and first
