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
from automoe.config.facts import BLOCK, ELEMENT_BYTES, ROW_BYTES
from automoe.config.mesh_shape import MeshShape, uses_ring, uses_ulysses
from automoe.config.recompute import DISCARDED_OUTPUTS, recomputed_names
from automoe.config.rules import Row, divides
from automoe.config.schema import AttentionConfig, Config, ModelConfig, is_linear

WIRE_WORD = 8  # bytes; rows in 8 bits travel as multiples of this
MAX_FLASH_DIM = 256
MAX_CUDNN_DIM = 128
MIN_FLEX_DIM = 16
MLA_DIMS = (192, 128)  # of queries and keys, and of values: what cuDNN has beyond 128
DIM_UNIT = 8
# These backends have known limits; ``loop`` has none, and a plugin checks its own.
_LIMITED_EXPERTS = ("grouped_mm", "triton", "te")
_FOREIGN_ATTENTION = {"cudnn": "cuDNN", "te": "transformer-engine"}
CHUNK_TOKENS = 512  # of the head's logits, at least
MOST_CHUNK_TOKENS = 4096
_INTERPRET = "TRITON_INTERPRET=1 to try the kernels out, very slowly"
_NEEDS_CUDA = "Triton's kernels need CUDA, and this run is on cpu"


