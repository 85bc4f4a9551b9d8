"""Draws docs/images/scaling_*.png and writes the tables of docs/scaling.md: ``make docs-images``.

Every figure is computed from the configurations below by automoe/planner; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import exp, sqrt
from pathlib import Path
from typing import Any

from automoe.config.batch import plan_batch
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.planner.checkpoint import checkpoint_cost
from automoe.planner.machine import Constants
from automoe.planner.memory import plan_memory
from automoe.planner.time import StepTime, step_time
from benchmarks.published import configured, runs

PAGE = Path(__file__).parent / "scaling.md"
IMAGES = Path(__file__).parent / "images"
GPUS = (64, 128, 256, 512, 1024)
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
BEYOND = (256, 1024, 4096, 16384, 65536, 131072)
ROWS_A_GPU = 16
FITS = 0.9  # of the GPU's memory
# Of the paper's models: its mesh and number of GPUs; stages a rank are assumed, as in published_runs.toml.
PAPER: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral_8x22b": (128, {"mesh.tp": 2, "mesh.ep": 8, "mesh.pp": 8, "parallel.stages_per_rank": 7}),
    "qwen2_57b_a14b": (64, {"mesh.tp": 2, "mesh.ep": 4, "mesh.pp": 4, "parallel.stages_per_rank": 7}),
    "mixtral_8x22b_g8t8": (128, {"mesh.tp": 4, "mesh.ep": 8, "mesh.pp": 8, "parallel.stages_per_rank": 7}),
    "llama3_8x70b": (256, {"mesh.tp": 8, "mesh.ep": 8, "mesh.pp": 16, "parallel.stages_per_rank": 5}),
}
# What published runs share: rows of 4,096 tokens, 256 of them, balanced routing, no document mask.
SHARED: dict[str, Any] = {
    "cluster": "h100_sxm", "train.seq_len": 4096, "train.global_batch_size": 256, "train.micro_batch_size": 1,
    "moe.gate": "balanced", "moe.router_dtype": "bfloat16", "data.document_mask": False, "parallel.recompute": [],
}  # fmt: skip
# DeepSeek-V3 as automoe trains it, whole layers recomputed: 16,384 rows of 4,096 tokens a step (arXiv 2412.19437: 15,360).
LARGE: dict[str, Any] = SHARED | {"train.global_batch_size": 16384, "moe.gate": "learned", "mesh.ep": 8}
LARGE |= {"parallel.recompute": "full", "moe.router_dtype": "float32"}

# 419 unexpected interruptions of 16,384 H100 in 54 days (arXiv 2407.21783, section 3.3.4).
MTBF_HOURS_OF_A_GPU = 16384 * 54 * 24 / 419
RESTART_SECONDS = 600.0  # assumed: notice, start ranks, load, first step
STORAGE_LIMIT = 1e12  # assumed: bytes a second of all nodes together to a shared file system
# Assumed: fibre between two sites 1,000 km apart (5 us a kilometre), and what all GPUs of a site share of it.
SITE_LATENCY, SITE_LINKS = 5e-3, (0.1e12, 1.6e12)  # seconds, bytes a second and direction


@dataclass(frozen=True)
class Point:
    """One mesh and what the plan says of it."""

    config: Config
    mesh: MeshShape
    time: StepTime

    @property
    def share(self) -> dict[str, float]:
        """Of a step: computing, each axis, bubble, other."""
        time = self.time
        parts = {"compute": time.compute, **time.communication, "bubble": time.bubble, "other": time.other}
        return {name: seconds / time.seconds for name, seconds in parts.items()}


def fits(config: Config, mesh: MeshShape) -> bool:
    """At even load, with a tenth to spare."""
    return (
        max(rank.peak for rank in plan_memory(config, mesh, plan_batch(config, mesh)))
        < FITS * config.cluster.memory_bytes
    )


def candidates(model: str, gpus: int, choices: list[dict[str, Any]], fused: bool) -> Iterator[Point]:
    """A point for each of ``choices`` that is a mesh of ``gpus`` ranks and cuts rows and the batch evenly."""
    for settings in choices:
        inner = settings["mesh.pp"] * settings.get("mesh.tp", 1) * settings.get("mesh.cp", 1)
        rows, dp = settings["train.global_batch_size"], gpus // inner
        if gpus % inner or rows % dp or (gpus // settings["mesh.pp"]) % settings["mesh.ep"]:
            continue
        config, mesh = configured(model, settings, gpus)
        if config.train.seq_len % (2 * mesh.cp * mesh.tp) == 0:
            yield Point(config, mesh, step_time(config, mesh, fused=fused))


def best(points: Iterator[Point]) -> Point | None:
    """The fastest that fits."""
    ranked = sorted(points, key=lambda point: -point.time.tokens_per_second)
    return next((point for point in ranked if fits(point.config, point.mesh)), None)


@lru_cache
def strong(model: str, gpus: int) -> tuple[Point | None, Point | None]:
    """256 rows of 4,096 tokens: the paper's mesh, and the fastest of those with its ep and other tp and pp."""
    own = SHARED | PAPER[model][1]
    as_published = next(candidates(model, gpus, [own], True), None)
    layers = configured(model, SHARED, 8)[0].model.num_layers
    choices = [
        own | {"mesh.tp": tp, "mesh.pp": pp, "parallel.stages_per_rank": stages}
        for tp, pp, stages in product((own["mesh.tp"], 2 * own["mesh.tp"]), (1, 2, 4, 8, 16), (1, 5, 7))
        if tp <= 8 and layers % (pp * stages) == 0 and (pp > 1) == (stages > 1)
    ]
    fitting = as_published if as_published and fits(as_published.config, as_published.mesh) else None
    return fitting, best(candidates(model, gpus, choices, True))


