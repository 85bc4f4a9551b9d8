"""What a rank sees to in its own process before torch is imported."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from automoe.config.schema import LaunchConfig
from automoe.interop.gloo import OneWorkerGloo
from automoe.launch.ranks import init_ranks

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