def triton_is_interpreted() -> bool:
    """Return True if Triton's kernels run interpreted, without CUDA, in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def wire_row_bytes(hidden: int) -> int:
    """Return the bytes of a row in 8 bits on its way to an expert: codes, and float32 scales."""
    scales = 4 * -(-hidden // BLOCK)
    return -(-(-(-hidden // 4) * 4 + scales) // WIRE_WORD) * WIRE_WORD


def chunk_tokens(tokens: int, hidden: int) -> int:
    """Return how many of ``tokens`` have their logits in memory at once.

    A chunk has as many logits as the head has parameters, within bounds.

    The gradient of the whole head is added up once a chunk, which dominates the loss's memory
    traffic when chunks are small. Compiled code is made for one size, so chunks are equal if fewer
    than twice the least number of chunks divides the tokens; else the last one is shorter.
    """
    most = max(CHUNK_TOKENS, min(hidden, MOST_CHUNK_TOKENS))
    fewest = max(1, -(-tokens // most))
    num_chunks = next((n for n in range(fewest, 2 * fewest) if tokens % n == 0), fewest)
    return max(1, -(-tokens // num_chunks))


# Rows are laid out as a table: key and whether it is broken, the rule with its numbers, the remedy.
# fmt: off

def kernel_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    """Yield the rules of ``kernels`` and of expert backends from other packages."""
    dtype = config.train.dtype
    if config.kernels.attention != "sdpa":
        yield from _attention_rows(config, shape, device)
    for name in ("rope", "loss"):
        chosen = getattr(config.kernels, name) == "triton"
        yield (f"kernels.{name}", chosen and dtype == "float64", "it has no float64, and train.dtype=float64",
               f"Set kernels.{name}=torch")
        yield (f"kernels.{name}", chosen and device == "cpu" and not triton_is_interpreted(), _NEEDS_CUDA,
               f"Set kernels.{name}=torch, or {_INTERPRET}")
    by_token = config.train.loss != "cross_entropy" or config.recipe == "dpo"
    yield ("kernels.loss", config.kernels.loss == "triton" and by_token,
           "its kernels compute the mean cross-entropy of a chunk, and this run needs the loss of each token",
           "Set kernels.loss=torch")
    if config.kernels.norm == "te":
        for key, value, wrong in (("launch.device", device, "cpu"), ("train.dtype", dtype, "float64")):
            yield ("kernels.norm", value == wrong,
                   f"transformer-engine computes on CUDA, in float32 and narrower, and {key}={value}",
                   "Set kernels.norm=torch")
        yield ("kernels.norm", "layernorm" in config.parallel.recompute,
               "transformer-engine frees what its backward pass has read, and with parallel.recompute=[layernorm] "
               "others read it too", "Set kernels.norm=torch, or leave layernorm out of parallel.recompute")
    if config.moe.experts == "te" and config.model.num_moe_layers:
        for broken, rule in (
            (device == "cpu", "transformer-engine needs CUDA, and this run is on cpu"),
            (config.model.biased_experts, "it has experts without biases, and model.biased_experts=true"),
        ):
            yield "moe.experts", broken, rule, "Nearest valid choice: moe.experts=grouped_mm"


def expert_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    """Yield the rules for dtypes, sizes and devices of ``moe.experts``."""
    if config.moe.experts not in _LIMITED_EXPERTS or not config.model.num_moe_layers:
        return
    key = "moe.experts"
    backend = config.moe.experts
    model = config.model
    dtype = config.train.dtype
    # 8-bit products are also emulated in float64.
    no_double = dtype == "float64" and config.train.fp8 == "off" and backend != "grouped_mm"
    yield key, no_double, f"{backend} has no float64, and train.dtype=float64", "Set moe.experts=loop"
    if backend == "triton":
        yield (key, device == "cpu" and not triton_is_interpreted(), _NEEDS_CUDA,
               f"Set moe.experts=grouped_mm, or {_INTERPRET}")
        return
    if dtype == "float64":  # one product after the other, of any width
        return
    size = ELEMENT_BYTES[dtype]
    inner = model.moe_intermediate_size // shape.etp
    for name, width, ranks in (("hidden_size", model.hidden_size, 1), ("moe_intermediate_size", inner, shape.etp)):
        yield divides(f"model.{name}", width * ranks, ROW_BYTES // size * ranks,
            f"{backend} needs rows of a multiple of {ROW_BYTES} bytes: {width} * {size} bytes = {width * size}",
            "moe.experts=loop")



def _attention_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    key = "kernels.attention"
    kernel = config.kernels.attention
    dtype = config.train.dtype
    remedy = "Nearest valid choice: kernels.attention=sdpa"
    yield key, uses_ring(config, shape), "ring attention (parallel.context=ring) calls its own kernels", remedy
    if kernel == "math":
        return
    sparse = config.model.attention.index_topk * (config.train.indexer == "sparse")
    yield (key, sparse > 0 and kernel in ("te", "flash", "flex"),
           f"a query sees the keys that an indexer chooses (model.attention.index_topk={sparse}), and {kernel} has no "
           "such mask", remedy)
    query, value = head_dims(config.model.attention)
    if kernel == "flex":
        query, value = head_dims(replace(config.model.attention, sinks=False))
        yield key, device == "cpu", "FlexAttention has no backward pass on the CPU, and this run is on cpu", remedy
        yield (key, device == "cuda" and dtype == "float64", "FlexAttention has no float64 on CUDA, and "
               "train.dtype=float64", remedy)
        yield (key, min(query, value) < MIN_FLEX_DIM or max(query, value) > MAX_FLASH_DIM,
               f"it has heads of {MIN_FLEX_DIM} to {MAX_FLASH_DIM} dims, and this model's have {query}, its values "
               f"{value}", remedy)
        return
    if kernel in _FOREIGN_ATTENTION:
        yield key, device == "cpu", f"{_FOREIGN_ATTENTION[kernel]} needs CUDA, and this run is on cpu", remedy
        # te's fused attention runs on cuDNN, so it has the same limits.
        yield (key, (query, value) != MLA_DIMS and max(query, value) > MAX_CUDNN_DIM,
               f"it has heads of up to {MAX_CUDNN_DIM} dims, and {MLA_DIMS[0]} with values of {MLA_DIMS[1]}; this "
               f"model's have {query}, its values {value}", remedy)
        yield (key, query % DIM_UNIT != 0 or value % DIM_UNIT != 0,
               f"it has heads of multiples of {DIM_UNIT} dims: {query} % {DIM_UNIT} = {query % DIM_UNIT}, "
               f"{value} % {DIM_UNIT} = {value % DIM_UNIT}", remedy)
    if device != "cuda":  # the CPU's flash kernel takes any mask, dtype and dims
        return
    half = f"on CUDA it computes only in half precision, and train.dtype={dtype}"
    yield key, dtype != "bfloat16", half, f"{remedy}, or train.dtype=bfloat16"
    dim = max(query, value)
    wide = f"it has heads of up to {MAX_FLASH_DIM} dims, and this model's have {dim}"
    yield key, kernel == "flash" and dim > MAX_FLASH_DIM, wide, remedy
    attention = config.model.attention
    window = attention.sliding_window
    masked = config.data.document_mask
    if kernel == "cudnn":
        # A fault of cuDNN (pytorch#196678): with a mask, its gradient of queries may be NaN if the
        # number of keys is 64 modulo 128. The keys of a cp rank end where one of its chunks of the
        # row ends. A sink is one more key.
        cp = 1 if uses_ulysses(config, shape) else shape.cp
        seq_len = config.train.seq_len
        chunk, ends = (seq_len, 1) if cp == 1 else (seq_len // (2 * cp), 2 * cp)
        wrong = [n * chunk for n in range(1, ends + 1) if (n * chunk + attention.sinks) % 128 == 64]
        yield (key, bool(wrong) and (masked or window > 0 or cp > 1 or sparse > 0),
               "with a mask its gradient may be NaN if the number of keys modulo 128 is 64: "
               f"train.seq_len={seq_len} on mesh.cp={shape.cp} has {wrong and wrong[0]}",
               f"{remedy}, which avoids cuDNN there, or a train.seq_len that {128 * ends} divides")
        return
    unmasked = f"{remedy}, or data.document_mask=false"
    exchanges = attention.num_heads % (shape.tp * shape.cp) == 0
    for broken, why, instead in (
        (masked, "data.document_mask=true masks documents", unmasked),
        (window > 0, f"model.attention.sliding_window={window} masks keys further back", remedy),
        (shape.cp > 1 and not uses_ulysses(config, shape),
         f"with mesh.cp={shape.cp} keys are masked by their position",
         remedy + ", or parallel.context=ulysses" * exchanges),
        (attention.sinks and kernel == "te", "model.attention.sinks=true adds a key", remedy),
    ):
        yield key, broken, f"on CUDA its only mask is the causal one, and {why}", instead


def head_dims(attention: AttentionConfig) -> tuple[int, int]:
    """Return a head's dims as kernels see them: of queries and keys, and of values."""
    if attention.kind == "mla":
        return attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
    dim = attention.head_dim
    if attention.sinks:  # the sink takes one more dim of the queries, padded to a multiple of 8
        dim += DIM_UNIT - dim % DIM_UNIT
    return dim, dim


