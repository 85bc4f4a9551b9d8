"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings

from automoe.passes.trace import training_pass
from automoe.verify.pool import RankPool
from tests.support.imported import ImportedRanks

pytest_plugins = ["tests.support.cpu_times", "tests.support.releases", "tests.support.sampling"]

if not torch.cuda.is_available():  # read when triton is first imported, which any test may do
    os.environ["TRITON_INTERPRET"] = "1"

# Files that take longest, longest first: one that began last would keep one core busy and leave the other idle.
LONGEST = """
    class_tier_kills remedies_carried_out tries disk_table_commands kills finetune damaged_files checkpoint_kills
    mesh_ties signals tune_kernels full_disk_run soak moe_layer main_job grpo mesh_float64 class_tier local_launch
    plan weights mesh_replay resume generate compose adapter_start plain_loop verify search hf_meshes pretrain_command
    session session_errors mesh_suite_can_fail checkpoint_damage session_calls external_launch foreign_files
    published_classes hf_walk eval bounds unasked_code routing_meshes lora_export measured_memory vocabulary
    hf_registry trackers report
    tinker fp8_training mesh_sessions skipped_streak hf_export activations upcycle export versions convert prepare
    torch_private mesh_draws requirements params_table pretrain_steps documented_commands experts hf_quantized
    counting served jobs gradient_dtypes expert_parallel rope_kernels fake_world hub_id pages recompute train_step
    checkpoint_bench fake_cuda mesh_float32 mesh_torchtitan_norm sweep stuck disk_faults async_save device_training
    communication dispatch compile
""".split()

# With ``-m gpu`` the order in which failures tell most: numbers of the whole model first, then what they are made of,
# then what costs time or memory only.
FIRST_ON_GPU = """
    device_parity device_training device_experts row_sums kernels device_attention device_rope device_fp8 stochastic_kernel
    device_optimizer device_loss grad_norm device_syncs device_overlap device_compile several_devices
""".split()

# Tests of what Hydra composes, by folder and file.
COMPOSED_BY_HYDRA = {"extend", "launch", "packaging", "test_compose.py", "test_configurations.py"}

# An example may take as long as a loaded machine makes it take.
settings.register_profile("automoe", deadline=None)
settings.load_profile("automoe")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to 16 gloo ranks: ``ranks.run(fn, world_size, *args)`` returns one result a rank."""
    pool = ImportedRanks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The counting allocator of ``support/memory.py``, compiled once."""
    from tests.support.memory import build_allocator

    return build_allocator(tmp_path_factory.mktemp("allocator"))


@pytest.fixture(autouse=True)
def composed_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hydra composes each choice of groups once a process, except in tests of what it composes (``quick_compose``).

    Ranks of the pool always compose so.
    """
    if "hydra" not in sys.modules or COMPOSED_BY_HYDRA & {*request.path.parts[-2:]}:
        yield
        return
    from tests.support.configurations import quick_compose

    with patch.object(sys.modules["hydra"], "compose", quick_compose):
        yield


@pytest.fixture
def trains() -> Iterator[None]:
    """Modules that the test calls itself count, as in the passes of a training step."""
    with training_pass():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without Python's garbage collector: it would look at every module that is imported, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # ``-m exhaustive`` and ``-m faults`` mean what runs on any machine; devices are asked for by name.
    asked = set(re.findall(r"\w+", config.option.markexpr))
    unasked = [i for i in items if any(i.get_closest_marker(mark) for mark in {"gpu", "gpus"} - asked)]
    config.hook.pytest_deselected(items=unasked)
    gone = set(unasked)
    items[:] = [item for item in items if item not in gone]
    order = FIRST_ON_GPU if config.option.markexpr in ("gpu", "gpus") else LONGEST
    place = {f"test_{name}.py": number for number, name in enumerate(order)}
    items.sort(key=lambda item: place.get(item.path.name, len(order)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """GPU tests are deselected by default; asked for on a machine without a GPU, they say so once.

    What collecting leaves behind stays: Python's garbage collector need not look at it again and again. Nor at what
    tests make after each 700 objects: a look costs a tenth of a test's time, and cycles may wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    if session.config.option.collectonly:
        return
    here = torch.cuda.device_count()
    for mark, needed in (("gpu", 1), ("gpus", 2)):
        if here < needed and any(item.get_closest_marker(mark) for item in session.items):
            raise pytest.UsageError(
                f"tests marked {mark} were selected, which need {needed} CUDA devices or more; torch {torch.__version__} "
                f"sees {here} here"
            )
