"""Predicted seconds of a layer's forward and backward pass on a rank, with collectives by axis.

Matmuls are timed one by one at the rank's shapes with ``Machine.gemm``, and attention by its FLOPs.
All other operators only read and write memory, so they are timed by their bytes. A forward pass
moves these bytes, with b bytes per element:

    norms, residual stream       10 b T H; of an MTP module 20 b T H; of n streams 12 n b T H more
    rotation, norms of heads     2 b T D N (1 + qk_norm) of queries and keys
    activation of width I        3 b T I
    router                       24 T E
    permutation                  4 b R H to experts and back, and as much again to send rows;
                                 its backward pass moves the same
    rows in 8 bits               (b + 1) T H, and (3 b + 1) R H of the received, which the backward
                                 pass decodes again; sending gathers 2 R H instead of 2 b R H
    unpacking (lora.base)        the bytes that its kernels read and write, for each matmul

The backward pass takes twice the time of the forward pass. In attention it takes 2.5 times, because
scores are recomputed. Letters: T tokens of a rank, R (token, expert) rows, H hidden, I width, E
experts, K top-k, N heads, D head dim.
"""

from __future__ import annotations

from math import ceil, log2

from automoe.config.context import exchange_widths, expanded_width, mean_keys
from automoe.config.mesh_shape import uses_ulysses
from automoe.config.recompute import FULL
from automoe.config.rules_kernels import head_dims, score_dims, wire_row_bytes
from automoe.config.schema import has_indexer, is_linear, ratio_of, window_of
from automoe.planner import compressed
from automoe.planner.communication import (
    NOTHING,
    Cost,
    all_to_all,
    dispatch_once,
    exchange_sizes,
    gather,
)
from automoe.planner.layer_weights import ends_trained, layer_weights
from automoe.planner.place import Pass, Passes, Place

ATTENTION_BACKWARD = 2.5  # attention's backward pass has five matmuls, its forward pass two
SLOW_PRODUCTS = 4  # the router's float32 matmuls take this multiple of the time in bfloat16
# Bytes per element that widening (dequantization) moves, besides the codes that it reads and the
# result that it writes: FP8 uses two temporary float32 tensors, 4 bits one temporary two-byte
# tensor (automoe.quantize.packed).
WIDENING = {"fp8": 16.0, "nf4": 4.0}
# A gated delta net reaches this share of attention's speed: its short chunks run one after another.
DELTA_NET = 0.25
# Of the pass that adds a weight's gradient to its sum, what is left in a product that adds, and
# what is more of it for each expert, by its multiplications: on an H100 0.26 for the widest experts
# and 1.52, a loss, for 128 narrow ones with few rows (benchmarks/results/gpu_parts.json); fewer rows
# were not measured.
FUSED_LEFT = 0.26
FUSED_EXPERT = 4.1e9
# FlexAttention computes blocks of this many queries and keys, on head dims that are powers of two,
# at this share of attention's speed: on an H100 Triton's attention reaches 390 TFLOP/s and cuDNN's
# 605 (arXiv 2407.08608, figure 5, forward, head dim 128).
FLEX_BLOCK = 128
FLEX = 0.64


def layer_time(place: Place, layer: int, again: frozenset[str]) -> Passes:
    """Return the predicted times of ``layer``'s forward and backward pass for one micro-batch.

    Args:
        place: what the time depends on: configuration, mesh, GPU and sizes of the micro-batch.
        again: modules that the layer recomputes in its backward pass (``recomputed_modules``).
    """
    passes = local_time(place, layer)
    if layer in place.config.model.moe_layers:
        add_experts(place, layer, passes, arrives_again=bool(again & {FULL, "moe"}))
    seconds, sent = time_again(passes.forward, again)
    passes.backward.add("again", seconds)
    for axis, cost in sent:
        passes.backward.send(axis, cost)
    return passes


