"""Rules of the batch, context parallelism, the pipeline and gradients of experts. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from automoe.config.batch import least_micro_batches, more_micro_batches
from automoe.config.layout import KEY as LAYOUT
from automoe.config.layout import module_sizes
from automoe.config.mesh_shape import MeshShape, split_layers, stage_layers, too_many_stages
from automoe.config.pipeline import (
    IN_HALVES,
    IN_ROUNDS,
    MERGES,
    NAMES,
    SINGLE,
    V_SHAPED,
    misfit,
    nearest,
    runs_halves,
    stages_of_ranks,
)
from automoe.config.rule_engine import Row, Scope, filled, refused, table
from automoe.config.schema import Config

# fmt: off
_MERGED = "parallel.overlap_all_to_all"
_HALVES = "mesh.pp > 1 and parallel.schedule == " + "|".join((*IN_HALVES, *V_SHAPED))
_DIVIDED = (
    "global_batch_size / (dp_replicate*dp_shard*micro_batch_size) = {train.global_batch_size} / ({mesh.dp_replicate}*"
    "{mesh.dp_shard}*{train.micro_batch_size}) = {train.global_batch_size // mesh.dp * train.micro_batch_size}"
)
BATCH = table("""
train.global_batch_size % mesh.dp_replicate * mesh.dp_shard * train.micro_batch_size |
    | every data-parallel rank runs whole micro-batches
train.seq_len % mesh.cp * mesh.tp | mesh.tp > 1
    | between blocks the ranks of cp and tp hold equal parts of a row
train.seq_len % 2 * mesh.cp | mesh.cp > 1 | every rank of cp holds a head piece and a tail piece, all equal
RING | model.attention.sinks; model.attention.sliding_window > 0
    | a ring has only causal and document masks
RING | data.document_mask and launch.device != cpu
    | ring attention on CUDA has no document mask
parallel.context: model.attention.num_heads // mesh.tp % mesh.cp | ULYSSES
    | with ulysses each cp rank attends with equal numbers of heads
parallel.context: model.attention.num_kv_heads // mesh.tp % mesh.cp
    | ULYSSES and model.attention.kind == gqa and
    model.attention.num_kv_heads >= mesh.tp and mesh.cp % model.attention.num_kv_heads // mesh.tp
    | with ulysses key/value heads divide over cp ranks or cp ranks over them
mesh.cp: model.attention.linear_num_key_heads // mesh.tp % mesh.cp |
    | cp ranks exchange positions for equal numbers of a delta net's key heads, whose state runs through the
    whole row
""", RING="parallel.context == ring and mesh.cp > 1", ULYSSES="parallel.context == ulysses and mesh.cp > 1")
_OVERLAP = table("""
MERGED | mesh.ep == 1 | with mesh.ep=1 there is no all-to-all to hide
    | Set mesh.ep=2 or more, or MERGED=false
moe.dispatcher == allgather | MERGED | there is no all-to-all to hide
train.compile; kernels.attention == flex | MERGED | compiled layers cannot run in two threads
parallel.schedule != MERGING | mesh.pp > 1 and MERGED
    | MERGED with mesh.pp={mesh.pp} merges the passes of NAMES
    | Set parallel.schedule=Interleaved1F1B with parallel.stages_per_rank=2 or more, or
    MERGED=false
parallel.reshard == micro_batch; parallel.grad_sync == micro_batch | MERGED
    | two micro-batches run at once and share their weights to the end of the step
""", MERGED=_MERGED, MERGING="|".join(MERGES), NAMES=" and ".join(MERGES))
_PIPELINE = table("""
train.global_batch_size // mesh.dp_replicate * mesh.dp_shard * train.micro_batch_size % mesh.pp
    | mesh.pp > 1 and parallel.schedule == ROUNDS
    | {parallel.schedule} runs its micro-batches in rounds of mesh.pp={mesh.pp}
train.compile | HALVES
    | torch cannot run the halves of a compiled backward pass separately ({parallel.schedule})
    | Set train.compile=false, or parallel.schedule=Interleaved1F1B
parallel.reshard == micro_batch; parallel.grad_sync == micro_batch | mesh.pp > 1
    | torch's pipeline stages always wait for the end of the step | , or mesh.pp=1
""", HALVES=_HALVES, ROUNDS="|".join(IN_ROUNDS))
WGRAD = table("""
FUSED | model.num_moe_layers == 0 | no layer has experts
FUSED | lora.rank > 0
    | adapters are trained (lora.rank={lora.rank}), and matrices are frozen
FUSED | moe.experts != grouped_mm
    | the products of moe.experts={moe.experts} return gradients to autograd
FUSED | train.fp8 != off | products in 8 bits return gradients to autograd
FUSED | HALVES
    | the halves of a backward pass would each compute the products ({parallel.schedule})
    | Set parallel.schedule=Interleaved1F1B, or parallel.expert_wgrad=autograd
FUSED | parallel.grad_sync == micro_batch
    | each micro-batch's gradients are reduced at once, so there is no sum to add to
parallel.expert_wgrad == delayed | not MERGED and mesh.ep > 1
    | delayed products run while gradients of tokens travel in a merged pass
    | Set parallel.expert_wgrad=fused, or MERGED=true
parallel.expert_wgrad == delayed | not MERGED
    | delayed products run while gradients of tokens travel in a merged pass | Set parallel.expert_wgrad=fused
