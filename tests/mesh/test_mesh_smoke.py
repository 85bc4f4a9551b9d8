"""Options that reach private parts of torch train like one rank, with the oldest and the newest torch (``make smoke-*``)."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from mesh_cases import Case, run_case
from mesh_mappings import (
    BREADTH_FIRST,
    DELAYED,
    DUAL_PIPE,
    FUSED,
    INTERLEAVED,
    LORA,
    MERGED,
    MUON_CLIP,
    PER_MICRO_BATCH,
    RING,
    ZBV,
)  # fmt: skip

from automoe.interop import torch_fsdp, torch_pipelining, torch_private
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankPool

MODULES = (torch_fsdp, torch_private, torch_pipelining)
NAMES = {module.__name__ for module in MODULES}
PIPELINE = dict(pp=2, dp_shard=2, ep=2)
CASES = [
    Case("deepseek", PIPELINE, rows=1, parallel=INTERLEAVED | DELAYED),
    Case("deepseek", PIPELINE, rows=1, parallel=ZBV),
    Case("deepseek", PIPELINE, rows=1, parallel=DUAL_PIPE | MERGED),
    Case("deepseek", PIPELINE, rows=1, parallel=BREADTH_FIRST | FUSED),
    Case("deepseek", dict(pp=2), rows=2, parallel=dict(recompute=["layernorm", "mla_up_proj", "moe_act"])),
    Case("deepseek", dict(dp_shard=2, ep=2), rows=2, parallel=FUSED, dispatcher="allgather"),
    Case("deepseek", dict(dp_shard=2, ep=2), rows=1, parallel=DELAYED),
    Case("deepseek", dict(cp=2, ep=2), rows=4, parallel=RING),
    Case("deepseek", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, optim=MUON_CLIP),
    Case("deepseek", dict(dp_replicate=2, dp_shard=2, ep=4), rows=1, parallel=PER_MICRO_BATCH),
    Case("deepseek", dict(tp=2, ep=2), rows=2, lora=LORA),
]
# Reached by no step in float64 on a CPU: by failed passes, lost ranks, checkpoints and plans, or on CUDA. The smoke tests
# call them in ``tests/interop``, and commands that do so in ``tests/smoke``.
ELSEWHERE = {
    "process_groups", "group_members", "flight_records", "replace_gloo", "fake_store", "use_ring_attention",
    "cached_functions", "forget_meshes", "state_dict_stager", "cache_plans_under", "forget_cached_plans",
    "unshard_every_stage_once", "foreach_norm", "is_strided_shard", "stored_tensor",
    "forget_pass",
}  # fmt: skip
reached: set[str] = set()


def traced(fn: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, set[str]]:
    """Return the result of a call, and which functions of ``MODULES`` it called in any thread of this process."""
    found = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__") in NAMES:
            found.add(frame.f_code.co_qualname.split(".")[0])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        return fn(*args, **given), found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class TracedPool:
    """The ranks of a pool, traced."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, **given: Any) -> list[Any]:
        answers = self.pool.run(traced, world_size, fn, args, given)
        reached.update(*(found for _, found in answers))
        return [answer for answer, _ in answers]


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_option_trains_like_one_rank(ranks: RankPool, reference, case: Case) -> None:
    compared = compare_trajectories(run_case(TracedPool(ranks), case), reference(case))
    assert [one for one in compared if not one.within(1e-10)] == []


@pytest.mark.smoke
def test_each_private_part_is_reached() -> None:
    """By a case above, of which all ran, or by what ``ELSEWHERE`` says."""
    own = {
        name
        for module in MODULES
        for name, one in vars(module).items()
        if (inspect.isfunction(one) or inspect.isclass(one)) and one.__module__ == module.__name__
    }
    here = {name for name in own if not name.startswith("_")}
    assert here - reached <= ELSEWHERE, sorted(here - reached - ELSEWHERE)
    assert ELSEWHERE <= here, sorted(ELSEWHERE - here)
