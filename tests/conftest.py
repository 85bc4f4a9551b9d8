"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from automoe.verify.pool import RankPool

pytest_plugins = ["tests.support.cpu_times", "tests.support.sampling"]

if not torch.cuda.is_available():  # read when triton is first imported, which any test may do
    os.environ["TRITON_INTERPRET"] = "1"

# Files that take longest, longest first: one that began last would keep one core busy and leave the other idle.
LONGEST = """
    kills finetune damaged_files mesh_float64 hf_meshes checkpoint_kills recompute mesh_suite_can_fail resume routing_meshes
    train_step external_launch local_launch checkpoint_bench fp8_training fake_cuda pretrain_command activations mesh_float32
    mesh_ties mesh_torchtitan_norm hf_export hf_quantized verify signals sweep tune_kernels full_disk_run stuck soak
    moe_layer main_job disk_faults async_save device_training report communication dispatch compose compile
""".split()

# An example may take as long as a loaded machine makes it take.
settings.register_profile("automoe", deadline=None)
settings.load_profile("automoe")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to 16 gloo ranks: ``ranks.run(fn, world_size, *args)`` returns one result a rank."""
    pool = RankPool(max_ranks=16)
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """GPU tests are deselected by default; asked for on a machine without a GPU, they say so once.

    What collecting leaves behind stays: Python's garbage collector need not look at it again and again.
    """
    gc.freeze()
    if any(item.get_closest_marker("gpu") for item in session.items) and not session.config.option.collectonly:
        if not torch.cuda.is_available():
            raise pytest.UsageError("tests marked gpu were selected, and torch sees no CUDA device here")
