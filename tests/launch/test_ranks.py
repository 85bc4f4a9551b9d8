"""What a rank sees to in its own process before torch is imported."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

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
