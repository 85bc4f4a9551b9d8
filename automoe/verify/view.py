"""Output of ``automoe verify``: the two runs, a table for each pass, and the first difference."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.observe.summary import Facts, fact_lines

if TYPE_CHECKING:
    from automoe.verify.run import PassResult


def titled_table(title: str, *columns: Column) -> Table:
    """Return an empty rich table with these columns, without lines, under a bold title."""
    return Table(
        *columns, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
    )


def show_start(
    console: Console, config: Config, shape: MeshShape, cuts: list[tuple[str, object, object]]
) -> None:
    """Print what was changed in the configuration, and the mesh, reference and step that will run.

    Args:
        config: configuration that runs; ``shape``: its mesh.
        cuts: (key, configured value, value in this run) of each changed key.
    """
    if cuts:
        if any(key.startswith(("mesh.", "train.")) for key, _, _ in cuts):
            console.print(
                "[bold]Not the configuration itself: this is its proxy, a cut-down stand-in.[/]\nWhat was cut:"
            )
        else:
            console.print("Changed to run here:")
        columns = "key", Column("configured", justify="right"), Column("here", justify="right")
        table = Table(*columns, box=None, padding=(0, 2), header_style="dim")
        for cut in cuts:
            table.add_row(*map(str, cut))
        console.print(table, "")
    train = config.train
    eight = "; with FP8, in the mesh's micro-batches instead" if train.fp8 != "off" else ""
    schedule = f"; schedule {config.parallel.schedule}" if shape.pp > 1 else ""
    micro_batches = train.global_batch_size // (shape.dp * train.micro_batch_size)
    facts = [
        ("mesh", _both_views(shape, config)),
        ("reference", f"one rank, all rows in one micro-batch{eight}"),
        (
            "step",
            f"{train.global_batch_size} rows x {train.seq_len} tokens, the mesh in {micro_batches} micro-batches of "
            f"{train.micro_batch_size} a data-parallel rank; dispatcher {config.moe.dispatcher}{schedule}",
        ),
    ]
    _print_facts(console, facts)
    console.print()


def show_result(console: Console, result: PassResult) -> None:
    """Print a table that compares the mesh with one rank, and the first difference.

    Each kind of quantity has a row: how many were compared, the largest error, and the verdict.
    """
    routing = "routing repeated from the reference" if result.forced else "own routing"
    tolerance = f"{result.tolerance:g}"
    if result.gradient_tolerance != result.tolerance:
        tolerance += f" (gradients {result.gradient_tolerance:g})"
    title = f"{name_of(result.config)}, experts {result.config.moe.experts}, {routing}, tolerance {tolerance}"
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("compared", "worst"))
    columns = (
        Column("quantity, and the worst of several", overflow="fold"),
        *numbers,
        Column("", no_wrap=True),
    )
    table = titled_table(title, *columns)
    by_kind = {}
    for comparison in result.compared:
        by_kind.setdefault(comparison.kind, []).append(comparison)
    for kind, members in by_kind.items():
        off = [c for c in members if not result.equal(c)]
        worst = max(members, key=lambda c: inf if c.error != c.error else c.error)
        verdict = f"[red]{len(off):,} different[/]" if off else "[green]equal[/]"
        named = f"{kind}\n  [dim]{worst.name}[/]" if worst.name else kind
        table.add_row(named, f"{len(members):,}", f"{worst.error:.1e}", verdict)
    console.print(table)
    if result.different:
        console.print(f"[red bold]first difference[/] {result.different[0]}", soft_wrap=True)
    console.print()


def show_verdict(console: Console, results: list[PassResult], shape: MeshShape) -> None:
    """Print whether all comparisons passed, and which mesh and reference were compared."""
    num_different = sum(len(result.different) for result in results)
    compared = (
        f"{sum(len(result.compared) for result in results):,} numbers and tensors of the mesh are"
    )
    if num_different:
        console.print(
            f"[red bold]DIFFERENT[/]  {num_different:,} of {compared} not those of the reference"
        )
    else:
        console.print(f"[green bold]EQUAL[/]  all {compared} those of the reference")
    _print_facts(
        console,
        [("mesh", _both_views(shape, results[0].config)), ("reference", "one rank in both views")],
    )


def _print_facts(console: Console, facts: Facts) -> None:
    for name, text in fact_lines(facts, console.width):
        console.print(f"[bold]{name}[/]{text}", soft_wrap=True)


def _both_views(shape: MeshShape, config: Config) -> str:
    device = config.launch.device.upper()
    ranks = f"{shape.world_size} {device} rank{'s' * (shape.world_size > 1)}"
    return f"default {shape.describe('default')}; moe {shape.describe('moe')}; {ranks}"


def name_of(config: Config) -> str:
    """Return a run's name in a comparison, such as ``float64 around tensorwise 8-bit products``.

    The name has the dtype, and what is multiplied or sent to experts in 8 bits.
    """
    dtype = config.train.dtype
    fp8 = config.train.fp8
    rows = ", rows to experts in 8 bits" * (config.moe.dispatch_dtype == "fp8")
    return (dtype if fp8 == "off" else f"{dtype} around {fp8} 8-bit products") + rows
