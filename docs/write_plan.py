"""Writes the table of recomputation in ``docs/plan.md``: ``make docs-config``, or ``python docs/write_plan.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from automoe.config.compose import compose_config, list_options
from automoe.config.recompute import recompute_rows, recomputed_names
from automoe.config.rules import check_rows
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.cost.plan import make_plan
from automoe.errors import ConfigError

PAGE = Path(__file__).parent / "plan.md"
BEGIN, END = "<!-- recompute: written by docs/write_plan.py -->\n", "<!-- end of recompute -->\n"
CHOICES = ("", "layernorm", "mla_up_proj", "core_attn", "moe", "own", "full")
FLAGSHIPS = [name.removeprefix("tuned_") for name in list_options("mesh") if name.startswith("tuned_")]


def cell(config: Config, choice: str) -> str:
    """GiB of activations at even load and at twice, and of the whole peak; a dash where there is nothing to recompute."""
    own = recomputed_names(config.parallel)
    names = own if choice == "own" else (choice,) if choice else ()
    config = replace(config, parallel=replace(config.parallel, recompute=list(names)))
    try:
        check_rows(config, recompute_rows(config))
    except ConfigError:
        return "–"
    plan = make_plan(config, validate(config, None, "cuda"))
    even, uneven = (max(r.activations + r.recompute for r in ranks) for ranks in (plan.ranks, plan.uneven_ranks))
    return f"{even / 2**30:.1f}, {uneven / 2**30:.1f} ({plan.uneven_peak / config.cluster.memory_bytes:.0%})"


def row(name: str) -> str:
    """Of one flagship, on its tuned mesh."""
    config = compose_config(name)
    own = " ".join(recomputed_names(config.parallel))
    cells = [f"`{name}`<br>{own}", *(cell(config, choice) for choice in CHOICES)]
    return "| " + " | ".join(cells) + " |\n"


def table() -> str:
    """A row a flagship."""
    headings = ["model, and its list", "nothing", *CHOICES[1:-2], "its list", "full"]
    return "| " + " | ".join(headings) + " |\n" + "|---" * len(headings) + "|\n" + "".join(map(row, FLAGSHIPS))


def page() -> str:
    """``docs/plan.md`` with the table as it is now."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
