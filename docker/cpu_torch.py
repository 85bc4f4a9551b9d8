"""Install torch's CPU build where it can be had: from a local wheel, or from torch's own index if that answers soon.

    python docker/cpu_torch.py constraints-cpu.txt

Elsewhere it says so and installs nothing: what needs torch then takes PyPI's build, which brings CUDA's libraries.
pip must not be given torch's index beside PyPI: it would ask both for every package, and wait for one that is not there.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request

INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS = 5


def installed(constraints: str, *where: str) -> bool:
    """Install torch alone, at the version that the constraints name, and return whether there is one."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    command = (*pip, "--no-deps", "--constraint", constraints, *where, "torch")
    return (
        subprocess.run(
            command, stderr=subprocess.DEVNULL if "--no-index" in where else None
        ).returncode
        == 0
    )


def answers() -> bool:
    """Return whether torch's index answers within ``SECONDS``."""
    try:
        with urllib.request.urlopen(f"{INDEX}/torch/", timeout=SECONDS) as page:
            return page.status == 200
    except OSError:  # urllib's errors and time limits are of this kind
        return False


def main() -> None:
    [constraints] = sys.argv[1:]
    if installed(constraints, "--no-index") or (
        answers() and installed(constraints, "--index-url", INDEX)
    ):
        return
    print(
        f"No CPU build of torch: {INDEX} does not answer within {SECONDS} seconds. "
        "PyPI's build comes with CUDA's libraries: 2.8 GB to download, 6 GB on the disk"
    )


if __name__ == "__main__":
    main()
