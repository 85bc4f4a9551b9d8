"""Every legal mapping of a world of ranks: what a random draw of the mesh suite draws from.

The rules are written down here a second time, as arithmetic alone and independent of
``automoe.config.validate``: a rule that is missing there, or one too many, shows as a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from automoe.config.mesh_shape import MeshShape
from automoe.config.recompute import recomputed_names
from automoe.config.schema import Config, ModelConfig

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # stages down the ranks and up again


def foldings(world_size: int) -> Iterator[MeshShape]:
    """Every way to write ``world_size`` ranks as both views, whatever the model."""
    for pp in _divisors(world_size):
        attention = list(_products(world_size // pp, 4))
        experts = list(_products(world_size // pp, 4))
        for dp_replicate, dp_shard, cp, tp in attention:
            for ep_replicate, ep_shard, ep, etp in experts:
                yield MeshShape(pp, dp_replicate, dp_shard, cp, tp, ep_replicate, ep_shard, ep, etp)


def legal_meshes(world_size: int, config: Config) -> Iterator[MeshShape]:
    """Those foldings that ``config``'s model, batch and pipeline fit; ``config.mesh`` is not looked at."""
    return (shape for shape in foldings(world_size) if is_legal(shape, config))


def is_legal(shape: MeshShape, config: Config) -> bool:
    """Whether every part that is cut is cut evenly, and the pipeline has layers and micro-batches enough."""
    return (
        _fits_experts(shape, config.model)
        and _fits_heads(shape, config.model)
        and _fits_context(shape, config)
        and _fits_batch(shape, config)
        and _fits_pipeline(shape, config)
    )


def with_mesh(config: Config, shape: MeshShape) -> Config:
    """``config`` on the mesh ``shape``, every axis written out."""
    axes = dict.fromkeys(shape.axes("default") + shape.axes("moe"))
    mesh = replace(config.mesh, preset="", **{axis: getattr(shape, axis) for axis in axes})
    return replace(config, mesh=mesh)


def _fits_experts(shape: MeshShape, model: ModelConfig) -> bool:
    width_ranks = shape.etp * shape.ep_shard  # both cut I
    return (
        model.num_experts % shape.ep == 0
        and model.moe_intermediate_size % width_ranks == 0
        and model.expert_hidden_size % (width_ranks if model.biased_experts else shape.ep_shard) == 0
        and not (model.post_norm_eps and shape.etp > 1)
    )


def _fits_heads(shape: MeshShape, model: ModelConfig) -> bool:
    tp, attention = shape.tp, model.attention
    if attention.linear_num_key_heads % (tp * shape.cp):  # cp ranks take some of tp's each
        return False
    if attention.kind == "compressed" and (shape.cp > 1 or attention.o_groups % tp):
        return False
    kv_heads = attention.num_kv_heads if attention.kind == "gqa" else tp
    dense = model.intermediate_size if model.first_k_dense else 0
    cut = (attention.num_heads, model.vocab_size, dense, model.shared_width)
    return all(size % tp == 0 for size in cut) and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _fits_context(shape: MeshShape, config: Config) -> bool:
    """Whether every cp rank gets as many heads as the others, where they exchange them."""
    if config.parallel.context != "ulysses" or shape.cp == 1:
        return True
    attention = config.model.attention
    heads = attention.num_heads // shape.tp
    keys = max(attention.num_kv_heads // shape.tp, 1) if attention.kind == "gqa" else heads
    return heads % shape.cp == 0 and (keys % shape.cp == 0 or shape.cp % keys == 0)


def _fits_batch(shape: MeshShape, config: Config) -> bool:
    train = config.train
    pieces = 2 * shape.cp if shape.cp > 1 else 1  # a head piece and a tail piece a rank
    tokens = shape.cp * shape.tp if shape.tp > 1 else 1
    return (
        train.global_batch_size % (shape.dp * train.micro_batch_size) == 0
        and train.seq_len % pieces == 0
        and train.seq_len % tokens == 0
    )


def _fits_overlap(shape: MeshShape, config: Config) -> bool:
    """Whether there is an all-to-all to hide, a micro-batch to hide it behind, and nothing that forbids it."""
    parallel, train = config.parallel, config.train
    return (
        shape.ep > 1
        and config.moe.dispatcher in ("alltoall", "hierarchical")
        and not {"full", "moe"} & set(recomputed_names(parallel))
        and (shape.pp == 1 or parallel.schedule in ("Interleaved1F1B", "DualPipeV"))
        and train.global_batch_size // (shape.dp * train.micro_batch_size) >= 2
        and "micro_batch" not in (parallel.reshard, parallel.grad_sync)
    )


def _fits_pipeline(shape: MeshShape, config: Config) -> bool:
    parallel, train = config.parallel, config.train
    if parallel.overlap_all_to_all and not _fits_overlap(shape, config):
        return False
    v_shaped = parallel.schedule in V_SHAPED
    in_rounds = parallel.schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    if shape.pp == 1:
        return parallel.stages_per_rank == 1 and parallel.layers_per_stage in (None, [config.model.num_layers])
    if (parallel.stages_per_rank > 1) != (parallel.schedule not in ("GPipe", "1F1B")):
        return False
    if v_shaped and parallel.stages_per_rank != 2:
        return False
    again = {"full", "core_attn", "mlp", "moe", "shared_experts"} & set(recomputed_names(parallel))
    model = config.model
    stages = shape.pp * parallel.stages_per_rank
    modules = [0] * (stages - 1) + [model.num_mtp_layers]
    if parallel.layout is not None:  # written out
        modules = [stage.count("m") for stage in parallel.layout.split("|")]
    reads_twice = max(modules[1:]) > 1 or (modules[-1] and model.tie_embeddings)
    if (again or reads_twice) and (v_shaped or parallel.schedule == "InterleavedZeroBubble"):
        return False
    sizes = parallel.layers_per_stage
    layers = config.model.num_layers
    unit = model.layers_together
    even = [unit * (layers // unit // stages + (stage < layers // unit % stages)) for stage in range(stages)]
    given = sizes or even
    starts = {sum(given[:stage]) for stage, size in enumerate(given) if size}
    if starts & set(model.attention.index_shared_layers):  # whose choice another stage makes
        return False
    if any(start % unit for start in starts):
        return False
    if (sizes is None and layers < unit * stages) or (
        sizes is not None
        and (
            len(sizes) != stages
            or sum(sizes) != layers
            or not leaves_no_rank_empty(list(map(sum, zip(sizes, modules, strict=True))), shape.pp, parallel.schedule)
        )
    ):
        return False
    micro_batches = train.global_batch_size // (shape.dp * train.micro_batch_size)
    least = {"GPipe": 0, "LoopedBFS": 0, "DualPipeV": 2 * shape.pp}.get(parallel.schedule, shape.pp)
    if micro_batches < least:
        return False
    if in_rounds and micro_batches % shape.pp:
        return False
    return "micro_batch" not in (parallel.reshard, parallel.grad_sync)


def leaves_no_rank_empty(sizes: list[int], pp: int, schedule: str) -> bool:
    """Whether every pipeline rank holds a layer or module (``sizes``), the embedding or the head."""
    held = [0] * pp
    for stage, size in enumerate(sizes):
        place = stage % pp
        up = schedule in V_SHAPED and stage // pp % 2 == 1
        held[pp - 1 - place if up else place] += size + (stage in (0, len(sizes) - 1))
    return all(held)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _products(number: int, length: int) -> Iterator[tuple[int, ...]]:
    """All tuples of ``length`` positive integers whose product is ``number``."""
    if length == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _products(number // first, length - 1):
            yield (first, *rest)
