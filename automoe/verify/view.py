"""What ``automoe verify`` prints: what is compared with what, a table a dtype, the first difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config

if TYPE_CHECKING:
    from automoe.verify.compare import Comparison
    from automoe.verify.run import PassResult

WIDTH = 110
_EIGHT = "; with 8 bits in those of the mesh"


class VerifyView:
    """Prints to ``console``; off a terminal, at a fixed width."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console()
        if not console.is_terminal:
            console = Console(file=console.file, width=WIDTH, highlight=False)
        self.console = console

    def start(self, config: Config, shape: MeshShape, cuts: list[tuple[str, object, object]]) -> None:
        """What will run, and what it stands for."""
        if cuts:
            print_ = self.console.print
            if any(key.startswith(("mesh.", "train.")) for key, _, _ in cuts):
                print_("[bold]Not the configuration itself: this is its proxy, a cut-down stand-in.[/] What was cut:")
            else:
                print_("Changed to run here:")
            table = Table(box=None, padding=(0, 2), show_header=True, header_style="dim")
            for title, justify in (("key", "left"), ("configured", "right"), ("here", "right")):
                table.add_column(title, justify=justify)  # type: ignore[arg-type]
            for key, before, after in cuts:
                table.add_row(key, str(before), str(after))
            print_(table, "")
        train = config.train
        self.console.print(
            f"[bold]mesh[/]       default {shape.describe('default')}; moe {shape.describe('moe')}; "
            f"{shape.world_size} CPU rank{'s' * (shape.world_size > 1)}\n"
            f"[bold]reference[/]  one rank, all rows in one micro-batch{_EIGHT if train.fp8 != 'off' else ''}\n"
            f"[bold]step[/]       {train.global_batch_size} rows x {train.seq_len} tokens, the mesh in "
            f"{train.global_batch_size // (shape.dp * train.micro_batch_size)} micro-batches of "
            f"{train.micro_batch_size} a data-parallel rank; dispatcher {config.moe.dispatcher}"
            + (f"; schedule {config.parallel.schedule}" if shape.pp > 1 else "")
            + "\n",
            highlight=False,
            soft_wrap=True,
        )

    @contextmanager
    def working(self, config: Config) -> Iterator[None]:
        """A sign of life while both runs take their time; nothing off a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with self.console.status(f"{_name(config.train.dtype, config.train.fp8)}: one rank, then the mesh"):
            yield

    def show(self, result: PassResult) -> None:
        """One row a kind of quantity: how many, the worst of them, and whether it is within tolerance."""
        routing = "routing repeated from the reference" if result.forced else "own routing"
        tolerance = f"{result.tolerance:g}"
        if result.gradient_tolerance != result.tolerance:
            tolerance += f" (gradients {result.gradient_tolerance:g})"
        table = Table(
            title=f"{_name(result.dtype, result.fp8)}, experts {result.experts}, {routing}, tolerance {tolerance}",
            title_justify="left",
            title_style="bold",
        )
        table.add_column("quantity")
        table.add_column("compared", justify="right")
        table.add_column("worst error", justify="right")
        table.add_column("of")
        table.add_column("")
        by_kind: dict[str, list[Comparison]] = {}
        for comparison in result.compared:
            by_kind.setdefault(comparison.kind, []).append(comparison)
        for kind, members in by_kind.items():
            off = [c for c in members if not result.equal(c)]
            worst = max(members, key=lambda c: float("inf") if c.error != c.error else c.error)
            table.add_row(
                kind,
                f"{len(members):,}",
                f"{worst.error:.1e}",
                worst.name,
                f"[red]{len(off):,} different[/]" if off else "[green]equal[/]",
            )
        self.console.print(table)
        if result.different:
            self.console.print(f"[red bold]first difference[/] {result.different[0]}", highlight=False, soft_wrap=True)
        self.console.print()

    def verdict(self, results: list[PassResult], shape: MeshShape) -> None:
        """One last line."""
        num_different = sum(len(result.different) for result in results)
        num_compared = sum(len(result.compared) for result in results)
        mesh = shape.describe("default")
        if num_different:
            self.console.print(
                f"[red bold]DIFFERENT[/]  {num_different:,} of {num_compared:,} numbers and tensors on {mesh} are "
                "not those of one rank",
                highlight=False,
            )
        else:
            self.console.print(
                f"[green bold]EQUAL[/]  all {num_compared:,} numbers and tensors on {mesh} are those of one rank",
                highlight=False,
            )


def _name(dtype: str, fp8: str) -> str:
    return dtype if fp8 == "off" else f"{dtype} around {fp8} 8-bit products"
