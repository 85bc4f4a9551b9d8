"""Console output of a plan: mesh views, parameters, bytes per rank, batch, time, warnings."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from automoe.config.mesh_shape import MeshShape
from automoe.config.recompute import recomputed_names
from automoe.config.schema import Config
from automoe.model.adapters import describe_training
from automoe.model.params import PARTS
from automoe.observe.metrics import ranges
from automoe.observe.summary import render_mesh_text, short_number
from automoe.planner.plan import Plan, gib, make_plan
from automoe.planner.reserve import process_groups

MAX_ROWS = 8  # larger pipelines are not shown rank by rank
SEEN = 0.0005  # Parts with a smaller share of all parameters are not listed.
STAGES_WIDTH = 80  # Minimum width of the stages table, because a truncated number is worthless.

_MOMENTS = {
    "backward": "in a layer's backward pass",
    "loss": "with a micro-batch's loss",
    "reduction": "while gradients are reduced",
    "update": "in the optimizer step",
}
_TEMPORARIES = {
    "backward": "gradients of one part of a layer",
    "loss": "",
    "reduction": "a unit's gradients in one piece",
    "update": "the norm of the largest gradient, or its update",
}


def print_plan(config: Config, mesh: MeshShape, console: Console | None = None) -> Plan:
    """Print the plan of a validated configuration at the terminal's width, and return the plan."""
    plan = make_plan(config, mesh)
    console = console or Console(highlight=False)
    # Mesh grids are aligned by columns, which wrapping would destroy.
    console.print(render_mesh_text(mesh), soft_wrap=True, markup=False, highlight=False)
    for table in plan_tables(config, plan):
        narrow = len(table.columns) > 5 and console.width < STAGES_WIDTH
        wide = (
            Console(file=console.file, width=STAGES_WIDTH, highlight=False) if narrow else console
        )
        wide.print(table, "")
    for warning in plan.warnings:
        console.print(f"[bold yellow]warning[/] {escape(warning)}", highlight=False)
    return plan


def plan_tables(config: Config, plan: Plan) -> list[Table]:
    """Return all tables of a plan in reading order, without its meshes and warnings.

    The first table has no headings.
    """
    stages = [_stages_table(plan)] if plan.mesh.pp > 1 else []
    time = _time_table(config, plan)
    return [
        _summary(config, plan),
        _rank_table(config, plan),
        *stages,
        time,
        _checkpoint_table(config, plan),
    ]


def _summary(config: Config, plan: Plan) -> Table:
    train = config.train
    batch = plan.batch
    model = config.model
    cluster = config.cluster
    table = Table.grid(Column(style="bold"), Column(), padding=(0, 2))
    ranks = f"{plan.mesh.world_size:,} rank{'s' * (plan.mesh.world_size > 1)}"
    if cluster.memory_bytes:
        ranks += f" = {plan.num_nodes:,} node{'s' * (plan.num_nodes > 1)} of {cluster.gpus_per_node} {cluster.gpu}"
    table.add_row("ranks", ranks)
    params = plan.params
    shares = [(part.replace("_", " "), params.by_part[part] / params.total) for part in PARTS]
    said = ", ".join(
        f"{name} {share:.1%}"
        for name, share in sorted(shares, key=lambda pair: -pair[1])
        if share >= SEEN
    )
    active = f"{_count(params.active)} active per token ({params.active / params.total:.1%})"
    table.add_row("parameters", f"{_count(params.total)}, {active}; {said}")
    table.add_row(
        "step",
        f"{batch.rows_per_step:,} rows x {train.seq_len:,} tokens = {batch.tokens_per_step:,} tokens; "
        f"{batch.num_micro_batches} micro-batches of {train.micro_batch_size} x {train.seq_len:,} on each of "
        f"{plan.mesh.dp} data-parallel ranks",
    )
    if model.num_moe_layers:
        table.add_row(
            "experts",
            f"{model.num_experts // plan.mesh.ep} of {model.num_experts} a rank, {batch.rows_per_expert:,.0f} rows "
            "each per micro-batch at even load",
        )
    flops = plan.flops
    table.add_row(
        "FLOPs",
        f"{_flops(flops.causal)} a token ({_flops(flops.full_attention)} if the masked half of attention counts), "
        f"{_flops(flops.causal * batch.tokens_per_step)} a step",
    )
    if plan.mesh.pp > 1:
        stages = plan.mesh.pp * config.parallel.stages_per_rank
        table.add_row(
            "pipeline",
            f"{config.parallel.schedule}, {stages} stages, {plan.bubble:.1%} of a step idle",
        )
    if config.parallel.recompute:
        table.add_row("recompute", _recomputed(config))
    if cluster.memory_bytes and plan.mesh.world_size > 1:
        named = process_groups(config, plan.mesh)
        table.add_row(
            "communicators",
            f"{len(named)} a rank: {', '.join(f'{name} {size}' for name, size in named)}",
        )
    for what, line in zip(("trained", ""), describe_training(config), strict=False):
        table.add_row(what, line)
    if train.fp8 != "off":
        table.add_row(
            "8 bits",
            f"{train.fp8} products, emulated in float32 on a CPU; MFU is of the bfloat16 peak, and activations are "
            "counted as without",
        )
    return table