def local_time(place: Place, layer: int) -> Passes:
    """Return the predicted times of ``layer``'s two passes without its routed experts.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of the micro-batch.
    """
    model = place.config.model
    routed = layer in model.moe_layers
    passes = Passes(Pass(), Pass())
    _products(place, layer, passes, experts=False)
    _attention(place, layer, passes)
    machine = place.machine
    size = machine.number_bytes
    # A module for multi-token prediction has three more norms, and joins its inputs.
    moved = 20.0 if layer >= model.num_layers else 10.0
    moved += 12.0 * model.hc_mult  # two connections, which pass over all streams six times each
    moved += 5.0 * (model.post_norm_eps is not None)  # two norms more, one of them with two passes
    norms = machine.pass_over(moved * size * place.tokens * model.hidden_size)
    passes.add("layernorm", norms, 2 * norms)
    width = model.shared_width if routed else model.intermediate_size
    act = machine.pass_over(3.0 * size * place.tokens * width)
    passes.add("shared_experts" if routed else "mlp", act, 2 * act)
    _tensor_parallel(place, layer, passes)
    return passes


def add_experts(place: Place, layer: int, passes: Passes, arrives_again: bool) -> None:
    """Add the times of the routed experts of ``layer`` to ``passes``, the result of ``local_time``.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of the micro-batch.
        arrives_again: True if the backward pass dispatches tokens once more, and so decodes no kept
            8-bit rows. The second dispatch itself is added by ``layer_time``.
    """
    _products(place, layer, passes, experts=True)
    _routing(place, passes, arrives_again)


_PART = {"dense_ffn": "mlp", "shared_experts": "shared_experts", "router": "router"}
_PART |= {"residual": "layernorm", "routed_experts": "moe"}


def _products(place: Place, layer: int, passes: Passes, experts: bool) -> None:
    mesh = place.mesh
    machine = place.machine
    weights = layer_weights(place.key, place.config, layer, mesh.tp)
    for param, packed in weights.weights:
        num_experts = param.shape[0] if param.expert else 1
        columns = float(param.shape[-1])
        rows = param.numel / num_experts / columns
        part = _PART.get(param.part, "attention")
        if (part == "moe") != experts:
            continue
        if experts:
            tokens = place.rows
            local = num_experts / mesh.ep
            if "down" in param.name:
                columns /= mesh.etp
            else:
                rows /= mesh.etp
        else:
            tokens = float(place.tokens)
            local = 1
            tp_dim = param.tp_dim(mesh.tp)
            if tp_dim is not None:
                tokens *= mesh.tp
            if "kv_b_proj" in param.name and place.gathers_latents:
                tokens *= mesh.cp  # Each cp rank expands the gathered latents of whole rows.
            if tp_dim == 0:
                rows /= mesh.tp
            elif tp_dim:
                columns /= mesh.tp
        seconds = machine.gemm(tokens / local, rows, columns, local)
        if part == "router" and place.config.moe.router_dtype == "float32":
            seconds *= SLOW_PRODUCTS
        if "q_b_proj" in param.name or "kv_b_proj" in param.name:
            part = "mla_up_proj"
        numbers = rows * columns * local
        widened = 0.0
        if packed:
            moved = packed + WIDENING[place.config.lora.base] + machine.number_bytes
            widened = machine.pass_over(moved * numbers)
        local_seconds = seconds * param.trained
        if place.fused:
            local_seconds = max(local_seconds, machine.pass_over(8.0 * numbers) * param.trained)
        elif experts and place.fused_experts:
            left = min(1.52, FUSED_LEFT + FUSED_EXPERT * local / (tokens * rows * columns))
            local_seconds += left * machine.pass_over(10.0 * numbers) * param.trained
        passes.add(
            part,
            seconds + widened + machine.cast(tokens * columns),
            seconds * (not param.spec.detached)
            + local_seconds
            + widened
            + machine.cast(tokens * rows),
        )
        if experts and not place.fused:  # others' grouped products have a part for each half
            passes.backward.experts += seconds + local_seconds
        else:
            passes.backward.weights += local_seconds
    if not place.fused:
        # FSDP reads each micro-batch's gradients, adds them and writes the sum in float32.
        numbers = float(weights.dense_trained)
        if experts:
            numbers = weights.expert_trained / (mesh.ep * mesh.etp) * (not place.fused_experts)
        summed = machine.pass_over(10.0 * numbers)
        passes.backward.add("gradients", summed)
        passes.backward.weights += summed