def compile_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    """Yield the rules of ``train.compile``: compiled parts must not contain graph breaks."""
    if not config.train.compile:
        return
    kernels = config.kernels
    names = recomputed_names(config.parallel)
    # These modules drop their outputs and recompute them for their readers; within a compiled part
    # the compiler decides which outputs to recompute.
    hooked = [name for name in DISCARDED_OUTPUTS if name in names]
    left = ",".join(name for name in names if name not in DISCARDED_OUTPUTS)
    without_core = ",".join(name for name in names if name != "core_attn")
    # With tp, torch 2.13 mistakes the mesh of a weight for a tensor that it has to keep.
    sharded = shape.tp > 1 and "core_attn" in names
    for broken, what, instead in (
        (uses_ring(config, shape), "the calls of parallel.context=ring", "parallel.context=gather"),
        (kernels.attention == "te", "the modules of kernels.attention=te", "kernels.attention=sdpa"),
        (kernels.attention == "flex", "FlexAttention with its blocks (kernels.attention=flex)", "kernels.attention=sdpa"),
        (kernels.rope == "triton", "the kernels of kernels.rope=triton", "kernels.rope=torch"),
        (config.model.attention.index_topk > 0, "an indexer with its choice (model.attention.index_topk)",
         "another model"),
        (kernels.norm == "te", "the modules of kernels.norm=te", "kernels.norm=torch"),
        (config.train.fp8 != "off", f"the products of train.fp8={config.train.fp8}", "train.fp8=off"),
        (bool(hooked), f"the hooks of parallel.recompute=[{','.join(hooked)}]", f"parallel.recompute=[{left}]"),
        (sharded, f"parallel.recompute=[core_attn] with mesh.tp={shape.tp}", f"parallel.recompute=[{without_core}]"),
    ):
        rule = f"attention and norms are compiled whole, and {what} cannot be part of that"
        yield "train.compile", broken, rule, f"Set train.compile=false, or {instead}"