@lru_cache
def context(model: str, seq_len: int) -> Point | None:
    """As many tokens a step as above, in longer rows: the fastest of some cp, tp and pp, recomputed where it must be."""
    gpus, mesh = PAPER[model]
    shared = SHARED | mesh | {"train.seq_len": seq_len, "train.global_batch_size": 256 * 4096 // seq_len}
    choices = [
        shared
        | {
            "mesh.cp": cp,
            "mesh.tp": tp,
            "parallel.recompute": again,
            "parallel.context": "ring" if cp > 1 else "gather",
        }
        for cp, tp, again in product((1, 2, 4, 8, 16, 32), {mesh["mesh.tp"], 8}, ([], ["moe"], "full"))
    ]
    return best(candidates(model, gpus, choices, True))


@lru_cache
def beyond(gpus: int, grown: bool = False) -> Point | None:
    """DeepSeek-V3 with 16,384 rows a step or, ``grown``, ``ROWS_A_GPU`` for each GPU: the fastest of some meshes."""
    choices = []
    for pp, tp, cp, stages in product((8, 16, 32), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2)):
        if pp * stages > 60:  # of 61 layers
            continue
        settings = LARGE | {"mesh.pp": pp, "mesh.tp": tp, "mesh.cp": cp, "parallel.stages_per_rank": stages}
        if grown:
            settings["train.global_batch_size"] = ROWS_A_GPU * gpus
        choices.append(settings)
    return best(candidates("dsv3_671b", gpus, choices, False))


def without(point: Point, name: str) -> float:
    """Share of the step that is left out when a constant is zero."""
    constants = replace(Constants.load(), **{name: 0.0})
    return 1 - step_time(point.config, point.mesh, constants=constants).seconds / point.time.seconds


def daly(cost: float, mtbf: float) -> float:
    """Seconds between checkpoints that lose the least: Young's sqrt(2 C M) with Daly's terms (2006, equation 37)."""
    if cost >= 2 * mtbf:
        return mtbf
    x = cost / (2 * mtbf)
    return sqrt(2 * cost * mtbf) * (1 + sqrt(x) / 3 + x / 9) - cost


def lost(interval: float, cost: float, mtbf: float, restart: float = RESTART_SECONDS) -> float:
    """Share of the time that failures and checkpoints take: one less useful over expected time (Daly, equation 20)."""
    return 1 - interval / (mtbf * exp(restart / mtbf) * (exp((interval + cost) / mtbf) - 1))


@dataclass(frozen=True)
class Failures:
    """How often a run fails, and what a checkpoint costs it."""

    mtbf: float  # seconds, of the whole run
    shortest: float  # between two checkpoints: a step, or until the one before is written
    blocked: float  # of an asynchronous checkpoint: training stands still

    @classmethod
    @lru_cache
    def of(cls, gpus: int) -> Failures:
        point = beyond(gpus)
        assert point is not None
        saves = replace(point.config.checkpoint, every=100, async_save=True)
        cluster = replace(point.config.cluster, storage_limit=STORAGE_LIMIT)
        config = replace(point.config, checkpoint=saves, cluster=cluster)
        found = checkpoint_cost(config, point.mesh, point.time.seconds)
        shortest = max(found.write_seconds, point.time.seconds)
        return cls(3600 * MTBF_HOURS_OF_A_GPU / gpus, shortest, found.blocked_seconds)

    @property
    def interval(self) -> float:
        """The best, as far as that can be."""
        return max(daly(self.blocked, self.mtbf), self.shortest)


