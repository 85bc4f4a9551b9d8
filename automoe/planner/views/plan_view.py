"""Console output of a plan: mesh views, parameters, bytes per rank, batch, time, warnings."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from automoe.config.mesh_shape import MeshShape
from automoe.config.recompute import recomputed_names
from automoe.config.schema import Config
from automoe.model.params import PARTS
from automoe.observe.metrics import ranges
from automoe.observe.summary import render_mesh_text, short_number
from automoe.observe.trained import describe_training
from automoe.planner.plan import Plan, gib, make_plan
from automoe.planner.reserve import process_groups
from automoe.verify.view import titled_table

MAX_ROWS = 8  # larger pipelines are not shown rank by rank
SEEN = 0.0005  # Parts with a smaller share of all parameters are not listed.
STAGES_WIDTH = 80  # Minimum width of the stages table, because a truncated number is worthless.

Rows = Iterable[tuple[str, ...]]

RESULTS = ("peak", "needed", "step", "MFU", "on the disk")  # rows that stand out
# When a rank's memory is fullest, and what its temporaries are then.
_MOMENTS = {
    "backward": ("in a layer's backward pass", "gradients of one part of a layer"),
    "loss": ("with a micro-batch's loss", ""),
    "reduction": ("while gradients are reduced", "a unit's gradients in one piece"),
    "update": ("in the optimizer step", "the norm of the largest gradient, or its update"),
}


def print_plan(config: Config, mesh: MeshShape, console: Console | None = None) -> Plan:
    """Print the plan of a validated configuration at the terminal's width, and return the plan.

    Args:
        console: where to print; None: standard output.
    """
    plan = make_plan(config, mesh)
    console = console or Console(highlight=False)
    # Mesh grids are aligned by columns, which wrapping would destroy.
    console.print(render_mesh_text(mesh), soft_wrap=True, markup=False)
    for table in plan_tables(config, plan):
        narrow = len(table.columns) > 5 and console.width < STAGES_WIDTH
        wide = (
            Console(file=console.file, width=STAGES_WIDTH, highlight=False) if narrow else console
        )
        wide.print(table, "")
    for warning in plan.warnings:
        console.print(f"[bold yellow]warning[/] {escape(warning)}")
    return plan


def plan_tables(config: Config, plan: Plan) -> list[Table]:
    """Return all tables of a plan in reading order, without its meshes and warnings.

    The first table has no headings.
    """
    summary = Table.grid(Column(style="bold"), Column(), padding=(0, 2))
    for row in _summary(config, plan):
        summary.add_row(*map(escape, row))  # a pattern has brackets
    pipelined = plan.mesh.pp > 1
    which = f"heaviest, pp rank {plan.heaviest.pp_rank}" if pipelined else "each"
    doubt = "" if plan.time.calibrated else ", uncalibrated (no cluster.gemm_curve)"
    return [
        summary,
        _table(
            f"memory per rank ({which})",
            [Column("component"), _number("bytes"), _what()],
            _rank_rows(config, plan),
        ),
        *([_stages_table(plan)] if pipelined else []),
        _table(
            f"time of a step, predicted{doubt}",
            [Column("part"), *map(_number, ("seconds", "share", "sent", "off node")), _what()],
            _time_rows(config, plan),
        ),
        _table(
            "a checkpoint",
            [Column("what"), _number("figure"), _what()],
            _checkpoint_rows(config, plan),
        ),
    ]


def _summary(config: Config, plan: Plan) -> Rows:
    train = config.train
    batch = plan.batch
    model = config.model
    cluster = config.cluster
    ranks = f"{plan.mesh.world_size:,} rank{'s' * (plan.mesh.world_size > 1)}"
    if cluster.memory_bytes:
        ranks += f" = {plan.num_nodes:,} node{'s' * (plan.num_nodes > 1)} of {cluster.gpus_per_node} {cluster.gpu}"
    yield "ranks", ranks
    params = plan.params
    shares = [(part.replace("_", " "), params.by_part[part] / params.total) for part in PARTS]
    said = ", ".join(
        f"{name} {share:.1%}"
        for name, share in sorted(shares, key=lambda pair: -pair[1])
        if share >= SEEN
    )
    active = f"{short_number(params.active)} active per token ({params.active / params.total:.1%})"
    yield "parameters", f"{short_number(params.total)}, {active}; {said}"
    yield (
        "batch",
        f"{train.global_batch_size:,} rows x {train.seq_len:,} tokens = {batch.tokens_per_step:,} tokens; "
        f"{batch.num_micro_batches} micro-batches of {train.micro_batch_size} x {train.seq_len:,} on each of "
        f"{plan.mesh.dp} data-parallel ranks",
    )
    if model.num_moe_layers:
        yield (
            "experts",
            f"{model.num_experts // plan.mesh.ep} of {model.num_experts} a rank, {batch.rows_per_expert:,.0f} rows "
            "each per micro-batch at even load",
        )
    flops = plan.flops
    yield (
        "FLOPs",
        f"{flops.causal:.3g} a token ({flops.full_attention:.3g} if the masked half of attention counts), "
        f"{flops.causal * batch.tokens_per_step:.3g} a step",
    )
    if plan.mesh.pp > 1:
        stages = plan.mesh.pp * config.parallel.stages_per_rank
        yield (
            "pipeline",
            f"{config.parallel.schedule}, {stages} stages, {plan.bubble:.1%} of a step idle",
        )
    if plan.mesh.cp > 1:
        yield "context", f"{config.parallel.context}: {_CONTEXT[config.parallel.context]}"
    if config.parallel.recompute:
        names = ", ".join(recomputed_names(config.parallel))
        layers = config.parallel.recompute_layers or "every layer"
        if isinstance(layers, list):
            layers = " ".join(ranges(sorted(layers)))
        yield "recompute", f"{names}; layers: {layers}"
    if cluster.memory_bytes and plan.mesh.world_size > 1:
        named = process_groups(config, plan.mesh)
        sizes = ", ".join(f"{name} {size}" for name, size in named)
        yield "communicators", f"{len(named)} a rank: {sizes}"
    yield from zip(("trained", ""), describe_training(config), strict=False)
    if train.fp8 != "off":
        yield (
            "FP8",
            f"{train.fp8} products, emulated in float32 on a CPU; MFU is of the bfloat16 peak, and activations are "
            "counted as without it",
        )


def _table(title: str, columns: list[Column], rows: Rows) -> Table:
    table = titled_table(title, *columns)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] in RESULTS else "")
    return table


def _number(heading: str) -> Column:
    return Column(heading, justify="right", no_wrap=True)


def _what() -> Column:
    return Column("what it is", style="dim")


def _rank_rows(config: Config, plan: Plan) -> Rows:
    rank = plan.heaviest
    mesh = plan.mesh
    when, temporaries = _MOMENTS[rank.moment]
    shards = f"over {mesh.fsdp} ranks"
    if config.model.num_moe_layers:
        shards = f"experts over {mesh.ep_shard * mesh.ep} ranks, the rest {shards.removesuffix(' ranks')}"
    texts = {
        "weights": f"sharded: {shards}",
        "moments": "of the optimizer, sharded likewise",
        "averages": f"of weights, optim.ema_decay={config.optim.ema_decay:g}, sharded likewise",
        "gradients": "sharded, after their reduction",
        "gathered_weights": f"parallel.reshard={config.parallel.reshard}",
        "unsharded_gradients": f"parallel.grad_sync={config.parallel.grad_sync}",
        "inputs": "ids, labels and positions of the step's rows",
        "receive_buffers": "gradients from the next stage, to the one before",
        "activations": f"micro-batches in flight, by stage: {_join(rank.micro_batches_in_flight)}",
        "head": "a chunk of logits and the head's gradient",
        "recompute": "one module at a time and the outputs it reads",
        "widened": f"the largest matrix of lora.base={config.lora.base}, while it is multiplied",
        "temporaries": temporaries,
    }
    names = {"averages": "EMA", "head": "cross-entropy", "recompute": "recomputation"}
    for field, num_bytes in rank.parts.items():
        if num_bytes:
            yield names.get(field, field.replace("_", " ")), gib(num_bytes), texts[field]
    limit = config.cluster.memory_bytes
    yield "peak", gib(rank.peak), f"the sum, {when}"
    if plan.uneven_peak > rank.peak:
        yield "", gib(plan.uneven_peak), "if experts get twice their even share of tokens"
    held = plan.reserve
    if held.total:
        parts = f"CUDA context {gib(held.context)}, communicators {gib(held.communicators)}, fragmentation"
        yield "reserve", gib(held.total), f"{parts} {gib(held.fragmentation)}"
        share, uneven = (
            f", {need / limit:.0%} of {gib(limit)}" if limit else ""
            for need in (plan.needed, plan.uneven_needed)
        )
        yield "needed", gib(plan.needed), f"peak and reserve{share}"
        if plan.uneven_needed > plan.needed:
            yield "", gib(plan.uneven_needed), f"at twice the even share{uneven}"
        if plan.full_at is not None:
            yield "", gib(limit), f"at {plan.full_at:.1f} times the even share: all there is"
    for text in plan.not_modelled:
        yield "not modelled", "?", text


_CONTEXT = {
    "gather": "keys and values of other ranks",
    "ulysses": "heads for positions of whole rows",
    "ring": "keys and values around a ring",
}


def _time_rows(config: Config, plan: Plan) -> Rows:
    time = plan.time
    texts = {
        "computing": "products, attention, memory",
        "tp": "around products that are cut",
        "cp": _CONTEXT[config.parallel.context],
        "ep": f"tokens to experts, {config.moe.dispatcher}"
        + " in 8 bits" * (config.moe.dispatch_dtype == "fp8"),
        "etp": "rows of ranks that share a width",
        "fsdp": "weights, gradients, what is seen",
        "pp": "activations between stages",
        "bubble": "waiting for other ranks",
        "other": "optimizer, launches, data",
    }
    for name, seconds in time.parts.items():
        if seconds > 0:
            total = time.traffic.get(name)
            sent = (gib(total), f"{time.off_node[name] / total:.0%}") if total else ("", "")
            yield name, f"{seconds:.3g}", f"{seconds / time.seconds:.1%}", *sent, texts[name]
    low, high = map(short_number, time.band)
    blank = [""] * 3
    yield "step", f"{time.seconds:.3g}", *blank, f"{time.tokens_per_second:,.0f} tokens/s"
    yield "", "", *blank, f"{low} to {high} to be expected"
    if time.mfu is not None:
        yield (
            "MFU",
            f"{time.mfu:.1%}",
            *blank,
            f"{time.mfu_full_attention:.1%} with all of attention",
        )


def _checkpoint_rows(config: Config, plan: Plan) -> Rows:
    cost = plan.checkpoint
    yield "size", gib(cost.bytes), f"{cost.num_files:,} files, up to {gib(cost.rank_bytes)} each"
    yield (
        "index",
        gib(cost.metadata_bytes),
        f"{cost.num_shards:,} shards of {cost.num_tensors:,} tensors",
    )
    source = "assumed" if cost.assumed else "cluster.storage_bandwidth"
    yield (
        "write",
        _seconds(cost.write_seconds),
        f"at {cost.node_bandwidth / 1e9:g} GB/s a node ({source})",
    )
    how = "until it is written"
    if config.checkpoint.async_save:
        how = f"the copy to CPU memory, {gib(cost.staged_bytes)} a rank, which stays"
    yield "stands still", _seconds(cost.blocked_seconds), how
    if cost.interval_seconds is None:
        yield "on the disk", "none", "checkpoint.every=0, and checkpoint.every_minutes=0"
        return
    yield (
        "every",
        _seconds(cost.interval_seconds),
        f"{cost.blocked_share:.2%} of the time stands still",
    )
    yield "on the disk", gib(cost.disk_bytes), f"{cost.most_kept:,} kept and one being written"


def _stages_table(plan: Plan) -> Table:
    in_flight, *sizes = map(_number, ("in flight", "state", "gathered", "rest", "peak"))
    in_flight.no_wrap = False  # The cell wraps, because a rank may have many stages.
    columns = [_number("pp"), Column("layers"), _number("params"), in_flight, *sizes]
    table = _table("pipeline ranks", columns, ())
    last = len(plan.ranks) - 1
    shown = {last * row // (MAX_ROWS - 2) for row in range(MAX_ROWS - 1)} | {plan.heaviest.pp_rank}
    ranks = (
        plan.ranks if last < MAX_ROWS else [rank for rank in plan.ranks if rank.pp_rank in shown]
    )
    for rank in ranks:
        state = rank.weights + rank.moments + rank.averages
        gathered = rank.gathered_weights + rank.unsharded_gradients + rank.gradients
        rest = rank.peak - state - gathered
        table.add_row(
            str(rank.pp_rank),
            " ".join(ranges(rank.layers)),
            short_number(rank.params),
            _join(rank.micro_batches_in_flight),
            *map(gib, (state, gathered, rest, rank.peak)),
            style="bold" if rank is plan.heaviest else "",
        )
    if len(ranks) < len(plan.ranks):
        table.caption = f"{len(plan.ranks) - len(ranks)} ranks between them are not shown"
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _join(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
