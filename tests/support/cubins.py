"""What a compiled Triton kernel takes of a multiprocessor, read from its code by CUDA's own tool, without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def resource_usage(compiled: Any) -> tuple[int, int]:
    """Registers, and bytes spilled to memory, of one thread of what ``triton.compile`` made for CUDA."""
    import triton

    [tool] = Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found is not None, usage.stdout
    return int(found[1]), int(found[2])