def two_sites(point: Point, link: float) -> tuple[float, float]:
    """Seconds that a step takes longer where its pipeline, or where its replicas, are cut between two sites.

    A pipeline sends activations and their gradients over each of its borders between the sites (there and, to go
    round, back: one a stage of a rank), hidden as far as the link is faster than the step. Replicas exchange float32
    gradients once a step, which nothing hides.
    """
    config, mesh, batch = point.config, point.mesh, plan_batch(point.config, point.mesh)
    crossings = 2 * config.parallel.stages_per_rank - 1
    row = 2.0 * batch.tokens_per_micro_batch * config.model.hidden_size * (mesh.world_size / mesh.pp)
    busy = crossings * batch.num_micro_batches * row / link
    pipeline = max(0.0, busy - point.time.seconds) + 2 * crossings * (SITE_LATENCY + row / link)
    numel = sum(rank.params for rank in plan_memory(config, mesh, batch))
    return pipeline, 4.0 * numel / link + 2 * SITE_LATENCY


def mfu_of(model: str, name: str) -> float:
    """That of a published run, full attention counted."""
    [run] = [run for run in runs() if (run.model, run.name) == (model, name)]
    predicted = run.predict()
    assert predicted.mfu_full_attention is not None
    return run.tokens_per_second * run.mesh.world_size / predicted.tokens_per_second * predicted.mfu_full_attention


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def full(point: Point | None) -> float | None:
    return point.time.mfu_full_attention if point else None


def strong_table() -> str:
    """MFU by model and GPUs: the paper's mesh, the fastest, and what was published."""
    lines = ["| model, mesh | " + " | ".join(f"{n:,}" for n in GPUS) + " | published |", "|---" * (len(GPUS) + 2) + "|"]
    for model, (gpus, _) in PAPER.items():
        cells = [f"{percent(full(strong(model, n)[0]))}, {percent(full(strong(model, n)[1]))}" for n in GPUS]
        lines.append(f"| `{model}` | {' | '.join(cells)} | {mfu_of(model, 'folded'):.1%} at {gpus} |")
    return "\n".join(lines) + "\n"


