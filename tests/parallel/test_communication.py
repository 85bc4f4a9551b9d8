"""Bytes that a rank really sends, against the formulas that plans and papers use.

Letters: T tokens of the rank, K top-k, h hidden, b bytes a number, L layers, M micro-batches.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.nn.modules.module import register_module_forward_hook

from automoe.comm.tokens import StepBatch
from automoe.config.context import exchange_widths, gathers_latents
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.pipeline import pipeline_order
from automoe.config.schema import (
    AttentionConfig,
    ClusterConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    RouterConfig,
    TrainConfig,
)
from automoe.model.linear import Linear
from automoe.verify.pool import RankPool
from tests.support.communication import CommunicationLog, Message
from tests.support.trajectories import run_trajectory

ROWS, SEQ, HIDDEN, TOP_K, LAYERS, BYTES = 8, 32, 16, 2, 2, 8

MODEL = ModelConfig(
    family="mixtral",
    vocab_size=32,
    hidden_size=HIDDEN,
    num_layers=LAYERS,
    num_experts=8,
    num_experts_per_token=TOP_K,
    moe_intermediate_size=8,
    attention=AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=4, head_dim=4),
)


def config(dispatcher: str = "alltoall", micro_batch_size: int = 1, **mesh: int) -> Config:
    """Exactly balanced routing: every rank sends and receives the same number of rows."""
    return Config(
        mesh=MeshConfig(**({"dp_shard": 1} | mesh)),
        model=MODEL,
        moe=MoEConfig(dispatcher=dispatcher, experts="loop", gate="balanced"),
        train=TrainConfig(seq_len=SEQ, global_batch_size=ROWS, micro_batch_size=micro_batch_size, dtype="float64"),
    )


def rows(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    tokens = torch.arange(ROWS // dp_size * SEQ).view(-1, SEQ) % config.model.vocab_size
    index = torch.arange(SEQ).expand_as(tokens)
    return StepBatch(tokens, tokens, index, torch.zeros_like(tokens), 0, 0)


def messages_of_a_step(config: Config) -> list[Message]:
    with CommunicationLog() as log:
        run_trajectory(config, rows, 1, keep_tensors=False)
    return log.messages


def sent(messages: list[Message], op: str, group_size: int, ranks: tuple[int, ...] | None = None) -> int:
    """Bytes of floating-point numbers sent by ``op`` in groups of ``group_size``."""
    return sum(
        m.sent
        for m in messages
        if m.op == op
        and m.dtype.is_floating_point
        and len(m.ranks) == group_size
        and (ranks is None or m.ranks == ranks)
    )


def lines_of_weights(rows: int) -> int:
    """Lines as wide as a row that the weights of a block of rows fill."""
    return -(-rows // HIDDEN)


def step_of(pool: RankPool, config: Config) -> list[list[Message]]:
    world = resolve_mesh(config.mesh, None).world_size
    return pool.run(messages_of_a_step, world, config)


def test_rows_in_8_bits_save_one_exchange_of_four(ranks: RankPool) -> None:
    """A line is 16 codes, a scale and 4 bytes that fill up three words; gradients come back in as many wide lines."""
    run, ep, line = config(dp_shard=4, ep=4), 4, 24
    for messages in step_of(ranks, replace(run, moe=replace(run.moe, dispatch_dtype="fp8"))):
        each = SEQ * TOP_K // ep
        lines = (ep - 1) * (each + -(-each // (line // BYTES)))
        wide = lines + 2 * (ep - 1) * each  # gradients of rows; results, and their gradients
        layers, sizes = LAYERS * ROWS // ep, 8 * MODEL.num_experts * (ep - 1) // ep
        assert sent(messages, "all_to_all", ep) == layers * wide * HIDDEN * BYTES
        integers = [m.sent for m in messages if m.op == "all_to_all" and not m.dtype.is_floating_point]
        assert sum(integers) == layers * (lines * line + sizes)


@pytest.mark.parametrize("ep", [4, *(pytest.param(ep, marks=pytest.mark.exhaustive) for ep in (2, 8))])
def test_all_to_all_sends_each_choice_once(ranks: RankPool, ep: int) -> None:
    """T K h b (EP-1)/EP a pass, two passes forward and two backward a layer; and the weights of T K choices, within."""
    for messages in step_of(ranks, config(dp_shard=ep, ep=ep)):
        micro_batches, rows_away = ROWS // ep, SEQ * TOP_K * (ep - 1) // ep
        lines = 4 * rows_away + 2 * (ep - 1) * lines_of_weights(SEQ * TOP_K // ep)
        assert sent(messages, "all_to_all", ep) == LAYERS * micro_batches * lines * HIDDEN * BYTES
        calls = [m.dtype.is_floating_point for m in messages if m.op == "all_to_all"]
        assert calls.count(True) == 4 * LAYERS * micro_batches, "rows out and back, forward and backward"
        assert calls.count(False) == LAYERS * micro_batches, "sizes"


# Two groups of experts on two nodes of two ranks each, and every token chooses three experts of one group.
LIMITED = replace(
    MODEL, hidden_size=64, num_experts_per_token=3, router=RouterConfig(score="sigmoid", num_groups=2, topk_groups=1)
)


@pytest.mark.exhaustive
def test_hierarchical_dispatch_sends_one_copy_a_node(ranks: RankPool) -> None:
    """Plain all-to-all sends a token off its node once a choice, the hierarchical one at most topk_groups times."""
    across, top_k = {}, LIMITED.num_experts_per_token
    for dispatcher in ("alltoall", "hierarchical"):
        run = replace(config(dispatcher, dp_shard=4, ep=4), model=LIMITED, cluster=ClusterConfig(gpus_per_node=2))
        run = replace(run, moe=replace(run.moe, gate="learned"))
        across[dispatcher] = sum(
            size
            for rank, messages in enumerate(step_of(ranks, run))
            for message in messages
            if message.op == "all_to_all" and message.dtype.is_floating_point
            for peer, size in zip(message.ranks, message.to, strict=True)
            if peer // 2 != rank // 2
        )
    # A copy is a row with K weights and K ids behind it, to the node and back, in both passes.
    copies = LIMITED.router.topk_groups * ROWS * SEQ * LAYERS
    assert 0 < across["hierarchical"] < 4 * copies * (LIMITED.hidden_size + 2 * top_k) * BYTES
    assert 1 / top_k < across["hierarchical"] / across["alltoall"] < 1.2 / top_k


@pytest.mark.exhaustive
def test_all_gather_dispatch_sends_ep_over_k_times_as_much(ranks: RankPool) -> None:
    ep, tokens = 8, ROWS // 8 * SEQ
    gathered = step_of(ranks, config(dispatcher="allgather", dp_shard=ep, ep=ep))[0]
    plain = step_of(ranks, config(dp_shard=ep, ep=1, ep_shard=ep))[0]
    one_pass = tokens * BYTES * (ep - 1)
    # FSDP also gathers and reduces, the experts' weights included where they are not cut over ep.
    expert_numbers = 3 * MODEL.num_experts * MODEL.moe_intermediate_size * HIDDEN * LAYERS
    fsdp_experts = expert_numbers * BYTES * (ep - 1) // ep
    assert sent(plain, "all_gather", ep) - fsdp_experts == sent(plain, "reduce_scatter", ep) - fsdp_experts
    dense = sent(plain, "all_gather", ep) - fsdp_experts
    assert sent(gathered, "all_gather", ep) == dense
    # Gathered are tokens, their K weights, and in the backward pass the gradient of the sum; summed are the others'. Over
    # gloo both are all-to-alls.
    assert sent(gathered, "all_to_all", ep) == 2 * LAYERS * one_pass * (2 * HIDDEN + TOP_K)
    all_to_all_pass = tokens * TOP_K * BYTES * (ep - 1) // ep
    assert one_pass * HIDDEN / (all_to_all_pass * HIDDEN) == ep / TOP_K


@pytest.mark.exhaustive
def test_expert_tensor_parallelism_gathers_and_sums_received_rows(ranks: RankPool) -> None:
    """AG-V and RS-V of the R received rows, (ETP-1) R h b each, forward and backward; R weights, twice."""
    etp, tokens = 2, ROWS // 4 * SEQ
    for messages in step_of(ranks, config(dp_shard=4, ep=2, etp=etp)):
        etp_groups = {m.ranks for m in messages if m.op == "all_to_all" and m.ranks[1] - m.ranks[0] == 1}
        assert len(etp_groups) == 1, "etp varies fastest, so its groups are neighbours"
        received = SEQ * TOP_K  # of a micro-batch
        lines = 4 * received + 2 * lines_of_weights(received)
        expected = LAYERS * tokens // SEQ * (etp - 1) * lines * HIDDEN * BYTES
        assert sent(messages, "all_to_all", 2, etp_groups.pop()) == expected


def expanded_rows(config: Config) -> int:
    """Rows of latents that this rank's ``kv_b_proj`` has multiplied in the forward passes of a step."""
    latent, count = config.model.attention.kv_lora_rank, 0

    def of(module: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        nonlocal count
        if isinstance(module, Linear) and (args[0].shape[-1], out.shape[-1]) == (latent, EXPANDED):
            count += args[0].shape[:-1].numel()

    hook = register_module_forward_hook(of)
    try:
        run_trajectory(config, rows, 1, keep_tensors=False)
    finally:
        hook.remove()
    return count


EXPANDED = 2 * (10 + 6)  # numbers of keys and values in two heads


@pytest.mark.one_in(2)
@pytest.mark.parametrize("latent", [EXPANDED, EXPANDED // 4])
def test_context_parallelism_expands_each_latent_once_unless_sending_takes_longer(ranks: RankPool, latent: int) -> None:
    """Wide latents: each rank expands its own part of the row. Narrow ones are sent themselves, and expanded by all."""
    attention = AttentionConfig(
        kind="mla",
        num_heads=2,
        num_kv_heads=2,
        kv_lora_rank=latent,
        qk_nope_head_dim=10,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )
    run = config(cp=2)
    run = replace(run, model=replace(MODEL, family="deepseek_v3", attention=attention))
    part = 1 if gathers_latents(latent, EXPANDED, "cpu", BYTES) else 2
    assert part == (2 if latent == EXPANDED else 1)
    assert ranks.run(expanded_rows, 2, run) == [LAYERS * ROWS * SEQ // part] * 2


LATENTS = AttentionConfig(
    kind="mla",
    num_heads=2,
    num_kv_heads=2,
    kv_lora_rank=EXPANDED // 4,
    qk_nope_head_dim=10,
    qk_rope_head_dim=4,
    v_head_dim=6,
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("attention", [replace(MODEL.attention, num_kv_heads=1), LATENTS], ids=["gqa", "mla"])
def test_exchanged_heads_send_what_the_plan_counts(ranks: RankPool, attention: AttentionConfig) -> None:
    """Beside gathered keys and values, whose widths are known; over gloo both are all-to-alls, as FSDP's sums are."""
    cp, family = 2, "deepseek_v3" if attention.kind == "mla" else "mixtral"
    run = replace(config(cp=cp), model=replace(MODEL, family=family, attention=attention))
    exchanging = replace(run, parallel=ParallelConfig(context="ulysses"))
    totals = [{sent(messages, "all_to_all", cp) for messages in step_of(ranks, one)} for one in (run, exchanging)]
    [gathered], [exchanged] = totals
    into, shared, out = exchange_widths(attention, False, 1, cp)
    widths = 2 * attention.num_kv_heads * attention.head_dim
    if attention.kind == "mla":
        assert gathers_latents(attention.kv_lora_rank, EXPANDED, "cpu", BYTES)
        widths = attention.kv_lora_rank + attention.qk_rope_head_dim
    numbers = (into + out) // cp + shared - widths  # of a position, to each other rank
    assert exchanged - gathered == 2 * LAYERS * ROWS * (SEQ // cp) * (cp - 1) * numbers * BYTES


@pytest.mark.exhaustive
def test_a_ring_sends_key_heads_on_and_their_gradients_home(ranks: RankPool) -> None:
    """P - 1 times keys and values in each pass, and P times gradients; a gather sends P - 1 times in each pass."""
    cp, attention = 2, AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    run = replace(config(cp=cp), model=replace(MODEL, attention=attention))
    around = replace(run, parallel=ParallelConfig(context="ring"))
    [gathered], [ring] = (
        {sent(messages, "all_to_all", cp) for messages in step_of(ranks, one)} for one in (run, around)
    )
    positions = LAYERS * ROWS * SEQ // cp
    assert ring - gathered == positions * 2 * 2 * 8 * (2 * (cp - 1) + cp - 2 * (cp - 1)) * BYTES


def test_tensor_parallelism_gathers_and_reduces_once_a_block(ranks: RankPool) -> None:
    """(TP-1)/TP s mbs h b for every all-gather and reduce-scatter: attention's pair, embedding, head.

    Over gloo both are all-to-alls.
    """
    tp = 2
    for messages in step_of(ranks, config(tp=tp, ep=1, ep_shard=2)):
        # FSDP's own messages over the same two ranks: the experts, which ep_shard cuts.
        experts = 3 * MODEL.num_experts * MODEL.moe_intermediate_size * HIDDEN * LAYERS * BYTES * (tp - 1) // tp
        one_pass = (tp - 1) * ROWS * SEQ * HIDDEN * BYTES // tp  # over all micro-batches
        assert sent(messages, "all_gather", tp) == sent(messages, "reduce_scatter", tp) == experts
        assert sent(messages, "all_to_all", tp) == 2 * (2 * LAYERS + 2) * one_pass


@pytest.mark.exhaustive
def test_folding_ep_over_tp_needs_no_further_communication(ranks: RankPool) -> None:
    """Each tp rank routes its own tokens: the same gathers as without ep, and T K / EP rows a rank travel."""
    tp = ep = 2
    folded = step_of(ranks, config(tp=tp, ep=ep))[0]
    one_pass = (tp - 1) * ROWS * SEQ * HIDDEN * BYTES // tp
    assert sent(folded, "all_gather", tp) == sent(folded, "reduce_scatter", tp) == 0
    rows_away = SEQ // tp * TOP_K * (ep - 1) // ep  # of a micro-batch
    lines = 4 * rows_away + 2 * (ep - 1) * lines_of_weights(SEQ // tp * TOP_K // ep)
    gathers_and_sums = 2 * (2 * LAYERS + 2) * one_pass  # all-to-alls over gloo
    assert sent(folded, "all_to_all", ep) - gathers_and_sums == LAYERS * ROWS * lines * HIDDEN * BYTES


@pytest.mark.exhaustive
def test_pipeline_borders_carry_activations_alone(ranks: RankPool) -> None:
    """s mbs h b / (TP CP) a border and micro-batch: forward from the first stage, backward from the last."""
    for parallel in (ParallelConfig(schedule="GPipe"), ParallelConfig(schedule="1F1B")):
        plain = replace(config(pp=2, dp_shard=1, tp=2, ep=2), parallel=parallel)
        for messages in step_of(ranks, plain):
            # Before the first step torch opens a border: 2.11 with a float32 number, later releases with integers.
            activations = [message for message in messages if message.dtype == torch.float64]
            assert sent(activations, "send", 2) == ROWS * SEQ // 2 * HIDDEN * BYTES


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", ["step", "micro_batch"])
def test_deferring_gathers_and_reduces_once_a_step(ranks: RankPool, policy: str) -> None:
    """P b (d-1)/d for each gather and each reduction; per micro-batch, two gathers and one reduction each."""
    micro_batches = ROWS // 2 // 1
    plain = replace(config(dp_shard=2, ep=2), parallel=ParallelConfig(reshard=policy, grad_sync=policy))
    head = MODEL.vocab_size * HIDDEN
    attention = 4 * HIDDEN * HIDDEN
    layer = attention + MODEL.num_experts * HIDDEN + 2 * HIDDEN
    root = 2 * head + HIDDEN
    for messages in step_of(ranks, plain):
        times = 1 if policy == "step" else micro_batches
        # The root keeps its weights from forward to backward, layers are gathered again.
        gathers = LAYERS * layer * (1 if policy == "step" else 2) + root
        assert sent(messages, "reduce_scatter", 2) == times * (LAYERS * layer + root) * BYTES // 2
        assert sent(messages, "all_gather", 2) == times * gathers * BYTES // 2


@pytest.mark.exhaustive
def test_weights_of_experts_are_asked_for_before_the_dispatch_that_the_host_waits_for(ranks: RankPool) -> None:
    """Gathers of a step's first forward pass: the root, a layer and its experts, and before its experts the next layer."""
    freed = ParallelConfig(reshard="micro_batch", grad_sync="micro_batch")
    for messages in step_of(ranks, replace(config(dp_shard=4, ep=2, ep_shard=2), parallel=freed)):
        kinds = [m.op for m in messages if m.op in ("all_gather", "all_to_all")]
        asks = [kinds[:place].count("all_gather") for place, kind in enumerate(kinds) if kind == "all_to_all"]
        # Three all-to-alls a layer: counts, for which the host waits, rows, results.
        assert asks[:6] == [3, 3, 4, 5, 5, 5], "root, layer, experts; the next layer with the experts; its experts"


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 128), (7, 32), (2, 16)])
def test_an_interleaved_pipeline_gathers_each_stage_once_a_step(stages: int, micro_batches: int) -> None:
    """Torch would, with four stages and 128 micro-batches on eight ranks, 39 times in place of 4."""
    for entries in pipeline_order("Interleaved1F1B", 8, stages, micro_batches):
        actions = [schedules._Action(stage, schedules._ComputationType(kind), n) for [(kind, stage, n)] in entries]
        lowered = schedules._add_unshard_reshard(actions)
        assert sum(action.computation_type.name == "UNSHARD" for action in lowered) == stages