""", FUSED="parallel.expert_wgrad != autograd", HALVES=_HALVES, MERGED=_MERGED)


def pipeline_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    """Yield the rules of ``mesh.pp``, of schedules and stages, and of merged passes."""
    parallel = config.parallel
    key = "parallel.stages_per_rank"
    stages, schedule, pp = parallel.stages_per_rank, parallel.schedule, shape.pp
    fewest = 1 if schedule in SINGLE else 2
    remedy = f"Set {key}={fewest if pp > 1 else 1}"
    if parallel.layout is not None:  # it says how many stages there are
        key = LAYOUT
        ranks = max(2, -(-pp * stages // fewest))
        remedy = f"Set mesh.pp={ranks}" + f" and write {ranks * fewest} stages" * (ranks * fewest != pp * stages)
    yield ("parallel.schedule", schedule not in NAMES, f"the schedules are {', '.join(NAMES)}",
           nearest(schedule))
    yield (key, pp == 1 and stages > 1, "with mesh.pp=1 the model is one stage",
           remedy + ("" if shape.world_size % 2 or key == LAYOUT else ", or mesh.pp=2 or more"))
    yield (key, stages > 1 and schedule in SINGLE,
           f"schedule {schedule} runs exactly 1 stage a rank; only Interleaved1F1B and the like run several",
           f"{remedy} or parallel.schedule=Interleaved1F1B")
    yield (key, pp > 1 and schedule in V_SHAPED and stages != 2,
           f"{schedule} runs exactly 2 stages a rank: down the ranks and up again", remedy)
    yield from _stage_rows(config, shape)
    shared = config.model.attention.index_shared_layers
    orphans = [stage.start for stage in stage_layers(config, shape) if stage and stage.start in shared]
    yield ("model.attention.index_shared_layers", bool(orphans) and config.model.attention.index_topk > 0,
           f"layers {orphans} begin a pipeline stage, and the layers whose choice they use are in another",
           "Set parallel.layers_per_stage so that a stage begins with a layer that has an indexer, or mesh.pp=1")
    see = Scope(config, shape)
    yield from refused(see, _OVERLAP)
    micro_batches = config.train.global_batch_size // (shape.dp * config.train.micro_batch_size)
    more = more_micro_batches(config, shape)
    yield ("train.micro_batch_size", config.parallel.overlap_all_to_all and micro_batches < 2,
           f"{_MERGED} merges two micro-batches, and a data-parallel rank has {micro_batches} a step",
           f"Set {more}, or {_MERGED}=false")
    if pp == 1:
        return
    yield (key, schedule in NAMES and schedule not in SINGLE and stages < 2,
           f"{schedule} runs at least 2 stages a rank", f"{remedy} or parallel.schedule=1F1B")
    least = least_micro_batches(config, shape)
    yield ("train.global_batch_size", micro_batches < least,
           f"{schedule} needs at least {'2 * ' * (least > pp)}mesh.pp={least} micro-batches in flight; "
           f"{filled(see, _DIVIDED)} micro-batches", f"Nearest valid choice: {more}")
    yield from refused(see, _PIPELINE)
    rule = misfit(schedule, pp, stages, micro_batches)
    yield "parallel.schedule", bool(rule), rule, remedy
    # The first stage passes no gradient on, so its passes have no first half.
    _, *modules = module_sizes(config, pp * stages)
    tied = modules[-1] > 0 and config.model.tie_embeddings
    which = "a module beside a tied head reads" if tied else "modules of more than one depth in a stage read"
    yield ("model.num_mtp_layers", (tied or max(modules) > 1) and runs_halves(schedule),
           f"{which} the embedding along the path of the stage's input, which torch cannot leave out of the second half "
           f"of a backward pass ({schedule})",
           f"Give each m a stage of its own{' before the last' * tied} in parallel.layout, or set "
           f"parallel.schedule=Interleaved1F1B or model.num_mtp_layers={int(not tied)}")


def _stage_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    parallel, pp = config.parallel, shape.pp
    stages, schedule = parallel.stages_per_rank, parallel.schedule
    num_layers = config.model.num_layers
    num_stages = pp * stages
    sizes = parallel.layers_per_stage
    yield "model.num_layers", sizes is None and num_layers < num_stages, *too_many_stages(num_stages)
    if sizes is not None:
        _, remedy = too_many_stages(num_stages)
        if num_layers >= num_stages:
            even = ",".join(str(len(stage)) for stage in split_layers(num_layers, num_stages))
            remedy = f"Set parallel.layers_per_stage=[{even}] or null"
        held = stages_of_ranks(pp, stages, schedule)
        key = "parallel.layers_per_stage"
        if parallel.layout is not None:
            key = LAYOUT
            remedy = f"Write {num_layers} t, and fill at least one stage of each rank: {held}, counted from 0"
        yield (key, len(sizes) != num_stages,
               f"one size per stage: mesh.pp * parallel.stages_per_rank = {num_stages} stages, {len(sizes)} sizes",
               remedy)
        least = min(sizes, default=0)
        yield key, least < 0, f"a stage cannot have {least} layers", remedy
        # The first stage holds the embedding, the last one the head.
        modules = module_sizes(config, num_stages)
        full = [n + m + (i in (0, num_stages - 1)) for i, (n, m) in enumerate(zip(sizes, modules, strict=True))]
        empty = [rank for rank, rank_stages in enumerate(held) if not any(full[stage] for stage in rank_stages)]
        yield (key, bool(empty),
               f"every pipeline rank trains something, and the stages of rank {min(empty, default=0)} are all empty", remedy)
        yield (key, sum(sizes) != num_layers,
               f"the sizes add up to {sum(sizes)}, and model.num_layers is {num_layers}", remedy)
