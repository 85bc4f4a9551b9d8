"""The plan's peak against what torch's allocator counted on every rank of whole training steps.

The counts are in ``measured_memory.json``; ``python tests/planner/test_measured_memory.py`` measures them again. With them
every term of the plan can be left out, or doubled, in a moment: some case must then be wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

import automoe.planner.activations
import automoe.planner.memory
import automoe.planner.step_memory
import automoe.planner.workspace
from automoe.config.batch import plan_batch
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.planner.memory import plan_memory
from automoe.planner.step_memory import LayerPlan, StagePlan
from automoe.planner.workspace import Workspace
from automoe.verify.pool import RankPool
from tests.planner.memory_cases import CASES, case
from tests.support.memory import build_allocator, measure_step

FILE = Path(__file__).parent / "measured_memory.json"
MEASURED: dict[str, list[int]] = json.loads(FILE.read_text()) if FILE.exists() else {}
TOLERANCE = 0.05
# Two seconds: the rest is measured by ``make test-meshes``.
QUICK = "qwen one micro-batch"


@cache
def prepared(name: str) -> tuple[Config, MeshShape]:
    config = case(name)
    return config, validate(config, None)


def errors(name: str, measured: list[int]) -> list[float]:
    """Of each rank, planned over measured less one."""
    config, shape = prepared(name)
    ranks = plan_memory(config, shape, plan_batch(config, shape))
    per_stage = shape.world_size // shape.pp
    return [ranks[rank // per_stage].peak / most - 1 for rank, most in enumerate(measured)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_within_a_twentieth_on_every_rank(name: str) -> None:
    off = errors(name, MEASURED[name])
    assert len(off) == prepared(name)[1].world_size and max(map(abs, off)) < TOLERANCE, off


def test_there_are_cases_of_every_kind() -> None:
    configs = [prepared(name)[0] for name in CASES]
    assert len(configs) >= 24 and set(MEASURED) == set(CASES)
    assert {config.model.family for config in configs} >= {"qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "llama"}
    assert {config.train.dtype for config in configs} == {"float32", "bfloat16"}
    micro_batches = {plan_batch(*prepared(name)).num_micro_batches for name in CASES if prepared(name)[1].pp > 1}
    assert micro_batches >= {8, 64}
    for axis in ("pp", "dp_shard", "dp_replicate", "cp", "tp", "ep", "etp", "ep_shard"):
        assert any(getattr(prepared(name)[1], axis) > 1 for name in CASES), axis


def scaled(factor: float, function: Callable[..., float]) -> Callable[..., float]:
    return lambda *args, **given: factor * function(*args, **given)


@contextmanager
def field_scaled(made: type, name: str, factor: float) -> Iterator[None]:
    """``made`` with one of its fields times ``factor`` in every object."""
    init = made.__init__

    def initialise(self, *args, **given):
        init(self, *args, **given)
        object.__setattr__(self, name, getattr(self, name) * factor)

    with patch.object(made, "__init__", initialise):
        yield


@contextmanager
def part_scaled(name: str, factor: float) -> Iterator[None]:
    original = automoe.planner.step_memory._parts_of

    def changed(rank: object) -> list[float]:
        parts = zip(automoe.planner.step_memory.PARTS, original(rank), strict=True)
        return [factor * part if each == name else part for each, part in parts]

    with patch.object(automoe.planner.step_memory, "_parts_of", changed):
        yield


@contextmanager
def kept_scaled(name: str, factor: float) -> Iterator[None]:
    """A component of what a layer keeps."""
    original = automoe.planner.step_memory.layer_activation_bytes

    def changed(*args):
        parts = original(*args)
        return parts | ({name: factor * parts[name]} if name in parts else {})

    with (
        patch.object(automoe.planner.step_memory, "layer_activation_bytes", changed),
        patch.object(automoe.planner.workspace, "layer_activation_bytes", changed),
    ):
        yield


MUTANTS: dict[str, Callable[[float], object]] = {}
for _part in sorted(
    set(automoe.planner.step_memory.PARTS) - {"widened"}
):  # tests/hf/test_packed_base.py has it to the byte
    MUTANTS[f"{_part} of a rank"] = lambda factor, name=_part: part_scaled(name, factor)
for _part in ("norms", "attention", "ffn", "experts", "router"):
    MUTANTS[f"{_part} kept"] = lambda factor, name=_part: kept_scaled(name, factor)
for _made, _names in {
    LayerPlan: ("kept", "weights", "gradients", "sharded", "experts"),
    StagePlan: ("received", "border", "shared", "head", "head_kept", "rest_weights", "rest_gradients"),
    Workspace: ("done", "recompute", "temporaries"),
}.items():
    for _name in _names:
        MUTANTS[f"{_made.__name__}.{_name}"] = lambda factor, made=_made, name=_name: field_scaled(made, name, factor)
for _module, _names in {
    automoe.planner.memory: ("SENDS_KEPT", "INPUT_BYTES", "BATCH_BYTES", "UPDATE_BYTES", "UNITS_RESIDENT")
}.items():
    for _name in _names:
        MUTANTS[_name] = lambda factor, module=_module, name=_name: patch.object(
            module, name, int(factor * getattr(module, name))
        )
MUTANTS["_muon_scratch"] = lambda factor: patch.object(
    automoe.planner.memory, "_muon_scratch", scaled(factor, automoe.planner.memory._muon_scratch)
)
for _name in ("_experts_temporaries", "_attention_temporaries"):
    MUTANTS[_name] = lambda factor, name=_name: patch.object(
        automoe.planner.workspace, name, scaled(factor, getattr(automoe.planner.workspace, name))
    )
for _module, _name in (
    (automoe.planner.activations, "_math_bytes"),
    (automoe.planner.activations, "score_numbers"),
    (automoe.planner.workspace, "score_numbers"),
):
    MUTANTS[f"{_module.__name__}.{_name}"] = lambda factor, module=_module, name=_name: patch.object(
        module, name, scaled(factor, getattr(module, name))
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("factor", [0, 2])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_no_term_can_be_left_out_or_doubled(mutant: str, factor: int) -> None:
    with MUTANTS[mutant](factor):
        assert any(abs(off) >= TOLERANCE for name in CASES for off in errors(name, MEASURED[name]))


def most_alive(ranks: RankPool, config: Config, library: Path) -> list[int]:
    shape = validate(config, None)
    return [each["step"] for each in ranks.run(measure_step, shape.world_size, config, library)]


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
)
def test_a_step_takes_what_is_written_down(ranks: RankPool, allocator: Path, name: str) -> None:
    config, shape = prepared(name)
    message = 4 * config.train.micro_batch_size * config.train.seq_len * config.model.residual_width
    on_the_way = 2 * message if shape.pp > 1 else 0  # how many sends wait at the peak depends on the ranks' clocks
    for measured, expected in zip(most_alive(ranks, config, allocator), MEASURED[name], strict=True):
        assert abs(measured - expected) <= 0.02 * expected + on_the_way


@pytest.mark.exhaustive
def test_a_pipeline_holds_no_more_for_more_micro_batches(ranks: RankPool, allocator: Path) -> None:
    """Torch's own keeps what it received, and under interleaved stages what it sent, for all of them."""
    config = prepared("llama pp2 interleaved full")[0]
    config = replace(config, train=replace(config.train, seq_len=64))

    def most(rows: int) -> list[int]:
        each = replace(config, train=replace(config.train, global_batch_size=rows))
        inputs = (automoe.planner.memory.INPUT_BYTES + automoe.planner.memory.BATCH_BYTES) * rows * config.train.seq_len
        return [alive - inputs for alive in most_alive(ranks, each, allocator)]

    border = 2 * config.train.micro_batch_size * config.train.seq_len * config.model.hidden_size
    for few, many in zip(most(16), most(64), strict=True):  # 4 micro-batches, and 16
        assert abs(many - few) < 3 * border


if __name__ == "__main__":
    import tempfile

    pool, found = RankPool(max_ranks=8), dict(MEASURED)
    with tempfile.TemporaryDirectory() as folder:
        built = build_allocator(Path(folder))
        for each in sys.argv[1:] or CASES:
            found[each] = most_alive(pool, prepared(each)[0], built)
    pool.close()
    rows = [f" {json.dumps(name)}: {json.dumps(found[name])}" for name in CASES]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
