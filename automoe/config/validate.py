"""Check all rules of a configuration in milliseconds, before any rank starts and without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import get_args, get_type_hints

from automoe.config.batch import least_micro_batches, more_micro_batches
from automoe.config.data_schema import NO_TOKENIZER, DataConfig, sources_of
from automoe.config.hub import is_data_set, local_folder
from automoe.config.layout import KEY as LAYOUT
from automoe.config.layout import module_sizes
from automoe.config.mesh_shape import (
    MeshShape,
    resolve_mesh,
    split_layers,
    stage_layers,
    too_many_stages,
)
from automoe.config.paths import matches
from automoe.config.pipeline import (
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
from automoe.config.plugins import registered_names
from automoe.config.recipe_args import check_args
from automoe.config.recompute import recompute_rows
from automoe.config.rules import Row, check_rows, divides, number_rows
from automoe.config.rules_context import context_rows
from automoe.config.rules_kernels import compile_rows, expert_rows, fp8_rows, kernel_rows
from automoe.config.rules_model import model_rows, moe_rows
from automoe.config.schema import Config, MeshConfig
from automoe.errors import ConfigError


def validate(config: Config, num_ranks: int | None, device: str | None = None) -> MeshShape:
    """Check a whole configuration and return its resolved mesh.

    ``automoe.launch.prepare`` also checks the files that the configuration names.

    Args:
        config: composed configuration; not changed.
        num_ranks: ranks that a derived mesh axis fills (see ``resolve_mesh``).
        device: ``cpu`` or ``cuda`` if known; None takes ``launch.device``. If that is ``auto``,
            the rules that depend on the device are not checked.

    Returns:
        The mesh with every axis resolved.

    Raises:
        ConfigError: the first rule that is broken, with its numbers and the nearest valid choice.
    """
    device = device or config.launch.device
    check_rows(config, number_rows(config))
    shape = resolve_mesh(config.mesh, num_ranks)
    config = replace(config, mesh=MeshConfig(**vars(shape)))
    check_rows(config, mesh_rows(config, shape, device), shape)
    check_rows(config, settings_rows(config))
    parse_profile_steps(config.observe.profile_steps)
    check_args(config)
    check_writable(config.run_dir)
    if config.moe.record_routing is not None:
        check_writable(os.path.expanduser(config.moe.record_routing), "moe.record_routing")
    return shape


# Rows are laid out as a table: key and whether it is broken, the rule with its numbers, the remedy.
# fmt: off

def mesh_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    """Yield the rules that depend on both model and mesh.

    ``config`` must have passed the other rules.
    """
    yield from model_rows(config, shape)
    yield from moe_rows(config)
    rows = config.train.global_batch_size
    seq_len = config.train.seq_len
    micro = config.train.micro_batch_size
    unit = shape.dp * micro
    yield divides("train.global_batch_size", rows, unit,
        "every data-parallel rank runs whole micro-batches, so dp_replicate*dp_shard*micro_batch_size = "
        f"{shape.dp_replicate}*{shape.dp_shard}*{micro} = {unit} divides it: {rows} % {unit} = {rows % unit}")
    if shape.tp > 1:
        cut = shape.cp * shape.tp
        yield divides("train.seq_len", seq_len, cut,
            f"between blocks the ranks of cp and tp hold equal parts of a row: cp*tp = {shape.cp}*{shape.tp} = {cut}, "
            f"{seq_len} % {cut} = {seq_len % cut}")
    yield from context_rows(config, shape, device)
    yield from _pipeline_rows(config, shape)
    yield from expert_rows(config, shape, device)
    yield from _wgrad_rows(config, shape)
    yield from fp8_rows(config, shape, device)
    yield from recompute_rows(config)
    yield from kernel_rows(config, shape, device)
    yield from compile_rows(config, shape)
    if config.train.rampup_batch_size is not None:
        yield from _rampup_rows(config, shape, device)


def settings_rows(config: Config) -> Iterator[Row]:
    """Yield the rules that do not depend on the mesh: optimizer, data, checkpoints."""
    optim = config.optim
    dtype = config.train.dtype
    stochastic = optim.master_weights == "stochastic"
    for i, beta in enumerate(optim.betas):
        yield "optim.betas", not 0 <= beta < 1, f"beta {i + 1} is {beta}, outside [0, 1)", "Set [0.9,0.95]"
    yield "optim.min_lr_ratio", not optim.min_lr_ratio <= 1, "a share of optim.lr, at most 1", "Set 0.1"
    by_phases = optim.schedule == "phases"
    after_warmup, sum_of_phases = config.train.steps - optim.warmup_steps, sum(one.steps for one in optim.phases)
    yield ("optim.phases", by_phases != bool(optim.phases), f"phases follow the warm-up if optim.schedule=phases, and "
           f"it is {optim.schedule} with {len(optim.phases)} phases", "Set both, or neither")
    yield ("optim.phases", by_phases and not config.train.epochs and sum_of_phases != after_warmup,
           f"phases take the steps after the warm-up, train.steps - optim.warmup_steps = {after_warmup}, and their "
           f"steps sum to {sum_of_phases}",
           f"Set train.steps={sum_of_phases + optim.warmup_steps} train.epochs=0, or other steps")
    moving = any(one.bias_update_rate is not None for one in optim.phases)
    yield ("optim.phases", moving and not config.model.router.expert_bias,
           "a phase has a bias_update_rate, and the routers have no biases to update (model.router.expert_bias=false)",
           "Leave it out")
    weights = any(one.mtp_loss_weight is not None for one in optim.phases)
    yield ("optim.phases", weights and not config.model.num_mtp_layers,
           "a phase has an mtp_loss_weight, and there are no modules for multi-token prediction",
           "Set model.num_mtp_layers=1, or leave it out")
    for number, one in enumerate(optim.phases, 1):
        rates = one.lr_ratio, one.bias_update_rate or 0, one.mtp_loss_weight or 0
        yield ("optim.phases", one.steps < 1 or not all(0 <= rate < inf for rate in rates),
               f"phase {number} has steps={one.steps}, lr_ratio={one.lr_ratio}, bias_update_rate="
               f"{one.bias_update_rate}, mtp_loss_weight={one.mtp_loss_weight}; a phase has at least one step and no "
               "rate or weight below 0", "Correct that phase")
    for broken, what, instead in (
        (config.model.attention.qk_norm, "norms of queries and keys undo any scale of weights", "Set optim.qk_clip=0"),
        (config.lora.rank > 0, "LoRA freezes the projections that QK-clip scales", "Set optim.qk_clip=0"),
        (bool(config.train.freeze), "train.freeze may freeze projections that QK-clip scales", "Set optim.qk_clip=0"),
        (stochastic, "a scale near 1 would round away", "Set optim.master_weights=float32"),
        (config.train.compile, "compiled attention does not record its logits", "Set train.compile=false"),
        (config.kernels.attention == "flex", "QK-clip needs a dense mask; flex has none", "Set kernels.attention=sdpa"),
        (config.parallel.context == "ring" and config.mesh.cp > 1,
         "no rank of a ring has all keys of a row", "Set parallel.context=gather"),
    ):  # fmt: skip
        yield "optim.qk_clip", optim.qk_clip > 0 and broken, what, instead
    yield ("optim.ema_decay", not 0 <= optim.ema_decay < 1,
           "the share of an average that a step keeps, in [0, 1)", "Set 0.999, or 0 for no average")
    yield ("checkpoint.export_ema", config.checkpoint.export_ema and not optim.ema_decay,
           "no average of the weights is kept: optim.ema_decay=0", "Set optim.ema_decay=0.999, or leave it out")
    yield ("optim.moments", optim.moments == "bfloat16" and dtype != "bfloat16",
           f"bfloat16 moments go with bfloat16 products, and train.dtype={dtype}",
           "Set train.dtype=bfloat16, or optim.moments=float32")
    yield ("optim.master_weights", stochastic and dtype != "bfloat16",
           f"stochastic rounding is to bfloat16, and train.dtype={dtype}",
           "Set train.dtype=bfloat16, or optim.master_weights=float32")
    yield ("optim.master_weights", stochastic and config.parallel.grad_sync == "micro_batch" and config.mesh.pp == 1,
           "gradients that are reduced after each micro-batch (parallel.grad_sync=micro_batch) would be added up in "
           "bfloat16", "Set parallel.grad_sync=step, or optim.master_weights=float32")
    muon = optim.algorithm == "muon"
    yield "optim.momentum", not 0 <= optim.momentum < 1, "a share that a step keeps, in [0, 1)", "Set 0.95"
    yield "optim.master_weights", muon and stochastic, "Muon updates float32 weights", "Set optim.master_weights=float32"
    yield "optim.moments", muon and optim.moments == "bfloat16", "Muon's momentum is float32", "Set optim.moments=float32"
    yield from _data_rows(config)
    yield from _chat_rows(config)
    yield from checkpoint_rows(config)


def _rampup_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    key, train = "train.rampup_batch_size", config.train
    given = train.rampup_batch_size or []
    rows = shape.dp * train.micro_batch_size
    unit = rows * (shape.pp if config.parallel.schedule in IN_ROUNDS else 1)
    first = rows * least_micro_batches(config, shape)
    least = f", start at least {first}" if first > unit else ""
    example = (f"Choose start and increment among multiples of {unit}{least}, and train.global_batch_size as start and "
               "one or more increments")
    yield key, len(given) != 3, f"it is [start, increment, rows], three numbers, and has {len(given)}", example
    start, increment, over = given
    grows = train.global_batch_size - start
    yield (key, start < 1 or increment < 1 or grows < increment or bool(grows % increment),
           f"from start to train.global_batch_size={train.global_batch_size} it grows by whole increments, at least one: "
           f"{train.global_batch_size} - {start} = {grows}", example)
    yield key, over < grows // increment, f"{over} rows are too few for {grows // increment} increments", example
    for rows in (start, start + increment):  # the others differ by more increments
        one = replace(config, train=replace(train, global_batch_size=rows, rampup_batch_size=None))
        for _, broken, rule, _ in mesh_rows(one, shape, device):
            yield key, broken, f"it has batches of {rows} rows, and {rule}", example


def _pipeline_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    parallel = config.parallel
    key = "parallel.stages_per_rank"
    stages, schedule, pp = parallel.stages_per_rank, parallel.schedule, shape.pp
    each = 1 if schedule in SINGLE else 2
    remedy = f"Set {key}={each if pp > 1 else 1}"
    if parallel.layout is not None:  # it says how many stages there are
        key = LAYOUT
        ranks = max(2, -(-pp * stages // each))
        remedy = f"Set mesh.pp={ranks}" + f" and write {ranks * each} stages" * (ranks * each != pp * stages)
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
    if parallel.overlap_all_to_all:
        yield from _overlap_rows(config, shape)
    if pp == 1:
        return
    yield (key, schedule in NAMES and schedule not in SINGLE and stages < 2,
           f"{schedule} runs at least 2 stages a rank", f"{remedy} or parallel.schedule=1F1B")
    micro = config.train.micro_batch_size
    rows = config.train.global_batch_size
    unit = shape.dp * micro
    micro_batches = rows // unit
    arithmetic = (f"global_batch_size / (dp_replicate*dp_shard*micro_batch_size) = {rows} / "
        f"({shape.dp_replicate}*{shape.dp_shard}*{micro}) = {micro_batches} micro-batches")
    least = least_micro_batches(config, shape)
    some = "2 * mesh.pp" if least > pp else "mesh.pp"
    yield ("train.global_batch_size", micro_batches < least,
           f"{schedule} needs at least {some}={least} micro-batches in flight; {arithmetic}",
           f"Nearest valid choice: {more_micro_batches(config, shape)}")
    if schedule in IN_ROUNDS:
        yield divides("train.global_batch_size", rows, pp * unit,
            f"{schedule} runs its micro-batches in rounds of mesh.pp={pp}; {arithmetic}, "
            f"{micro_batches} % {pp} = {micro_batches % pp}")
    rule = misfit(schedule, pp, stages, micro_batches)
    yield "parallel.schedule", bool(rule), rule, remedy
    # The first stage passes no gradient on, so its passes have no first half.
    _, *modules = module_sizes(config, shape.pp * config.parallel.stages_per_rank)
    tied = modules[-1] > 0 and config.model.tie_embeddings
    which = "a module beside a tied head reads" if tied else "modules of more than one depth in a stage read"
    yield ("model.num_mtp_layers", (tied or max(modules) > 1) and runs_halves(schedule),
           f"{which} the embedding along the path of the stage's input, which torch cannot leave out of the second half "
           f"of a backward pass ({schedule})",
           f"Give each m a stage of its own{' before the last' * tied} in parallel.layout, or set "
           f"parallel.schedule=Interleaved1F1B or model.num_mtp_layers={int(not tied)}")
    yield ("train.compile", config.train.compile and runs_halves(schedule),
           f"torch cannot run the halves of a compiled backward pass separately ({schedule})",
           "Set train.compile=false, or parallel.schedule=Interleaved1F1B")
    yield from _step_rows(
        config, f"with mesh.pp={pp} > 1 torch's pipeline stages always wait for the end of the step", "or mesh.pp=1")


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
        empty = [rank for rank, own in enumerate(held) if not any(full[stage] for stage in own)]
        yield (key, bool(empty),
               f"every pipeline rank trains something, and the stages of rank {min(empty, default=0)} are all empty", remedy)
        yield (key, sum(sizes) != num_layers,
               f"the sizes add up to {sum(sizes)}, and model.num_layers is {num_layers}", remedy)


def _overlap_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    key = "parallel.overlap_all_to_all"
    train = config.train
    off = f"or {key}=false"
    yield key, shape.ep == 1, "with mesh.ep=1 there is no all-to-all to hide", f"Set mesh.ep=2 or more, {off}"
    yield ("moe.dispatcher", config.moe.dispatcher == "allgather", f"{key} hides all-to-alls, and allgather has none",
           f"Set moe.dispatcher=alltoall, {off}")
    for name, is_compiled, instead in (("train.compile", train.compile, "train.compile=false"),
        ("kernels.attention", config.kernels.attention == "flex", "kernels.attention=sdpa")):
        yield name, is_compiled, f"compiled layers cannot run in two threads ({key})", f"Set {instead}, {off}"
    yield ("parallel.schedule", shape.pp > 1 and config.parallel.schedule not in MERGES,
           f"{key} with mesh.pp={shape.pp} merges the passes of {' and '.join(MERGES)}",
           f"Set parallel.schedule=Interleaved1F1B with parallel.stages_per_rank=2 or more, {off}")
    micro_batches = train.global_batch_size // (shape.dp * train.micro_batch_size)
    yield ("train.micro_batch_size", micro_batches < 2,
           f"{key} merges two micro-batches, and a data-parallel rank has {micro_batches} a step",
           f"Set {more_micro_batches(config, shape)}, {off}")
    yield from _step_rows(
        config, f"{key} runs the passes of two micro-batches at once, which share their weights to the end of the step", off)


def _step_rows(config: Config, rule: str, instead: str) -> Iterator[Row]:
    for name in ("reshard", "grad_sync"):
        key = f"parallel.{name}"
        yield key, getattr(config.parallel, name) == "micro_batch", rule, f"Set {key}=step, {instead}"


def _wgrad_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    key = "parallel.expert_wgrad"
    parallel = config.parallel
    chosen = parallel.expert_wgrad
    if chosen == "autograd":
        return
    backend = config.moe.experts
    halves = shape.pp > 1 and runs_halves(parallel.schedule)
    off = f"Set {key}=autograd"
    yield key, not config.model.num_moe_layers, "no layer has experts", off
    yield key, config.lora.rank > 0, f"adapters are trained (lora.rank={config.lora.rank}), and matrices are frozen", off
    yield (key, backend != "grouped_mm", f"the products of moe.experts={backend} return gradients to autograd",
           f"Set moe.experts=grouped_mm, or {key}=autograd")
    yield (key, config.train.fp8 != "off", f"products in 8 bits return gradients to autograd (train.fp8={config.train.fp8})",
           f"Set train.fp8=off, or {key}=autograd")
    yield (key, halves, f"the halves of a backward pass would each compute the products ({parallel.schedule})",
           f"Set parallel.schedule=Interleaved1F1B, or {key}=autograd")
    yield (key, parallel.grad_sync == "micro_batch",
           "each micro-batch's gradients are reduced at once (parallel.grad_sync=micro_batch), so there is no sum to add to",
           f"Set parallel.grad_sync=step, or {key}=autograd")
    yield (key, chosen == "delayed" and not parallel.overlap_all_to_all,
           "delayed products run while gradients of tokens travel in a merged pass (parallel.overlap_all_to_all=false)",
           f"Set {key}=fused{', or parallel.overlap_all_to_all=true' * (shape.ep > 1)}")


def _data_rows(config: Config) -> Iterator[Row]:
    data = config.data
    val_every = config.train.val_every
    hf_path = config.model.hf_path
    here = os.getcwd()
    yield ("observe.samples", bool(config.observe.samples) and not val_every,
           "they are answered after validations, and train.val_every=0 runs none", "Set train.val_every=50")
    yield ("data.val_fraction", not 0 <= data.val_fraction < 1,
           "a share of the text in [0, 1)", "Set data.val_fraction=0.02")
    yield ("data.val_fraction", val_every > 0 and not data.val_fraction,
           f"train.val_every={val_every} validates, and no text is set aside for it",
           "Set data.val_fraction=0.02, or train.val_every=0")
    yield ("data.path", bool(data.sources) and data.path is not None,
           "data.sources are read instead of it", "Add it as one of the sources, or leave one of them out")
    yield ("data.tokenizer", not data.is_synthetic and data.tokenizer == NO_TOKENIZER,
           f"data.kind={data.kind} is text, which a tokenizer turns into ids", "Set data.tokenizer=byte, or leave it out")
    yield ("data.tokenizer", data.is_synthetic and data.tokenizer not in (None, NO_TOKENIZER),
           "data.kind=benchmark has no text: its ids are drawn from model.vocab_size", "Leave data.tokenizer out")
    yield ("lora.export", data.is_synthetic and config.lora.rank > 0 and config.lora.export == "adapter",
           "data.kind=benchmark trains nothing that should be loaded as an adapter", "Set lora.export=merged")
    sources = sources_of(data)
    names = [name for name, _, _ in sources]
    kinds = (*get_args(get_type_hints(DataConfig)["kind"]), *registered_names("data.kind"))
    yield ("data.sources", len(set(names)) < len(names) or (bool(data.sources) and "" in names),
           f"sources are told apart by name, and they are called {', '.join(names)}", "Give each a name: {name: code}")
    for name, weight, one in sources:
        key, said = ("data.sources", f"{name}: ") if data.sources else ("data.path", "")
        yield (key, not 0 < weight < inf, f"{said}weight={weight}: a share of the rows, larger than 0",
               "Set its weight, or leave the source out")
        yield key, one.kind not in kinds, f"{said}kind={one.kind} is not known", f"Available: {', '.join(kinds)}"
        yield (key, (one.is_chat, one.is_preference) != (data.is_chat, data.is_preference),
               f"{said}kind={one.kind}, and data.kind={data.kind}: conversations, pairs and text cannot be mixed",
               "Set data=chat for conversations, data=preference for pairs, and give other sources no kind")
        made = one.kind.startswith("stdlib") or one.is_synthetic
        yield (key, one.is_synthetic and bool(data.sources),
               f"{said}kind={one.kind} is synthetic, not text", "Set data=benchmark without sources")
        yield (key, made and one.path is not None, f"{said}data.path is set and data.kind={one.kind} does not read it",
               "Set data=text|jsonl|parquet|chat, or leave data.path out")
        yield (key, not made and one.path is None,
               f"{said}data.kind={one.kind} reads files, and no path is given", "Set data.path=FILE, or data=stdlib")
        hub = one.path is not None and (one.kind == "hub" or one.is_chat and is_data_set(one.path))
        there = one.path is None or hub or matches(one.path)
        yield (key, not there, f"{said}nothing there: {one.path}" if said else f"nothing there (looked from {here})",
               "Name a file, a directory or a glob that exists")
        part = [name for name, asked in (("split", one.split != "train"), ("subset", one.subset is not None)) if asked]
        yield (key, bool(part) and not hub,
               f"{said}{', '.join(part)}: this is for data sets of the Hub, and files are read whole",
               "Leave it out, and name only the files to read")
        yield (key, not data.is_chat and one.chat != data.chat, f"{said}format, keys and roles are for conversations",
               "Leave them out; data.text_key names the text")
    yield ("model.hf_path", hf_path is not None and not local_folder(hf_path).is_dir(),
           f"no such directory (looked from {here})",
           "Name a directory with config.json and *.safetensors, or a Hub id (OWNER/NAME@main), or set null")


def _chat_rows(config: Config) -> Iterator[Row]:
    data = config.data
    yield ("data.kind", config.recipe in ("pretrain", "finetune") and data.is_preference,
           f"recipe={config.recipe} learns every answer it reads, rejected ones too", "Set recipe=dpo")
    if data.is_preference:
        yield ("data.on_long", data.on_long == "truncate", "an answer without its end cannot be compared",
               "Set data.on_long=drop, or error")
        yield ("data.document_mask", not data.document_mask,
               "both sequences of a pair share a row, and one must not see the other", "Set data.document_mask=true")
        alpaca = any(one.chat.format == "alpaca" for _, _, one in sources_of(data))
        yield ("data.chat.format", alpaca, "pairs have a prompt, chosen and rejected: text, or "
               "messages of role and content (messages) or of from and value (sharegpt)",
               "Set data.chat.format=messages, and data.chat.keys={prompt: instruction} for other names")
    if not data.is_chat:
        yield ("data.on_long", data.on_long in ("drop", "truncate"),
               f"this is for conversations, and data.kind={data.kind} is text", "Set data.on_long=split, or error")
        return
    yield ("data.on_long", data.on_long == "split", "half a conversation answers no question, so none is split",
           "Set data=chat (or data.on_long=error), data.on_long=drop or data.on_long=truncate")
    yield ("data.chat.date", not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d", data.chat.date or "2026-11-23"),
           "it is not a date", "Write it as 2026-11-23")
    yield ("data.document_mask", not data.document_mask and data.chat.pack,
           "samples that share a row attend only to themselves",
           "Set data.document_mask=true, or data.chat.pack=false")


def checkpoint_rows(config: Config) -> Iterator[Row]:
    """Yield the rules of ``checkpoint``: where to resume from and which steps to keep."""
    checkpoint = config.checkpoint
    every = checkpoint.every
    val_every = config.train.val_every
    yield ("checkpoint.resume",
           checkpoint.resume not in ("auto", "never") and not Path(checkpoint.resume).expanduser().is_dir(),
           f"no such directory (looked from {os.getcwd()})",
           "Set auto, never, or the run or step directory to start from")
    keep_every = checkpoint.keep_every
    if every:
        rule = f"checkpoints are written at multiples of checkpoint.every={every}"
        nearest = -(-keep_every // every) * every
    else:
        saved = "checkpoint.every_minutes saves any step" if checkpoint.saves else "no checkpoints are written"
        rule = f"{saved}: checkpoint.every=0"
        nearest = 0
    yield ("checkpoint.keep_every", keep_every != nearest, rule,
           f"Nearest valid choice: checkpoint.keep_every={nearest}")
    yield ("checkpoint.keep_best", checkpoint.keep_best > 0 and (not every or not val_every or every % val_every != 0),
           "the validation loss says which is best, so every saved step must be validated: "
           f"checkpoint.every={every} is not a multiple of train.val_every={val_every}",
           f"Set train.val_every={every or 100} checkpoint.every={every or 100}, or checkpoint.keep_best=0")


# fmt: on


def parse_profile_steps(text: str) -> tuple[int, int] | None:
    """Return the first and last step to profile; None if ``text`` is empty.

    Raises:
        ConfigError: ``text`` is not ``first-last`` with 1 <= first <= last.
    """
    if not text:
        return None
    if match := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
        first = int(match[1])
        last = int(match[2] or first)
        if 1 <= first <= last:
            return first, last
    raise ConfigError(
        "observe.profile_steps",
        text,
        "a window is first-last with 1 <= first <= last",
        'For example "10-12"',
    )


def check_writable(directory: str, key: str = "run_dir") -> None:
    """Raise ``ConfigError`` unless the directory under ``key`` can be created and written.

    Nothing is created.
    """
    if not directory:
        raise ConfigError(key, directory, "names no directory", f"Set {key} to a directory")
    path = Path(directory).absolute()
    while not os.path.lexists(path):
        path = path.parent
    if not path.is_dir():
        raise ConfigError(key, directory, f"{path} is not a directory", f"Name another {key}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            key, directory, f"no permission to write in {path}", f"Name a {key} that can be written"
        )
