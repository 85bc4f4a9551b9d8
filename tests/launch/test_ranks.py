"""What a rank sees to in its own process before torch is imported."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from automoe.config.schema import LaunchConfig
from automoe.errors import LaunchError
from automoe.interop.gloo import OneWorkerGloo
from automoe.launch import ranks
from automoe.launch.ranks import bind_near, init_ranks
from automoe.launch.stuck import StuckWatch
from automoe.launch.worker import look_every_s

SHOW = """
import json, os, resource, sys
from automoe.launch.ranks import prepare_process
prepare_process()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
print(json.dumps([limits, [os.environ.get(name) for name in names], "torch" in sys.modules]))
"""


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_environment_says_otherwise(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "max_split_size_mb:64")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = f"ulimit -Sn 64; exec {sys.executable} -c '{SHOW}'"
    done = subprocess.run(["sh", "-c", few], capture_output=True, text=True, check=True, timeout=60)
    limits, said, torch_is_there = json.loads(done.stdout)
    assert limits == [hard, hard] and not torch_is_there
    new, old = ("expandable_segments:True", None) if name is None else ("max_split_size_mb:64", None)
    assert said == ([None, new] if name == "PYTORCH_CUDA_ALLOC_CONF" else [new, old])


def test_nccl_is_bound_to_the_device_and_gloo_connects_when_it_sends() -> None:
    """Unbound, a pipeline with several stages a rank has a communicator for each pair of ranks."""
    given: dict[str, Any] = {}

    def init(backend: str, method: None, timeout: timedelta, size: int, rank: int, store: None, **kwargs: Any) -> None:
        given.update(kwargs, backend=backend, timeout=timeout, lazy=OneWorkerGloo.lazy)

    with (
        mock.patch.object(dist, "init_process_group", init),
        mock.patch.object(torch.cuda, "set_device") as set_device,
        mock.patch.object(torch.cuda, "device_count", lambda: 8),
    ):
        device = init_ranks(LaunchConfig(device="cuda", init_timeout_s=900), 11, 16, 3, None)
        set_device.assert_called_once_with(torch.device("cuda", 3))
        assert given.pop("backend") == "cpu:gloo,cuda:nccl"
        assert given == {"device_id": device, "timeout": timedelta(seconds=900), "lazy": True}
        init_ranks(LaunchConfig(device="cpu"), 1, 2, 1, None)
        assert given["device_id"] is None and given["backend"] == "gloo" and not given["lazy"]


def test_a_rank_is_bound_to_the_cores_next_to_its_gpu(tmp_path: Path) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text("0-3,8,12-13\n")
    bound: list[set[int]] = []
    with (
        mock.patch.object(os, "sched_getaffinity", lambda pid: set(range(2, 13))),
        mock.patch.object(os, "sched_setaffinity", lambda pid, cores: bound.append(cores)),
    ):
        bind_near("0000:3b:00.0", tmp_path)
        assert bound == [{2, 3, 8, 12}]
        with pytest.raises(LaunchError, match="no list of CPU cores next to 0000:86:00.0"):
            bind_near("0000:86:00.0", tmp_path)
        (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text("64-127\n")
        with pytest.raises(LaunchError, match="cores 64-127 are next to 0000:3b:00.0, and this process may use none"):
            bind_near("0000:3b:00.0", tmp_path)
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(torch.cuda, "device_count", lambda: 8),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: facts),
        mock.patch.object(ranks, "bind_near") as bind,
    ):
        ranks.init_ranks(LaunchConfig(device="cuda"), 3, 8, 3, None)
        bind.assert_not_called()
        ranks.init_ranks(LaunchConfig(device="cuda", numa=True), 3, 8, 3, None)
        bind.assert_called_once_with("0000:3b:00.0")


@pytest.mark.parametrize(
    ("num_ranks", "here", "seconds"), [(8, 8, 0.5), (1024, 8, 4.0), (1024, 4, 2.0), (16, 1, 0.5), (64, 16, 4.0)]
)
def test_a_shared_disk_is_asked_once_a_node_and_not_once_a_rank(num_ranks: int, here: int, seconds: float) -> None:
    assert look_every_s(num_ranks, here) == seconds


def test_the_thread_that_watches_asks_the_gpu_of_its_rank(tmp_path: Path) -> None:
    watch = StuckWatch(tmp_path, 3, 8, sys.stderr)
    with mock.patch.object(torch.cuda, "set_device") as set_device:
        watch.look()
        watch.device = torch.device("cpu")
        watch.look()
        set_device.assert_not_called()
        watch.device = torch.device("cuda", 3)
        watch.look()
        set_device.assert_called_once_with(torch.device("cuda", 3))


def test_freed_memory_serves_again_on_the_cpu() -> None:
    """In a process of its own, since what malloc is told it is told for good: 64 MiB again without a page fault each."""
    code = (
        "import ctypes, resource\n"
        "from automoe.launch.ranks import keep_freed_memory\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    block = libc.malloc(1 << 26)\n"
        "    ctypes.memset(block, 1, 1 << 26)\n"
        "    libc.free(block)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "keep_freed_memory()\n"
        "print(faults(), faults())\n"
    )
    first, again = map(int, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert first > 10 * again, (first, again)