def context_table() -> str:
    """MFU, causal attention counted, and the mesh, by model and row length."""
    heads = [f"{n // 1024}K" for n in CONTEXTS]
    lines = ["| model, GPUs | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for model, (gpus, _) in PAPER.items():
        found = [context(model, n) for n in CONTEXTS]
        cells = [f"{percent(p.time.mfu)}, cp{p.mesh.cp} tp{p.mesh.tp}" if p else "–" for p in found]
        lines.append(f"| `{model}`, {gpus} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def beyond_table() -> str:
    """DeepSeek-V3 by GPUs: the same batch and one that grows; failures; two sites."""
    heads = ["GPUs", "mesh", "micro-batches", "step", "MFU", "bubble", "FSDP", "latency"]
    heads += ["batch grown: MFU, tokens a step", "a failure every", "best interval", "lost", "lost at 30 min"]
    heads += ["two sites of " + f"{link / 1e12:g} TB/s: pipeline, replicas" for link in SITE_LINKS]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for gpus in BEYOND:
        point, grown, failures = beyond(gpus), beyond(gpus, True), Failures.of(gpus)
        assert point and grown
        best_lost, late = (lost(t, failures.blocked, failures.mtbf) for t in (failures.interval, 1800.0))
        sites = [two_sites(point, link) for link in SITE_LINKS]
        cells = [
            f"{gpus:,}",
            point.mesh.describe("default"),
            f"{plan_batch(point.config, point.mesh).num_micro_batches:,}",
        ]
        cells += [f"{point.time.seconds:.1f} s", percent(point.time.mfu), percent(point.share["bubble"])]
        cells += [percent(point.share["fsdp"]), percent(without(point, "latency"))]
        cells += [
            f"{percent(grown.time.mfu)}, {ROWS_A_GPU * gpus * 4096 / 1e6:,.0f} M",
            f"{failures.mtbf / 60:,.0f} min",
        ]
        cells += [f"{failures.interval:.0f} s", percent(best_lost), percent(late)]
        cells += [f"+{pipeline:.1f} s, +{replicas:.1f} s" for pipeline, replicas in sites]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


TABLES = {"strong": strong_table, "context": context_table, "beyond": beyond_table}


def page() -> str:
    """``docs/scaling.md`` with the tables as they are now."""
    text = PAGE.read_text()
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: written by docs/draw_scaling.py -->\n", f"<!-- end of {name} -->\n"
        before, rest = text.split(begin)
        text = before + begin + table() + end + rest.split(end)[1]
    return text


def draw() -> None:
    """The three pictures."""
    from matplotlib import rc_context

    from automoe.observe.plot_style import BLUE, GREEN, ORANGE, RC, RED, new_figure, save

    colours = dict(zip(PAPER, (BLUE, ORANGE, GREEN, RED), strict=True))
    with rc_context(RC):
        figure, (left, right) = new_figure(10.5, 4.2, 1, 2)
        for model, (gpus, _) in PAPER.items():
            values = [full(strong(model, n)[1]) for n in GPUS]
            left.plot(GPUS, [v and 100 * v for v in values], color=colours[model], label=model, marker=".")
            left.plot([gpus], [100 * mfu_of(model, "folded")], "D", color=colours[model], markersize=7, mfc="white")
            left.plot([gpus], [100 * mfu_of(model, "coupled")], "s", color=colours[model], markersize=6, mfc="white")
            long = [context(model, n) for n in CONTEXTS]
            right.plot(CONTEXTS, [p and 100 * (p.time.mfu or 0) for p in long], color=colours[model], marker=".")
        left.plot([], [], "D", color="#66727f", mfc="white", label="published, folded")
        left.plot([], [], "s", color="#66727f", mfc="white", label="published, coupled")
        left.set(title="256 rows of 4,096 tokens a step", xlabel="H100", ylabel="MFU, %, full attention")
        left.set_xscale("log", base=2)
        left.set_xticks(GPUS, [f"{n:,}" for n in GPUS])
        left.set_ylim(0, 80)
        left.legend(loc="upper right", fontsize=7.5, ncols=2)
        right.set(title="1 M tokens a step, longer rows", xlabel="tokens of a row", ylabel="MFU, %, causal attention")
        right.set_xscale("log", base=2)
        right.set_xticks(CONTEXTS, [f"{n // 1024}K" for n in CONTEXTS])
        right.set_ylim(0, 60)
        save(figure, IMAGES / "scaling_paper.png")
        figure, (left, right) = new_figure(10.5, 4.2, 1, 2)
        points = [p for p in map(beyond, BEYOND) if p]
        names = ("compute", "tp", "cp", "ep", "etp", "fsdp", "pp", "bubble", "other")
        rows = [[100 * p.share[name] for p in points] for name in names]
        shown = [(name, row) for name, row in zip(names, rows, strict=True) if max(row) > 1]
        left.stackplot(BEYOND, [row for _, row in shown], labels=[name for name, _ in shown], colors=CELL_COLOURS)
        left.set(
            title="DeepSeek-V3, 16,384 rows a step: what a step is", xlabel="H100", ylabel="% of a step", ylim=(0, 100)
        )
        left.set_xscale("log", base=2)
        left.set_xticks(BEYOND, [f"{n:,}" for n in BEYOND], rotation=30)
        left.legend(loc="lower left", fontsize=8, frameon=True)
        minutes = [0.05 * 1.2**i for i in range(40)]
        for gpus, colour in zip((1024, 16384, 131072), (BLUE, ORANGE, RED), strict=True):
            failures = Failures.of(gpus)
            losses = [100 * lost(60 * m, failures.blocked, failures.mtbf) for m in minutes]
            right.plot(minutes, losses, color=colour, label=f"{gpus:,} H100")
        right.set(
            title="Time lost to failures and checkpoints",
            xlabel="minutes between checkpoints",
            ylabel="%",
            ylim=(0, 100),
        )
        right.set_xscale("log")
        right.legend(loc="upper left")
        save(figure, IMAGES / "scaling_beyond.png")


CELL_COLOURS = ("#2563a8", "#c3e3cf", "#e3c9e6", "#f8d3b0", "#d9722e", "#c9dbdb", "#c23b3b", "#66727f")

if __name__ == "__main__":
    PAGE.write_text(page())
    draw()
    print(f"written: {PAGE} and pictures in {IMAGES}")
