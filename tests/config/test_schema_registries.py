"""What the schema offers is what the code has: no choice without something behind it, and none that is not offered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args, get_type_hints

import pytest

from automoe.config import schema
from automoe.config.data_schema import CHAT_KINDS
from automoe.config.facts import ELEMENT_BYTES
from automoe.config.pipeline import IN_ROUNDS, SINGLE, V_SHAPED
from automoe.data.corpora import _SOURCES
from automoe.hf.families.registry import FAMILIES, UNDECLARED
from automoe.kernels.attention import FORCED
from automoe.moe.experts import BACKENDS
from automoe.moe.router import GATES, ROUTER_DTYPES
from automoe.parallel.dispatchers import DISPATCHERS
from automoe.parallel.fsdp import COMPUTE_DTYPES, MASTER_DTYPES
from automoe.planner.step_memory import DTYPE_BYTES
from automoe.verify.run import TOLERANCES


@pytest.mark.parametrize(
    ("section", "key", "registry"),
    [
        (schema.ModelConfig, "family", [*FAMILIES, UNDECLARED]),
        (schema.MoEConfig, "dispatcher", DISPATCHERS),
        (schema.MoEConfig, "experts", list(BACKENDS)),
        (schema.MoEConfig, "gate", ["learned", *GATES]),
        (schema.MoEConfig, "router_dtype", ROUTER_DTYPES),
        (schema.KernelsConfig, "attention", ["sdpa", "te", "flex", *FORCED]),
        (schema.ParallelConfig, "schedule", [*SINGLE, *IN_ROUNDS, "LoopedBFS", *V_SHAPED]),
        (schema.DataConfig, "kind", [*_SOURCES, *CHAT_KINDS, "benchmark"]),
        *((schema.TrainConfig, "dtype", by_dtype) for by_dtype in (COMPUTE_DTYPES, MASTER_DTYPES, ELEMENT_BYTES)),
        *((schema.TrainConfig, "dtype", by_dtype) for by_dtype in (DTYPE_BYTES, TOLERANCES)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_schema_lists_what_is_registered(section: type, key: str, registry: Iterable[str]) -> None:
    assert set(get_args(get_type_hints(section)[key])) == set(registry)