def _recomputed(config: Config) -> str:
    layers = config.parallel.recompute_layers
    always = {"moe_act": f"moe_act (always, with moe.experts={config.moe.experts})"}
    text = ", ".join(always.get(name, name) for name in recomputed_names(config.parallel))
    if isinstance(layers, list):
        return f"{text}; layers {_spans(sorted(layers))}"
    return f"{text}; {layers or 'every'} layer{'s' if layers else ''}"


def _titled(title: str, *columns: Column) -> Table:
    return Table(
        *columns, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
    )


def _number(heading: str) -> Column:
    return Column(heading, justify="right", no_wrap=True)


def _rank_table(config: Config, plan: Plan) -> Table:
    rank = plan.heaviest
    mesh = plan.mesh
    title = f"memory per rank ({f'heaviest, pp rank {rank.pp_rank}' if mesh.pp > 1 else 'each'})"
    table = _titled(title, Column("component"), _number("bytes"), Column("what it is", style="dim"))
    shards = f"over {mesh.fsdp} ranks"
    if config.model.num_moe_layers:
        shards = f"experts over {mesh.ep_shard * mesh.ep} ranks, the rest {shards.removesuffix(' ranks')}"
    texts = {
        "weights": f"sharded: {shards}",
        "moments": "AdamW, sharded likewise",
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
        "temporaries": _TEMPORARIES[rank.moment],
    }
    for field, num_bytes in rank.parts.items():
        if num_bytes:
            name = {"head": "cross-entropy", "recompute": "recomputation"}.get(
                field, field.replace("_", " ")
            )
            table.add_row(name, gib(num_bytes), texts[field])
    limit = config.cluster.memory_bytes
    table.add_row("peak", gib(rank.peak), f"the sum, {_MOMENTS[rank.moment]}", style="bold")
    if plan.uneven_peak > rank.peak:
        table.add_row(
            "", gib(plan.uneven_peak), "where experts get twice their even share of tokens"
        )
    held = plan.reserve
    if held.total:
        parts = (
            f"context {gib(held.context)}, communicators {gib(held.communicators)}, fragmentation"
        )
        table.add_row("reserve", gib(held.total), f"{parts} {gib(held.fragmentation)}")
        share, uneven = (
            f", {need / limit:.0%} of {gib(limit)}" for need in (plan.needed, plan.uneven_needed)
        )
        table.add_row("needed", gib(plan.needed), f"peak and reserve{share}", style="bold")
        if plan.uneven_needed > plan.needed:
            table.add_row("", gib(plan.uneven_needed), f"at twice the even share{uneven}")
        if plan.full_at is not None:
            table.add_row(
                "", gib(limit), f"at {plan.full_at:.1f} times the even share: all there is"
            )
    for text in plan.not_modelled:
        table.add_row("not modelled", "?", text)
    return table


def _time_table(config: Config, plan: Plan) -> Table:
    time = plan.time
    doubt = "" if time.calibrated else ", uncalibrated (no cluster.gemm_curve)"
    table = _titled(
        f"time of a step, predicted{doubt}",
        Column("part"),
        _number("seconds"),
        _number("share"),
        _number("sent"),
        _number("off node"),
        Column("what it is", style="dim"),
    )
    seen = time.communication
    for name, seconds, text in [
        ("computing", time.compute, "products, attention, memory"),
        ("tp", seen["tp"], "around products that are cut"),
        ("cp", seen["cp"], "keys and values of other ranks"),
        ("ep", seen["ep"], f"tokens to experts, {config.moe.dispatcher}"),
        ("etp", seen["etp"], "rows of ranks that share a width"),
        ("fsdp", seen["fsdp"], "weights, gradients, what is seen"),
        ("pp", seen["pp"], "activations between stages"),
        ("bubble", time.bubble, "waiting for other ranks"),
        ("other", time.other, "optimizer, launches, data"),
    ]:
        if seconds > 0:
            total = time.traffic.get(name)
            sent = (gib(total), f"{time.off_node[name] / total:.0%}") if total else ("", "")
            table.add_row(name, f"{seconds:.3g}", f"{seconds / time.seconds:.1%}", *sent, text)
    low, high = map(short_number, time.band)
    table.add_row(
        "step",
        f"{time.seconds:.3g}",
        "",
        "",
        "",
        f"{time.tokens_per_second:,.0f} tokens/s",
        style="bold",
    )
    table.add_row("", "", "", "", "", f"{low} to {high} to be expected")
    if time.mfu is not None:
        full = f"{time.mfu_full_attention:.1%} with all of attention"
        table.add_row("MFU", f"{time.mfu:.1%}", "", "", "", full, style="bold")
    return table