def fp8_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    """Yield the rules of ``train.fp8``."""
    mode = config.train.fp8
    if mode == "off":
        return
    blockwise = mode == "blockwise"
    yield ("train.fp8", config.train.dtype == "float64" and device != "cpu",
           "around 8-bit products a GPU computes in float32 or bfloat16, and train.dtype=float64",
           "Set train.fp8=off, train.dtype=bfloat16, or launch.device=cpu")
    if config.model.num_moe_layers:
        yield ("moe.experts", config.moe.experts != "grouped_mm",
               f"train.fp8={mode} multiplies the experts with grouped products, and has no other backend",
               "Set moe.experts=grouped_mm, or train.fp8=off")
        yield ("moe.pad_to_capacity", not blockwise and config.moe.pad_to_capacity,
               f"padding repeats the first token of each rank, and train.fp8={mode} would compute its scales "
               "from different tokens on each mesh", "Set moe.pad_to_capacity=false, or train.fp8=blockwise")
        width = config.model.moe_intermediate_size
        etp = shape.etp
        yield ("model.moe_intermediate_size", blockwise and width % (BLOCK * etp) != 0,
               f"gate and up of a rank's experts are whole blocks of {BLOCK} rows: {width} % ({BLOCK} * mesh.etp) = "
               f"{width} % {BLOCK * etp} = {width % (BLOCK * etp)}",
               "Set train.fp8=tensorwise" + (f", or mesh.etp={_largest_cut(width, etp)}" if etp > 1 else ""))
        sizes = ("hidden_size", config.model.hidden_size, 1), ("moe_intermediate_size", width // etp, etp)
        for name, size, ranks in sizes:
            yield (f"model.{name}", size % ROW_BYTES != 0,
                   f"grouped products in 8 bits need rows of a multiple of {ROW_BYTES} bytes: {size} % {ROW_BYTES} = "
                   f"{size % ROW_BYTES}",
                   f"Nearest valid choice: {-(-size // ROW_BYTES) * ROW_BYTES * ranks}, or train.fp8=off")
    # Blocks count from a weight's first row and column, so tp shards must end at block boundaries.
    for what, size in _cut_sizes(config.model, shape.tp) if blockwise and shape.tp > 1 else ():
        whole = size * shape.tp
        yield ("mesh.tp", size % BLOCK != 0,
               f"train.fp8=blockwise has scales of {BLOCK} x {BLOCK} blocks of the whole weight, and tp would cut "
               f"{what} inside one: {whole} / {shape.tp} = {size}, {size} % {BLOCK} = {size % BLOCK}",
               f"Nearest valid choice: mesh.tp={_largest_cut(whole, shape.tp)}, or train.fp8=tensorwise")


def _largest_cut(size: int, ranks: int) -> int:
    """Return the largest divisor of ``ranks`` that cuts ``size`` at block boundaries, or 1."""
    return gcd(size // BLOCK, ranks) if size % BLOCK == 0 else 1


def _cut_sizes(model: ModelConfig, tp: int) -> Iterator[tuple[str, int]]:
    """Yield (name of a weight that tp shards, its rows or columns per rank)."""
    a = model.attention
    if model.first_k_dense:
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
    # With more tp ranks than kv heads, several ranks use the same head: a rank has at least one.
    yield "keys and values (num_kv_heads * head_dim)", max(a.num_kv_heads // tp, 1) * a.head_dim
    if any(is_linear(a, layer) for layer in range(model.num_layers)):
        keys = a.linear_num_key_heads * a.linear_key_head_dim
        values = a.linear_num_value_heads * a.linear_value_head_dim
        yield "a delta net's keys and values", (2 * keys + 2 * values) // tp
        yield "a delta net's output projection", values // tp
        if a.linear_split_projections:
            yield "a delta net's keys", keys // tp
