"""Rules for attention, rotation, norm and expert kernels, ``train.compile`` and FP8. No torch.

``device`` is ``cpu``, ``cuda``, or ``auto`` if it is not known yet; rules for a single device are
then left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from automoe.config.context import expanded_width
from automoe.config.facts import BLOCK, ROW_BYTES
from automoe.config.mesh_shape import MeshShape, uses_ulysses
from automoe.config.recompute import DISCARDED_OUTPUTS
from automoe.config.rule_engine import Row, Scope, refused, table
from automoe.config.schema import AttentionConfig, Config, ModelConfig, is_linear

WIRE_WORD = 8  # bytes; rows in 8 bits travel as multiples of this
MAX_FLASH_DIM = 256
MAX_CUDNN_DIM = 128
MIN_FLEX_DIM = 16
MLA_DIMS = (192, 128)  # of queries and keys, and of values: what cuDNN has beyond 128
DIM_UNIT = 8
CHUNK_TOKENS = 512  # of the head's logits, at least
MOST_CHUNK_TOKENS = 4096


def triton_is_interpreted() -> bool:
    """Return True if Triton's kernels run interpreted, without CUDA, in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def wire_row_bytes(hidden: int) -> int:
    """Return the bytes of a token sent to an expert in FP8: values, a float32 scale per 128, padding.

    Args:
        hidden: width of the token's hidden state.
    """
    scales = 4 * -(-hidden // BLOCK)
    return -(-(-(-hidden // 4) * 4 + scales) // WIRE_WORD) * WIRE_WORD


def chunk_tokens(tokens: int, hidden: int) -> int:
    """Return how many of ``tokens`` the loss handles at once, to bound the memory of the logits.

    Such a chunk has about ``hidden`` tokens, within fixed bounds, and so as many logits as the head
    has parameters. Smaller chunks would be slow: each adds the gradient of the whole head to
    memory. Compiled code is made for one size, so all chunks are equal if this takes less than
    twice the smallest possible number of chunks; else the last one is shorter.

    Args:
        hidden: width of the model's hidden state.
    """
    most = max(CHUNK_TOKENS, min(hidden, MOST_CHUNK_TOKENS))
    fewest = max(1, -(-tokens // most))
    num_chunks = next((n for n in range(fewest, 2 * fewest) if tokens % n == 0), fewest)
    return max(1, -(-tokens // num_chunks))


# fmt: off
_RING = "parallel.context == ring and mesh.cp > 1"
_SDPA = "Set kernels.attention=sdpa"
_HAS_EXPERTS = "model.num_moe_layers > 0"
_ATTENTION = table("""
kernels.attention != sdpa | RING | ring attention (parallel.context=ring) calls its own kernels
kernels.attention != sdpa | model.attention.kind == compressed | compressed attention has products of its own
kernels.attention == te|flash|flex | model.attention.index_topk > 0 and train.indexer == sparse
    | a query sees the keys that an indexer chooses, and {kernels.attention} has no such mask
kernels.attention == flex | launch.device == cpu
    | FlexAttention has no backward pass on the CPU, and this run is on cpu
kernels.attention == flex | launch.device == cuda and train.dtype == float64
    | FlexAttention has no float64 on CUDA, and train.dtype=float64
kernels.attention == cudnn | launch.device == cpu | cuDNN needs CUDA, and this run is on cpu
kernels.attention == te | launch.device == cpu | transformer-engine needs CUDA, and this run is on cpu
kernels.attention == cudnn|flash|te | launch.device == cuda and train.dtype != bfloat16
    | on CUDA it computes only in half precision, and train.dtype={train.dtype} | SDPA, or train.dtype=bfloat16
kernels.attention == flash|te | data.document_mask and launch.device == cuda
    | CAUSAL data.document_mask=true masks documents | SDPA, or data.document_mask=false
kernels.attention == flash|te | model.attention.sliding_window > 0 and launch.device == cuda
    | CAUSAL model.attention.sliding_window={model.attention.sliding_window} masks keys further back
kernels.attention == flash|te
    | launch.device == cuda and mesh.cp > 1 and parallel.context != ulysses and model.attention.num_heads %
    mesh.tp * mesh.cp == 0 | CAUSAL with mesh.cp={mesh.cp} keys are masked by their position
    | SDPA, or parallel.context=ulysses
kernels.attention == flash|te | launch.device == cuda and mesh.cp > 1 and parallel.context != ulysses
    | CAUSAL with mesh.cp={mesh.cp} keys are masked by their position | SDPA
kernels.attention == te | model.attention.sinks and launch.device == cuda
    | CAUSAL model.attention.sinks=true adds a key
""", RING=_RING, SDPA=_SDPA, CAUSAL="on CUDA its only mask is the causal one, and")
_HEADS = table("""
kernels.attention == flex | facts.unfit | it has heads of LEAST to MOST dims, and MINE
kernels.attention == cudnn|te | facts.wide | it has heads of up to CUDNN dims, and MLA_QUERY with values of MLA_VALUE; MINE
kernels.attention == cudnn|te | facts.odd
    | it has heads of multiples of UNIT dims: {facts.query} % UNIT = {facts.query % UNIT},
    {facts.value} % UNIT = {facts.value % UNIT}
kernels.attention == flash | launch.device == cuda and facts.widest > MOST
    | it has heads of up to MOST dims, and this model's have {facts.widest}
kernels.attention == cudnn | launch.device == cuda and facts.masked and facts.wrong
    | with a mask its gradient may be NaN if the number of keys modulo 128 is 64: train.seq_len={train.seq_len} on
    mesh.cp={mesh.cp} has {facts.wrong}
    | Set kernels.attention=sdpa, which avoids cuDNN there, or a train.seq_len that {facts.unit} divides
""", LEAST=MIN_FLEX_DIM, MOST=MAX_FLASH_DIM, CUDNN=MAX_CUDNN_DIM, MLA_QUERY=MLA_DIMS[0], MLA_VALUE=MLA_DIMS[1],
    UNIT=DIM_UNIT, MINE="this model's have {facts.query}, its values {facts.value}")
_KERNELS = table("""
kernels.rope == triton; kernels.loss == triton | train.dtype == float64 | it has no float64, and train.dtype=float64
kernels.loss == triton | train.loss != cross_entropy; recipe == dpo
    | its kernels compute the mean cross-entropy of a chunk, and this run needs the loss of each token
kernels.norm == te | launch.device == cpu | transformer-engine computes on CUDA, and launch.device=cpu
kernels.norm == te | train.dtype == float64
    | transformer-engine computes in float32 and narrower, and train.dtype=float64
kernels.norm == te | parallel.recompute has layernorm
    | transformer-engine frees what its backward pass has read, and with parallel.recompute=[layernorm] others
    read it too | Set kernels.norm=torch, or leave layernorm out of parallel.recompute
moe.experts == te | EXPERTS and launch.device == cpu | transformer-engine needs CUDA, and this run is on cpu
moe.experts == te | EXPERTS and model.biased_experts
    | it has experts without biases, and model.biased_experts=true
""", EXPERTS=_HAS_EXPERTS)
_INTERPRETED = table("""
kernels.rope == triton | launch.device == cpu | Triton's kernels need CUDA, and this run is on cpu
    | Set kernels.rope=torch, or TRITON_INTERPRET=1 to try the kernels out, very slowly
kernels.loss == triton | launch.device == cpu | Triton's kernels need CUDA, and this run is on cpu
    | Set kernels.loss=torch, or TRITON_INTERPRET=1 to try the kernels out, very slowly
moe.experts == triton | EXPERTS and launch.device == cpu | Triton's kernels need CUDA, and this run is on cpu
    | Set moe.experts=grouped_mm, or TRITON_INTERPRET=1 to try the kernels out, very slowly
""", EXPERTS=_HAS_EXPERTS)
EXPERTS = table("""
moe.experts == triton | model.hidden_act != silu and EXPERTS
    | its kernels compute SwiGLU, not model.hidden_act={model.hidden_act} | Set moe.experts=grouped_mm
moe.experts == triton|te | train.dtype == float64 and train.fp8 == off and EXPERTS
    | {moe.experts} has no float64, and train.dtype=float64 | Set moe.experts=loop
model.expert_hidden_size % 4 | train.dtype == float32 and moe.experts == grouped_mm|te and EXPERTS
    | {moe.experts} needs rows of a multiple of 16 bytes, which 4 numbers of 4 bytes have
    | , or moe.experts=loop
model.expert_hidden_size % 8 | train.dtype == bfloat16 and moe.experts == grouped_mm|te and EXPERTS
    | {moe.experts} needs rows of a multiple of 16 bytes, which 8 numbers of 2 bytes have
    | , or moe.experts=loop
model.moe_intermediate_size % 4 * mesh.etp | train.dtype == float32 and moe.experts == grouped_mm|te and EXPERTS
    | {moe.experts} needs rows of a multiple of 16 bytes, and {model.moe_intermediate_size // mesh.etp} * 4 bytes =
    {4 * model.moe_intermediate_size // mesh.etp} | , or moe.experts=loop
model.moe_intermediate_size % 8 * mesh.etp | train.dtype == bfloat16 and moe.experts == grouped_mm|te and EXPERTS
    | {moe.experts} needs rows of a multiple of 16 bytes, and {model.moe_intermediate_size // mesh.etp} * 2 bytes =
    {2 * model.moe_intermediate_size // mesh.etp} | , or moe.experts=loop
""", EXPERTS=_HAS_EXPERTS)
# Modules of DISCARDED_OUTPUTS drop their outputs and recompute them for their readers; within a
# compiled part the compiler decides which outputs to recompute. With tp, torch 2.13 mistakes the
# mesh of a weight for a tensor that it has to keep.
COMPILE = table("""
train.compile | RING | WHOLE the calls of parallel.context=ring cannot be part of that
train.compile | kernels.attention == te | WHOLE the modules of kernels.attention=te cannot be part of that
train.compile | kernels.attention == flex
    | WHOLE FlexAttention with its blocks (kernels.attention=flex) cannot be part of that
train.compile | kernels.rope == triton | WHOLE the kernels of kernels.rope=triton cannot be part of that
train.compile | model.attention.index_topk > 0 | WHOLE an indexer with its choice cannot be part of that
train.compile | model.attention.kind == compressed | WHOLE compressed attention cannot be part of that
train.compile | model.hc_mult > 0 | WHOLE hyper-connections with their weights in float32 cannot be part of that
train.compile | model.residual_gate_temperature != 0 | WHOLE gates of the residual in float32 cannot be part of that
train.compile | kernels.norm == te | WHOLE the modules of kernels.norm=te cannot be part of that
train.compile | train.fp8 != off | WHOLE the products of train.fp8={train.fp8} cannot be part of that
train.compile | parallel.recompute has DROPPED
    | WHOLE the hooks of layernorm and mla_up_proj in parallel.recompute={parallel.recompute} cannot be part of that
train.compile | mesh.tp > 1 and parallel.recompute has core_attn
    | WHOLE parallel.recompute=[core_attn] with mesh.tp={mesh.tp} cannot be part of that
""", RING=_RING, DROPPED="|".join(DISCARDED_OUTPUTS), WHOLE="attention and norms are compiled whole, and")
_FP8 = table("""
train.fp8 != off | train.dtype == float64 and launch.device != cpu
    | around 8-bit products a GPU computes in float32 or bfloat16, and train.dtype=float64
    | Set train.fp8=off, train.dtype=bfloat16, or launch.device=cpu
moe.experts != grouped_mm | train.fp8 != off and EXPERTS
    | train.fp8={train.fp8} multiplies the experts with grouped products, and has no other backend
moe.pad_to_capacity | train.fp8 == tensorwise|delayed and EXPERTS
    | padding repeats the first token of each rank, and train.fp8={train.fp8} would compute its scales from
    different tokens on each mesh | Set moe.pad_to_capacity=false, or train.fp8=blockwise
model.moe_intermediate_size % BLOCK * mesh.etp | train.fp8 == blockwise and EXPERTS
    | gate and up of a rank's experts are whole blocks of BLOCK rows | , or train.fp8=tensorwise
model.expert_hidden_size % ROW_BYTES; model.moe_intermediate_size % ROW_BYTES * mesh.etp | train.fp8 != off and EXPERTS
    | grouped products in 8 bits need rows of a multiple of ROW_BYTES bytes | , or train.fp8=off
""", BLOCK=BLOCK, ROW_BYTES=ROW_BYTES, EXPERTS=_HAS_EXPERTS)


def kernel_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    """Yield (key, broken=True, rule, remedy) of broken rules on attention, norm and expert kernels.

    With ``device`` ``auto``, rules for cpu alone or cuda alone are left out.
    """
    see = Scope(config, shape, device).knowing(**_heads(config, shape))
    yield from refused(see, _ATTENTION, _HEADS, _KERNELS, () if triton_is_interpreted() else _INTERPRETED)


def _heads(config: Config, shape: MeshShape) -> dict[str, object]:
    """Return values, by name, that the tables of rules on attention kernels read as ``facts.NAME``.

    ``query`` and ``value`` are the widths of a head, ``widest`` is the larger one. ``unfit`` is
    true if flex attention does not support them, ``wide`` or ``odd`` if cuDNN does not, ``masked``
    if attention masks more than the future. ``wrong`` is the smallest number of keys on a cp rank
    for which cuDNN's gradient may be NaN, 0 if there is none; there is none if the row length is a
    multiple of ``unit``.
    """
    attention, seq_len = config.model.attention, config.train.seq_len
    sinks = attention.sinks and config.kernels.attention != "flex"
    query, value = dims = head_dims(replace(attention, sinks=sinks))
    # A fault of cuDNN (pytorch#196678): with a mask, its gradient of queries may be NaN if the
    # number of keys is 64 modulo 128. The keys of a cp rank end where one of its chunks of the
    # row ends. A sink is one more key.
    sparse = attention.index_topk > 0 and config.train.indexer == "sparse"
    cp = 1 if uses_ulysses(config, shape) else shape.cp
    chunk, ends = (seq_len, 1) if cp == 1 else (seq_len // (2 * cp), 2 * cp)
    wrong = [n * chunk for n in range(1, ends + 1) if (n * chunk + attention.sinks) % 128 == 64]
    return {
        "query": query,
        "value": value,
        "widest": max(dims),
        "unfit": min(dims) < MIN_FLEX_DIM or max(dims) > MAX_FLASH_DIM,
        "wide": dims != MLA_DIMS and max(dims) > MAX_CUDNN_DIM,
        "odd": query % DIM_UNIT or value % DIM_UNIT,
        "masked": config.data.document_mask or attention.sliding_window > 0 or cp > 1 or sparse,
        "wrong": min(wrong, default=0),
        "unit": 128 * ends,
    }


def head_dims(attention: AttentionConfig) -> tuple[int, int]:
    """Return (width of a head's query and key, width of its value) that the attention kernel gets.

    With attention sinks both are one feature wider, and padded to a multiple of 8.
    """
    if attention.kind == "mla":
        return attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
    dim = attention.head_dim
    if attention.sinks:  # the sink takes one more dim of the queries, padded to a multiple of 8
        dim += DIM_UNIT - dim % DIM_UNIT
    return dim, dim


def score_dims(attention: AttentionConfig) -> tuple[int, int]:
    """Return (width of a head's query and key, width of its value) of the model itself.

    Features that attention sinks add for the kernel are not counted.
    """
    return head_dims(replace(attention, sinks=False))


def fp8_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    """Yield (key, whether broken, rule, remedy) of the rules of ``train.fp8``.

    With ``device`` ``auto``, rules for cpu alone or cuda alone are left out.
    """
    yield from refused(Scope(config, shape, device), _FP8)
    blockwise = config.train.fp8 == "blockwise"
    # Blocks count from a weight's first row and column, so tp shards must end at block boundaries.
    for matrix, size in _cut_sizes(config.model, shape.tp) if blockwise and shape.tp > 1 else ():
        whole = size * shape.tp
        yield ("mesh.tp", size % BLOCK != 0,
               f"train.fp8=blockwise has scales of {BLOCK} x {BLOCK} blocks of the whole weight, and tp would cut "
               f"{matrix} inside one: {whole} / {shape.tp} = {size}, {size} % {BLOCK} = {size % BLOCK}",
               f"Set mesh.tp={1 if whole % BLOCK else gcd(whole // BLOCK, shape.tp)}, or train.fp8=tensorwise")


def _cut_sizes(model: ModelConfig, tp: int) -> Iterator[tuple[str, int]]:
    """Yield (description, number of rows or columns on a rank) of each weight that tp shards."""
    a = model.attention
    if model.num_dense_layers:
        yield "the dense FFN (model.intermediate_size)", model.intermediate_size // tp
    if model.shared_width and model.num_moe_layers:
        said = "" if model.shared_intermediate_size else " (num_shared_experts * moe_intermediate_size)"
        yield f"the shared experts{said}", model.shared_width // tp
    if a.kind == "mla":
        heads = a.num_heads // tp
        query, value = head_dims(a)
        yield "queries (num_heads * (qk_nope_head_dim + qk_rope_head_dim))", heads * query
        yield ("keys and values (num_heads * (qk_nope_head_dim + v_head_dim))",
               expanded_width(a, tp))
        yield "the output projection (num_heads * v_head_dim)", heads * value
        return
    yield "heads (num_heads * head_dim)", a.num_heads * a.head_dim // tp
    if a.kind == "compressed":
        yield "outputs of groups of heads (o_groups * o_lora_rank)", a.o_groups * a.o_lora_rank // tp
        return
    # With more tp ranks than kv heads, several ranks use the same head: a rank has at least one.
    yield "keys and values (num_kv_heads * head_dim)", max(a.num_kv_heads // tp, 1) * a.head_dim
    if any(is_linear(a, layer) for layer in range(model.num_layers)):
        keys = a.linear_num_key_heads * a.linear_key_head_dim
        values = a.linear_num_value_heads * a.linear_value_head_dim
        yield "a delta net's keys and values", (2 * keys + 2 * values) // tp
        yield "a delta net's output projection", values // tp
        if a.linear_split_projections:
            yield "a delta net's keys", keys // tp
