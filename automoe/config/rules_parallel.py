"""Rules on the batch, context parallelism, the pipeline and gradients of experts. No torch."""

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
    SINGLE,
    V_SHAPED,
    misfit,
    stages_of_ranks,
)
from automoe.config.rule_engine import Row, Scope, refused, table
from automoe.config.schema import Config

# fmt: off
_MERGED = "parallel.overlap_all_to_all"
_DESCRIBED = ("parallel.stages_per_rank", "parallel.layers_per_stage")  # by ``parallel.layout``
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
model.attention.index_shared_layers: facts.orphans | model.attention.index_topk > 0
    | layers {facts.orphans} begin a pipeline stage, and the layers whose choice they use are in another
    | Set parallel.layers_per_stage so that a stage begins with a layer that has an indexer, or mesh.pp=1
parallel.layers_per_stage: facts.seconds |
    | layers {facts.seconds} begin a pipeline stage, and are the second ones of pairs
    | Set parallel.layers_per_stage to even numbers, or mesh.pp=1
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
train.micro_batch_size: facts.micro_batches < 2 | MERGED
    | MERGED merges two micro-batches, and a data-parallel rank has {facts.micro_batches} a step
    | Set {facts.more}, or MERGED=false
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
_STAGES = table("""
parallel.stages_per_rank > 1 | mesh.pp == 1 | with mesh.pp=1 the model is one stage | {facts.remedy}{facts.pipe}
parallel.stages_per_rank > 1 | parallel.schedule == SINGLE
    | schedule {parallel.schedule} runs exactly 1 stage a rank; only Interleaved1F1B and the like run several
    | {facts.remedy} or parallel.schedule=Interleaved1F1B
parallel.stages_per_rank != 2 | mesh.pp > 1 and parallel.schedule == V_SHAPED
    | {parallel.schedule} runs exactly 2 stages a rank: down the ranks and up again | {facts.remedy}
""", SINGLE="|".join(SINGLE), V_SHAPED="|".join(V_SHAPED))
_TOO_FEW = table("""
parallel.stages_per_rank < 2 | parallel.schedule != SINGLE | {parallel.schedule} runs at least 2 stages a rank
    | {facts.remedy} or parallel.schedule=1F1B
train.global_batch_size: facts.micro_batches < facts.least |
    | {parallel.schedule} needs at least {facts.times}mesh.pp={facts.least} micro-batches in flight; DIVIDED micro-batches
    | Set {facts.more}
""", SINGLE="|".join(SINGLE), DIVIDED=_DIVIDED)
_SIZES = table("""
parallel.layers_per_stage: facts.sizes != facts.stages |
    | one size per stage: mesh.pp * parallel.stages_per_rank = {facts.stages} stages, {facts.sizes} sizes
    | {facts.remedy}
parallel.layers_per_stage: facts.least < 0 | | a stage cannot have {facts.least} layers | {facts.remedy}
parallel.layers_per_stage: facts.empty |
    | every pipeline rank trains something, and the stages of rank {facts.rank} are all empty | {facts.remedy}
parallel.layers_per_stage: facts.total != model.num_layers |
    | the sizes add up to {facts.total}, and model.num_layers is {model.num_layers} | {facts.remedy}
""")
_HALVED_MODULES = table("""
model.num_mtp_layers: facts.joined | parallel.schedule == HALVED
    | {facts.which} the embedding along the path of the stage's input, which torch cannot leave out of the second half
    of a backward pass ({parallel.schedule})
    | Give each m a stage of its own{facts.before} in parallel.layout, or set parallel.schedule=Interleaved1F1B or
    model.num_mtp_layers={facts.fewer}
""", HALVED="|".join((*IN_HALVES, *V_SHAPED)))
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
    """Yield (key, whether broken, rule, remedy) of the rules on pipelines.

    They include those on ``parallel.overlap_all_to_all``, which runs a forward with a backward
    pass.
    """
    for row in _pipeline_rows(config, shape):
        described = config.parallel.layout is not None and row[0] in _DESCRIBED
        yield (LAYOUT, *row[1:]) if described else row