def _attention(place: Place, layer: int, passes: Passes) -> None:
    config, mesh, machine = place.config, place.mesh, place.machine
    attention = config.model.attention
    seq = config.train.seq_len
    size = machine.number_bytes
    tp = mesh.tp
    tokens = place.tokens * tp
    if is_linear(attention, layer):
        state = attention.linear_key_head_dim * attention.linear_value_head_dim
        state *= attention.linear_num_value_heads
        seconds = machine.attention(6.0 * state / tp * tokens) / DELTA_NET
    elif attention.kind == "compressed":
        flops = compressed.score_flops(attention, layer, seq)
        seconds = machine.attention(flops / tp * tokens)
    else:
        window = window_of(attention, layer)
        # With a mask, every layer reads the mask and computes all scores, except those in chunks of
        # cp-sharded rows that no query sees. Without a mask, the causal kernel skips half of the
        # scores.
        gathered = mesh.cp > 1 and config.parallel.context == "gather"
        # Chosen keys are a mask too: no score is left out.
        sparse = attention.index_topk > 0 and config.train.indexer == "sparse"
        masked = config.data.document_mask or gathered or window > 0 or sparse
        sharing = mesh.cp if gathered else 1
        seen = mean_keys(seq, sharing, window) if masked else seq / 2
        moved = size * tokens * seen * masked
        if uses_ulysses(config, mesh):  # Each rank reads the mask of whole rows.
            moved *= mesh.cp
        dims = float(sum(score_dims(attention)))
        if config.kernels.attention == "flex":
            # Rows count as one document: how many blocks shorter documents skip is not known.
            # Blocks at the ends of what queries see are computed whole.
            longest = min(window or seq, seq)
            seen = longest - longest**2 / (2 * seq) + (FLEX_BLOCK if window else FLEX_BLOCK / 2)
            dims = sum(2.0 ** ceil(log2(dim)) for dim in score_dims(attention)) / FLEX
            moved = 0.0
        flops = 2.0 * dims * attention.num_heads / tp * tokens * seen
        seconds = machine.attention(flops) + machine.pass_over(moved)
    passes.add("core_attn", seconds, ATTENTION_BACKWARD * seconds)
    keys = attention.num_kv_heads if attention.kind == "gqa" else attention.num_heads
    heads = attention.num_heads + keys
    times = 1 + attention.qk_norm + (attention.clip_qkv is not None) + attention.output_norm
    moved = 1.0 * size * tokens / tp * heads * sum(score_dims(attention)) * times
    turned = machine.pass_over(moved)
    passes.add("attention", turned, 2 * turned)
    if mesh.cp > 1 and (uses_ulysses(config, mesh) or is_linear(attention, layer)):
        _exchange_heads(place, layer, passes)
    elif mesh.cp > 1:
        _context_parallel(place, passes, seconds)
    if has_indexer(attention, layer):
        _index(place, layer, passes)