def _checkpoint_table(config: Config, plan: Plan) -> Table:
    cost = plan.checkpoint
    saves = config.checkpoint
    table = _titled(
        "a checkpoint", Column("what"), _number("figure"), Column("what it is", style="dim")
    )
    table.add_row(
        "size", gib(cost.bytes), f"{cost.num_files:,} files, up to {gib(cost.rank_bytes)} each"
    )
    table.add_row(
        "index",
        gib(cost.metadata_bytes),
        f"{cost.num_shards:,} shards of {cost.num_tensors:,} tensors",
    )
    source = "assumed" if cost.assumed else "cluster.storage_bandwidth"
    table.add_row(
        "write",
        _seconds(cost.write_seconds),
        f"at {cost.node_bandwidth / 1e9:g} GB/s a node ({source})",
    )
    how = "the copy to CPU memory" if saves.async_save else "until it is written"
    if saves.async_save:
        how += f", {gib(cost.staged_bytes)} a rank, which stays"
    table.add_row("stands still", _seconds(cost.blocked_seconds), how)
    if cost.interval_seconds is None:
        table.add_row(
            "on the disk",
            "none",
            "checkpoint.every=0, and checkpoint.every_minutes=0",
            style="bold",
        )
        return table
    table.add_row(
        "every",
        _seconds(cost.interval_seconds),
        f"{cost.blocked_share:.2%} of the time stands still",
    )
    kept = f"{cost.most_kept:,} kept and one being written"
    table.add_row("on the disk", gib(cost.disk_bytes), kept, style="bold")
    return table


def _stages_table(plan: Plan) -> Table:
    in_flight, *sizes = map(_number, ("in flight", "state", "gathered", "activations", "peak"))
    in_flight.no_wrap = False  # The cell wraps, because a rank may have many stages.
    table = _titled(
        "pipeline ranks", _number("pp"), Column("layers"), _number("params"), in_flight, *sizes
    )
    last = len(plan.ranks) - 1
    shown = {last * row // (MAX_ROWS - 2) for row in range(MAX_ROWS - 1)} | {plan.heaviest.pp_rank}
    ranks = (
        plan.ranks if last < MAX_ROWS else [rank for rank in plan.ranks if rank.pp_rank in shown]
    )
    for rank in ranks:
        table.add_row(
            str(rank.pp_rank),
            _spans(rank.layers),
            _count(rank.params),
            _join(rank.micro_batches_in_flight),
            gib(rank.weights + rank.moments + rank.averages),
            gib(rank.gathered_weights + rank.unsharded_gradients + rank.gradients),
            gib(
                rank.inputs
                + rank.receive_buffers
                + rank.activations
                + rank.head
                + rank.recompute
                + rank.widened
                + rank.temporaries
            ),
            gib(rank.peak),
            style="bold" if rank is plan.heaviest else "",
        )
    if len(ranks) < len(plan.ranks):
        table.caption = f"{len(plan.ranks) - len(ranks)} ranks between them are not shown"
    return table


def _count(number: int) -> str:
    return _scaled(number, {"B": 1e9, "M": 1e6, "k": 1e3}, ".2f")


def _flops(number: float) -> str:
    sizes = {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
    return _scaled(number, {f"{prefix}FLOP": size for prefix, size in sizes.items()}, ".1f")


def _scaled(number: float, units: dict[str, float], form: str) -> str:
    for unit, size in units.items():
        if number >= size:
            return f"{number / size:,{form}} {unit}"
    return f"{number:.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _join(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def _spans(layers: list[int]) -> str:
    """Format layer numbers as runs of consecutive layers: ``0-3 16-19``."""
    return " ".join(ranges(layers))
