"""Random mappings of the mesh suite, from all legal ones.

The seed is in every test's name and is the date's, so that every day draws others. To repeat a failure::

    AUTOMOE_SAMPLE_SEED=739945 python -m pytest -m exhaustive tests/mesh -k drawn
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from mesh_cases import MODELS, ROWS, Case
from mesh_mappings import (
    BREADTH_FIRST,
    CLIP,
    DELAYED,
    DUAL_PIPE,
    EVALUATED,
    FULL,
    FUSED,
    GPIPE,
    HALVES,
    INTERLEAVED,
    MERGED,
    MUON,
    MUON_CLIP,
    PARTS,
    PER_MICRO_BATCH,
    RING,
    ULYSSES,
    ZBV,
)

from automoe.config.mesh_shape import MeshShape
from tests.support.mappings import is_legal, legal_meshes
from tests.support.sampling import sample_seed

DRAWS = 16
# Those with experts, whose meshes, recomputation and capacity are drawn too.
FAMILIES = [name for name, model in MODELS.items() if model.first_k_dense < model.num_layers]
SCHEDULES = ({}, {}, GPIPE, INTERLEAVED, PER_MICRO_BATCH, MERGED, INTERLEAVED | MERGED)
SCHEDULES += (HALVES, ZBV, DUAL_PIPE, DUAL_PIPE | MERGED, BREADTH_FIRST)
SCHEDULES += (FUSED, FUSED | INTERLEAVED, DELAYED, DELAYED | INTERLEAVED)
WORLDS = (2, 4, 4, 8, 8, 8, 16)


@dataclass(frozen=True)
class Drawn(Case):
    seed: int = 0

    def __str__(self) -> str:
        return f"seed={self.seed}-{super().__str__()}"


def draw_cases(seed: int | None = None, count: int = DRAWS) -> list[Drawn]:
    """``count`` different legal cases; the same for the same seed."""
    seed = sample_seed() if seed is None else seed
    generator = random.Random(seed)
    drawn: dict[str, Drawn] = {}
    while len(drawn) < count:
        case = _draw(generator, seed)
        if case is not None:
            drawn.setdefault(str(case), case)
    return sorted(drawn.values(), key=lambda case: case.world_size)


def _draw(generator: random.Random, seed: int) -> Drawn | None:
    """One case, or None where the way to run it that was drawn has no legal mapping."""
    choose = generator.choice
    world_size, family = choose(WORLDS), choose(FAMILIES)
    parallel: dict[str, Any] = dict(choose(SCHEDULES))
    parallel |= choose(({}, {}, {}, FULL, PARTS, dict(recompute="full", recompute_layers="every 2")))
    attention = MODELS[family].attention
    parallel |= choose(({}, {} if attention.index_topk else ULYSSES))
    if parallel.get("context") and not attention.sliding_window and not attention.sinks:
        parallel |= choose((ULYSSES, RING))
    plain = attention.qk_norm or attention.kind == "compressed" or parallel.get("context") == "ring"
    moe: dict[str, Any] = choose(
        (
            {},
            {},
            {},
            dict(router_jitter=0.05),
            dict(capacity_factor=1.25, drop_scope="sequence"),
            dict(capacity_factor=1.0, drop_scope="sequence", drop_policy="position", pad_to_capacity=True),
        )
    )
    if generator.random() < 0.25:
        moe = moe | dict(dispatch_dtype="fp8")
    run: dict[str, Any] = dict(
        rows=choose((1, 2, 4, ROWS)),
        dispatcher=choose(("alltoall", "hierarchical", "allgather")),
        gpus_per_node=choose((1, 2, 4)),
        parallel=parallel,
        document_mask=generator.random() < 0.8,
        moe=moe,
        optim=choose(({}, MUON) if plain else ({}, CLIP, MUON_CLIP)),
        train=choose(({}, EVALUATED)),
    )
    shapes = list(legal_meshes(world_size, Case(family, **run).config))
    if not shapes:
        return None
    # Few of all foldings use many axes, and those that do are where mistakes hide.
    weights = [2 ** sum(size > 1 for size in _sizes(shape).values()) for shape in shapes]
    [shape] = generator.choices(shapes, weights)
    mesh = {axis: size for axis, size in _sizes(shape).items() if size > 1}
    if shape.pp > 1 and generator.random() < 0.5:
        run["parallel"] = _with_layout(generator, shape, Case(family, mesh, **run))
    case = Drawn(family, mesh, seed=seed, **run)
    assert case.world_size == world_size == prod(shape.sizes("moe")) and is_legal(shape, case.config)
    return case


def _with_layout(generator: random.Random, shape: MeshShape, case: Case) -> dict[str, Any]:
    """``case.parallel`` with layers for every stage, which may be none, and modules behind the last of them."""
    model, stages = MODELS[case.family], shape.pp * case.config.parallel.stages_per_rank
    while True:
        cuts = sorted(generator.choices(range(model.num_layers + 1), k=stages - 1))
        sizes = [after - before for before, after in zip([0, *cuts], [*cuts, model.num_layers], strict=True)]
        parallel = case.parallel | dict(layers_per_stage=sizes)
        if model.num_mtp_layers:
            last = max(stage for stage in range(stages) if sizes[stage])
            places = generator.choices(range(last, stages), k=model.num_mtp_layers)
            letters = ["t" * size + "m" * places.count(stage) for stage, size in enumerate(sizes)]
            parallel = case.parallel | dict(layout=f"E{'|'.join(letters)}L")
        if is_legal(shape, replace(case, parallel=parallel).config):
            return parallel


def _sizes(shape: MeshShape) -> dict[str, int]:
    """The axes that a configuration names; ``ep_shard`` follows from them."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep_replicate", "ep", "etp")
    return {axis: getattr(shape, axis) for axis in axes}
