"""Console output of a mesh search: best candidates, their time by part, why others are excluded."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from automoe.config.recompute import recomputed_names
from automoe.config.schema import Config
from automoe.planner.candidate import Candidate, levers
from automoe.planner.plan import gib
from automoe.planner.search import Search

SEEN = 0.005  # Parts with a smaller share of a step's time are not listed.


def print_search(config: Config, search: Search, console: Console) -> None:
    """Print the best candidates in a few lines each, and why the others were excluded."""
    cluster = config.cluster
    console.print(
        f"[bold]{search.world_size:,} {'rank' if search.world_size == 1 else 'ranks'}[/] of {cluster.name}, "
        f"rows of {config.train.seq_len:,} tokens, "
        f"{config.train.global_batch_size:,} a step"
    )
    for number, candidate in enumerate(search.found, 1):
        first, *others = _lines(number, candidate)
        console.print(first, markup=False)
        console.print(Padding(Text("\n".join(others)), (0, 0, 0, 4)))
    for line in _account(search):
        console.print(line, markup=False)
    if search.found and not search.found[0].time.calibrated:
        console.print(
            f"uncalibrated: products of matrices were not measured on {cluster.name}; trust the order of meshes more "
            "than their tokens/s"
        )


def _lines(number: int, candidate: Candidate) -> Iterator[str]:
    parallel = candidate.config.parallel
    time = candidate.time
    limit = candidate.config.cluster.memory_bytes
    mfu = f", MFU {time.mfu:.1%}" if time.mfu else ""
    memory = f"; {gib(candidate.needed)}" + (f" of {gib(limit)}" if limit else "")
    yield f"{number:>2}  {time.tokens_per_second:,.0f} tokens/s{mfu}{memory} at twice the even load"
    yield f"{candidate.mesh.describe('default')}; experts {candidate.mesh.describe('moe')}"
    stages = f", {parallel.stages_per_rank} stages a rank" if parallel.stages_per_rank > 1 else ""
    if sizes := parallel.layers_per_stage:
        stages += f" of {','.join(map(str, sizes))} layers"
    schedule = f"{parallel.schedule}{stages}; " if candidate.mesh.pp > 1 else ""
    again = ", ".join(recomputed_names(parallel)) or "nothing"
    policy = "" if candidate.mesh.pp > 1 else f"; reshard every {parallel.reshard}"
    policy += f"; context {parallel.context}" if candidate.mesh.cp > 1 else ""
    yield f"{schedule}micro-batch {candidate.config.train.micro_batch_size}; recompute {again}{policy}"
    if new := ", ".join(levers(candidate.config)):
        yield f"never run on GPUs: {new}"
    shares = {name: seconds / time.seconds for name, seconds in time.parts.items()}
    yield ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share > SEEN)


def _account(search: Search) -> Iterator[str]:
    refused = ", ".join(f"{key} {count:,}" for key, count in search.refused.most_common())
    yield f"{search.num_timed:,} candidates were timed" + (
        f"; refused by a rule: {refused}" if refused else ""
    )
    if search.too_large:
        yield f"too large for the memory, the reserve included: {search.too_large:,}"
    if search.rest:
        yield (
            f"of what was tried, nothing that is not listed exceeds {search.rest:,.0f} tokens/s; not tried: replicas, "
            "tp across nodes, stages of chosen sizes, other schedules, allgather, deepep; all other keys were held fixed"
        )