def _pipeline_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    parallel, train, pp = config.parallel, config.train, shape.pp
    stages, schedule = parallel.stages_per_rank, parallel.schedule
    fewest = 1 if schedule in SINGLE else 2
    if parallel.layout is None:
        remedy = f"Set parallel.stages_per_rank={fewest if pp > 1 else 1}"
    else:  # it says how many stages there are
        ranks = max(2, -(-pp * stages // fewest))
        remedy = f"Set mesh.pp={ranks}" + f" and write {ranks * fewest} stages" * (ranks * fewest != pp * stages)
    more_ranks = parallel.layout is None and shape.world_size % 2 == 0
    see = Scope(config, shape).knowing(remedy=remedy, pipe=", or mesh.pp=2 or more" * more_ranks)
    yield from refused(see, _STAGES)
    yield from _stage_rows(see, config, shape)
    shared = config.model.attention.index_shared_layers
    held = stage_layers(config, shape)
    least = least_micro_batches(config, shape)
    _, *modules = module_sizes(config, pp * stages)
    tied = modules[-1:] > [0] and config.model.tie_embeddings
    see = see.knowing(
        orphans=[stage.start for stage in held if stage and stage.start in shared],
        seconds=[stage.start for stage in held if stage and stage.start % config.model.layers_together],
        micro_batches=train.global_batch_size // (shape.dp * train.micro_batch_size),
        more=more_micro_batches(config, shape),
        least=least,
        times="2 * " * (least > pp),
        which="a module beside a tied head reads" if tied else "modules of more than one depth in a stage read",
        joined=tied or max(modules, default=0) > 1,
        before=" before the last" * tied,
        fewer=int(not tied),
    )
    yield from refused(see, _OVERLAP)
    if pp == 1:
        return
    yield from refused(see, _TOO_FEW, _PIPELINE)
    rule = misfit(schedule, pp, stages, see("facts.micro_batches"))
    yield "parallel.schedule", bool(rule), rule, remedy
    yield from refused(see, _HALVED_MODULES)


def _stage_rows(see: Scope, config: Config, shape: MeshShape) -> Iterator[Row]:
    """Yield (key, whether broken, rule, remedy) of the rules on the layers of pipeline stages.

    Args:
        see: values of ``config`` and ``shape`` that the tables of rules read.
    """
    parallel, num_layers, sizes = config.parallel, config.model.num_layers, config.parallel.layers_per_stage
    num_stages = shape.pp * parallel.stages_per_rank
    layers_together = config.model.layers_together
    rule, remedy = too_many_stages(num_stages, layers_together)
    yield "model.num_layers", sizes is None and num_layers < num_stages * layers_together, rule, remedy
    if sizes is None:
        return
    if num_layers >= num_stages * layers_together:
        even = ",".join(str(len(stage)) for stage in split_layers(num_layers, num_stages, None, layers_together))
        remedy = f"Set parallel.layers_per_stage=[{even}] or null"
    held = stages_of_ranks(shape.pp, parallel.stages_per_rank, parallel.schedule)
    if parallel.layout is not None:
        remedy = f"Write {num_layers} t, and fill at least one stage of each rank: {held}, counted from 0"
    # The first stage holds the embedding, the last one the head.
    full = {stage for stage, held_layers in enumerate(sizes) if held_layers} | {0, num_stages - 1}
    full |= {stage for stage, held_modules in enumerate(module_sizes(config, num_stages)) if held_modules}
    empty = [rank for rank, rank_stages in enumerate(held) if full.isdisjoint(rank_stages)]
    see = see.knowing(
        remedy=remedy, stages=num_stages, sizes=len(sizes), least=min(sizes, default=0), total=sum(sizes),
        empty=empty, rank=min(empty, default=0),
    )
    yield from refused(see, _SIZES)