def _index(place: Place, layer: int, passes: Passes) -> None:
    """Add to ``passes`` the time of the sparse-attention indexer: it scores all keys, selects some.

    If the indexer is trained, its forward pass also computes its gradients, and the attention
    probabilities that it learns from, all in float32.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of the micro-batch.
    """
    config, mesh, machine = place.config, place.mesh, place.machine
    a = config.model.attention
    weights = layer_weights(place.key, config, layer, mesh.tp).weights
    learns = any(param.spec.detached and param.trained for param, _ in weights)
    pairs = 1.0 * place.tokens * config.train.seq_len / (ratio_of(a, layer) or 1)
    times = a.index_n_heads * ((config.train.indexer == "sparse") + 3 * learns)
    heads = a.num_heads * learns  # a tp rank has a part of them, at the positions of all ranks
    flops = 2 * pairs * (times * a.index_head_dim + heads * head_dims(a)[0])
    moved = 16 * pairs * (times + heads)  # each head's scores are written and read
    passes.add("attention", SLOW_PRODUCTS * machine.attention(flops) + machine.pass_over(moved), 0)
    # a byte each of what is chosen, probabilities, and keys of the row
    keys = 1.0 * machine.number_bytes * place.tokens * mesh.tp * a.index_head_dim
    for axis, size in (("tp", (1 + 4 * learns) * pairs * mesh.tp + keys), ("cp", keys * mesh.cp)):
        passes.send(axis, gather(machine, place.group(axis), size), NOTHING)


def _exchange_heads(place: Place, layer: int, passes: Passes) -> None:
    """Add to ``passes`` (costs of a layer's forward and backward) two all-to-alls over cp, to heads and back (Ulysses).

    Forward and backward pass have equal all-to-alls. The bytes sent are copied into the order of ranks, those received
    into the order of positions.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of the micro-batch.
    """
    attention = place.config.model.attention
    mesh = place.mesh
    machine = place.machine
    group = place.group("cp")
    widths = exchange_widths(attention, is_linear(attention, layer), mesh.tp, mesh.cp)
    row = 1.0 * machine.number_bytes * place.tokens * mesh.tp
    there = all_to_all(machine, group, row * widths.into)
    there += gather(machine, group, row * mesh.cp * widths.gathered)
    back = all_to_all(machine, group, row * widths.out)
    passes.send("cp", there + back, there + back)
    copied = machine.pass_over(4.0 * row * (widths.into + widths.out))
    passes.add("attention", copied, copied)
    if attention.kind == "mla":
        passes.forward.again["mla_up_proj"] = {"cp": there}


def _context_parallel(place: Place, passes: Passes, attending: float) -> None:
    """Add to ``passes`` the cp collectives of keys and values, and those of their gradients.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of the micro-batch.
        attending: seconds of attention, which hide a part of the transfers of ring attention.
    """
    attention = place.config.model.attention
    mesh = place.mesh
    machine = place.machine
    constants = machine.constants
    whole = 1.0 * machine.number_bytes * place.tokens * mesh.tp * mesh.cp
    if place.config.parallel.context == "ring":
        # A ring sends keys, and values padded to the keys' width, of all heads; on the CPU of key
        # heads alone. Sending overlaps with attention to the keys that are already here.
        (dims, _), heads = score_dims(attention), attention.num_heads / mesh.tp
        if attention.kind == "gqa" and place.config.cluster.on_cpu:
            heads = max(attention.num_kv_heads / mesh.tp, 1)
        cost = gather(machine, place.group("cp"), whole * 2 * dims * heads)
        cost = cost.seen(max(constants.latency, cost.seconds - constants.overlap * attending))
        passes.send("cp", cost, cost * 2)
        return
    widths = [attention.head_dim * max(1, attention.num_kv_heads // mesh.tp)] * 2
    if attention.kind == "mla":
        widths = [expanded_width(attention, mesh.tp), attention.qk_rope_head_dim]
        if place.gathers_latents:
            widths = [attention.kv_lora_rank + attention.qk_rope_head_dim]
    cost = sum((gather(machine, place.group("cp"), whole * width) for width in widths), NOTHING)
    passes.send("cp", cost, cost)
    if attention.kind == "mla" and not place.gathers_latents:
        passes.forward.again["mla_up_proj"] = {"cp": cost}


def _tensor_parallel(place: Place, layer: int, passes: Passes) -> None:
    """Add to ``passes`` (costs of a layer's forward and backward) the tp collectives of sequence parallelism.

    Each sharded block needs an all-gather before it and a reduce-scatter after it, in both passes.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of the micro-batch.
    """
    model = place.config.model
    tp = place.mesh.tp
    if tp == 1:
        return
    group = place.group("tp")
    row = 1.0 * place.machine.number_bytes * place.tokens * tp
    attention = model.attention
    inwards = model.hidden_size
    if attention.kind == "mla" and attention.q_lora_rank is not None:
        inwards = attention.q_lora_rank + attention.kv_lora_rank + attention.qk_rope_head_dim
    elif attention.kind == "compressed":
        inwards = compressed.gathered_width(attention, layer)
    widths = [inwards, model.hidden_size]
    if layer not in model.moe_layers or model.shared_width:
        widths += [model.hidden_size] * 2
    for width in widths:
        cost = gather(place.machine, group, row * width)
        passes.send("tp", cost, cost)


def _routing(place: Place, passes: Passes, run_again: bool) -> None:
    """Add the time of an MoE layer's routing, permutation, dispatch and combine to ``passes``.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of the micro-batch.
        run_again: True if the backward pass dispatches tokens again. That time is not added here; the time
            to decode 8-bit rows, which are not kept then, is left out.
    """
    config = place.config
    mesh = place.mesh
    machine = place.machine
    model = config.model
    forward = passes.forward
    size = machine.number_bytes
    chosen = place.rows / mesh.etp  # number of rows that this rank receives over ep
    scores = machine.pass_over(24.0 * place.tokens * model.num_scored_experts)
    passes.add("router", scores, scores)
    # Rows are permuted by rank before they are sent, by expert after they arrive, and back. DeepEP
    # sends unpermuted rows.
    sorted_here = 0.0 if config.moe.dispatcher == "deepep" or mesh.ep * mesh.etp == 1 else chosen
    moved = machine.pass_over(4.0 * size * (sorted_here + place.rows) * model.expert_hidden_size)
    act = machine.pass_over(3.0 * size * place.rows * model.moe_intermediate_size / mesh.etp)
    row = 1.0 * size * model.expert_hidden_size
    sent_row = row
    cast = decoded = 0.0
    if config.moe.dispatch_dtype == "fp8":
        sent_row = 1.0 * wire_row_bytes(model.expert_hidden_size)
        # Tokens become codes; codes are gathered to be sent in place of numbers, and arrived ones
        # become numbers, which are then scaled.
        arrived = place.rows if mesh.ep * mesh.etp > 1 else place.tokens
        decoded = machine.pass_over((1 + 3.0 * size) * arrived * model.expert_hidden_size)
        saved = 2 * (size - 1) * sorted_here - (size + 1.0) * place.tokens
        cast = decoded - machine.pass_over(saved * model.expert_hidden_size)
    # Experts keep codes, unless their rows arrive again.
    passes.add("moe", moved + act + cast, moved + 2 * act + decoded * (not run_again))
    if mesh.ep > 1:
        there, back, once = _dispatch(place, chosen, sent_row)
        sent = _beside_shared_experts(place, there + back, forward)
        returned = _dispatch(place, chosen, row)[0] + back
        passes.send("ep", sent + once, _beside_shared_experts(place, returned, forward))
        share = there.seconds / max((there + back).seconds, 1e-30)
        forward.again.setdefault("moe", {})["ep"] = there.seen(share * sent.seconds) + once
    if mesh.etp > 1:
        there, returned, back = (
            gather(machine, place.group("etp"), place.rows * width)
            for width in (sent_row + 4, row + 4, row)
        )
        once = NOTHING if config.moe.pad_to_capacity else exchange_sizes(machine)
        passes.send("etp", there + back + once, returned + back)
        forward.again.setdefault("moe", {})["etp"] = there + once


def _beside_shared_experts(place: Place, cost: Cost, forward: Pass) -> Cost:
    """Return ``cost`` without the seconds that the shared experts hide.

    Nothing is hidden without ``moe.overlap_shared_experts``.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of the micro-batch.
        cost: an all-to-all of an MoE layer, during which its shared experts run.
        forward: the layer's forward pass, with the shared experts' seconds.
    """
    if not (place.config.moe.overlap_shared_experts and place.config.model.shared_width):
        return cost
    computing = forward.parts.get("shared_experts", 0.0)
    hidden = place.machine.constants.overlap * min(computing, cost.seconds)
    return cost.seen(cost.seconds - hidden)


def _dispatch(place: Place, chosen: float, sent: float) -> tuple[Cost, Cost, Cost]:
    """Return the costs of an MoE layer's ep collectives: dispatch, combine, exchange of row counts.

    Combine returns rows in the activation dtype. Counts are exchanged only in the forward pass.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of the micro-batch.
        chosen: rows, one per (token, expert) pair, that the busiest rank receives over ep.
        sent: bytes of one dispatched row.
    """
    machine = place.machine
    group = place.group("ep")
    model = place.config.model
    moe = place.config.moe
    tokens = place.tokens * place.mesh.ep
    top_k = model.num_experts_per_token
    row = 1.0 * machine.number_bytes * model.expert_hidden_size
    once = NOTHING
    if not moe.pad_to_capacity:
        once = exchange_sizes(machine, moe.dispatcher in ("deepep", "allgather"))
    if moe.dispatcher in ("deepep", "hierarchical"):
        limit = model.router.topk_groups if model.router.num_groups == group.nodes else 0
        together = moe.dispatcher == "deepep"
        # The copy of a token also carries the token's expert indices and routing weights.
        there, back = (
            dispatch_once(machine, group, chosen / top_k * width, top_k, limit, together)
            for width in (sent + 8 * top_k, row)
        )
        levels = 1 if together or group.nodes in (1, group.size) else 2
        return there, back, once * levels
    if moe.dispatcher == "allgather":
        back = gather(machine, group, tokens * row)
        there = gather(machine, group, tokens * sent)
        there += gather(machine, group, 4.0 * tokens * top_k)
        return there, back, once + gather(machine, group, 8.0 * tokens * top_k)
    there, back = (all_to_all(machine, group, chosen * width) for width in (sent + 4, row))
    return there, back, once


def time_again(forward: Pass, again: frozenset[str]) -> tuple[float, list[tuple[str, Cost]]]:
    """Return (seconds of computation, (axis, cost) of each collective) that recomputation repeats.

    ``forward`` is a layer's forward pass, ``again`` its recomputed modules. Tokens are dispatched again, not combined.
    """
    if FULL in again:
        repeated = forward.again.get("moe", {})
        return forward.compute, [
            (axis, repeated[axis] if axis in ("ep", "etp") else cost)
            for axis, cost in forward.communication.items()
        ]
    # Sorted, because the order of a set, and so the last digits of a sum, differ from run to run.
    recomputed = [forward.again.get(name, {}) for name in sorted(again)]
    seconds = sum(forward.parts.get(name, 0.0) for name in sorted(again))
    return seconds, [pair for costs in recomputed for pair in costs.items()]


def head_time(place: Place, copies: int = 1) -> tuple[float, float]:
    """Return (forward, backward) seconds of ``copies`` output heads with their cross-entropy.

    Multi-token prediction applies the head once more for each module. ``kernels.loss=torch`` reads
    or writes float32 logits seven times. The kernels of ``triton`` read the logits twice and write
    them once, counted as two bytes a number.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of the micro-batch.
    """
    model = place.config.model
    machine = place.machine
    tokens = place.tokens * place.mesh.tp
    vocab = model.vocab_size / place.mesh.tp
    product = machine.gemm(tokens, vocab, model.hidden_size)
    numbers = machine.pass_over(4.0 * tokens * vocab)
    there, back = (0.5, 1.0) if place.config.kernels.loss == "triton" else (4.0, 3.0)
    products = 1 + ends_trained(place.config)[1]
    return copies * (product + there * numbers), copies * (products * product + back * numbers)
