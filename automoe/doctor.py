"""``automoe doctor``: what this machine has, what is missing, and which command to try first.

With ``--gpu`` it runs a fixed sequence of checks on the machine's GPUs, and says which result files
to send to the developers.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions, requires
from importlib.util import find_spec
from pathlib import Path

from automoe import __version__
from automoe.errors import ConfigError, exit_status

EXIT_PROBLEM = 1
EXIT_NO_HARDWARE = 3
MIN_FILES = 4096  # open files of a rank with hundreds of peers
MIN_DISK = 5e9  # bytes of a few runs of the default model with its token cache
# Optional packages, and the settings that need each.
OPTIONAL = {
    "triton": "moe.experts=triton",
    "transformer_engine_torch": "moe.experts=te",
    "deep_ep": "moe.dispatcher=deepep",
    "bitsandbytes": "lora.base=nf4",
    "datasets": "data=hub",
    "wandb": "observe.wandb",
    "tensorboard": "observe.tensorboard",
    "mlflow": "observe.mlflow",
}
PACKAGES = "triton transformers numpy liger-kernel nvidia-nccl-cu12 nvidia-nccl-cu13"
NETWORK = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_")


@dataclass(frozen=True)
class Fact:
    """One line of the output of ``automoe doctor``: a property of this machine, and what is wrong.

    Attributes:
        name: the property, such as ``CPU cores``.
        value: its value, as text.
        problem: what the user should do; "" if nothing is wrong.
    """

    name: str
    value: str
    problem: str = ""


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Print what ``automoe doctor`` finds on this machine, or with ``--gpu`` run the GPU checks.

    Returns the exit status: 0 if nothing is wrong; 1 if a problem was found or a check failed; 2 if
    the folder for ``--gpu`` exists; 3 for ``--gpu`` without a GPU.
    """
    parser = argparse.ArgumentParser(
        "automoe doctor",
        description="Say what this machine has, what is missing, and which command to try first.",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="run the ordered checks for one GPU and eight, and say what to send back",
    )
    parser.add_argument("--dir", type=Path, default=Path("gpu-first"), help="new folder for --gpu")
    args = parser.parse_args(argv)
    facts = list(examine())
    if args.gpu:
        return check_gpus(args.dir, facts)
    indent = " " * 28
    layout = textwrap.TextWrapper(
        80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    for fact in facts:
        verdict = "PROBLEM" if fact.problem else "ok"
        print(layout.fill(f"{verdict:<8}{fact.name:<20}{fact.value}"))
        if fact.problem:
            print(layout.fill(indent + fact.problem))
    return EXIT_PROBLEM if any(fact.problem for fact in facts) else 0


def examine() -> Iterator[Fact]:
    """Yield this machine's versions, hardware, disks and limits, with any problems.

    It does not import torch.
    """
    from automoe.launch.external import left_over
    from automoe.launch.hardware import num_cores, torch_has_cuda, torch_note, visible_gpus
    from automoe.storage.cache import default_cache_dir

    yield Fact("automoe", f"{__version__} on Python {platform.python_version()}")
    linux = sys.platform == "linux"
    wrong = "" if linux else "ranks run only on Linux: use a container or a virtual machine"
    yield Fact("system", platform.platform(), wrong)
    # If a package is on the path twice, Python imports the first one, which is last and wins here.
    installed = {
        distribution.name.lower().replace("_", "-"): distribution.version
        for distribution in reversed([*distributions()])
    }
    torch = installed.get("torch", "")
    build = "CUDA" if torch_has_cuda() else "CPU"
    wrong = torch_note(torch) or "" if torch else "pip install torch"
    yield Fact("torch", f"{torch}, {build} build", wrong)
    versions = [f"{name} {installed[name]}" for name in PACKAGES.split() if name in installed]
    yield Fact("packages", ", ".join(versions), _other_triton(installed))
    there = [name for package, name in OPTIONAL.items() if find_spec(package)]
    missing = [name for name in OPTIONAL.values() if name not in there]
    yield Fact("optional, here", ", ".join(there))
    yield Fact("optional, missing", ", ".join(missing))

    gpus = visible_gpus()
    wrong = ""
    if gpus and build == "CPU":
        wrong = "torch is a CPU build: install the CUDA build (docs/install.md)"
    yield Fact("GPUs", f"{gpus}{_gpu_names()}" if gpus else "none: ranks run on the CPU", wrong)
    yield Fact("CPU cores", str(num_cores()))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wrong = "raise ulimit -Hn to 65536" if 0 <= files < MIN_FILES else ""
    yield Fact("open files", str(files), wrong)
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    few = gpus > 1 and shm < 1e9
    yield Fact("/dev/shm", f"{shm / 1e9:.1f} GB", "NCCL needs 1 GB: --shm-size=16g" if few else "")
    for name, folder in (("disk here", Path.cwd()), ("disk of the cache", default_cache_dir())):
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        wrong = "" if free > MIN_DISK else f"free {MIN_DISK / 1e9:.0f} GB, or set XDG_CACHE_HOME"
        yield Fact(name, f"{free / 1e9:.0f} GB free in {folder}", wrong)

    yield Fact("interfaces", ", ".join(name for _, name in socket.if_nameindex()))
    adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    yield Fact("InfiniBand, RoCE", ", ".join(adapters) or "none")
    settings = [f"{key}={value}" for key, value in os.environ.items() if key.startswith(NETWORK)]
    yield Fact("network settings", " ".join(sorted(settings)) or "none in the environment")
    if stale := left_over(os.environ):
        yield Fact("launcher", ", ".join(stale), "unset them unless torchrun or srun sets them")
    yield Fact("first command", "automoe doctor --gpu" if gpus else "automoe demo")


def check_gpus(folder: Path, facts: list[Fact]) -> int:
    """Run every GPU check for which this machine has enough GPUs, and print the outcomes.

    Args:
        folder: directory for the files that the checks write; it must not exist.
        facts: properties of this machine (``examine``); all but those of disks are stored with the
            results.

    Returns:
        Exit status: 0; 1 if a check failed; 3 without a GPU.

    Raises:
        ConfigError: ``folder`` exists.
    """
    from automoe.launch.gpu_first import CHECKS, RESULTS, run_checks
    from automoe.launch.hardware import torch_has_cuda, visible_gpus

    gpus = visible_gpus() if torch_has_cuda() else 0
    if not gpus:
        print("No GPU is seen, or torch is a CPU build: nothing was run. With GPUs this runs:\n")
        for check in CHECKS:
            print(f"  {check.gpus} GPU  {check.name:<12}{check.proves}")
        return EXIT_NO_HARDWARE
    if folder.exists():
        raise ConfigError("--dir", folder, "exists, and nothing is overwritten", "Name another")
    folder.mkdir(parents=True)
    failed = 0
    checks = [check for check in CHECKS if check.gpus <= gpus]
    # Facts that are sent back must not name folders of this machine.
    sent = {fact.name: fact.value for fact in facts if not fact.name.startswith("disk")}
    for check, outcome in run_checks(folder, checks, sent):
        failed += bool(outcome["wrong"])
        verdict = "FAILED" if outcome["wrong"] else "passed"
        print(f"{verdict}  {check.name:<12}{outcome['seconds']:6.0f} s  {check.proves}", flush=True)
        if outcome["wrong"]:
            print(outcome["wrong"].strip().rpartition("\n")[2])
    left = ", ".join(check.name for check in CHECKS if check.gpus > gpus)
    print(
        f"{len(checks) - failed} of {len(checks)} passed on {gpus} GPUs; not run: {left or 'none'}"
    )
    print(f"Send back {folder / RESULTS}; for failed checks also {folder}/NAME/logs")
    return EXIT_PROBLEM if failed else 0


def _other_triton(installed: dict[str, str]) -> str:
    """Return advice to install the Triton version that the installed torch requires.

    The result is "" if that version is installed, or if torch requires none.

    Args:
        installed: package name -> installed version.
    """
    from packaging.requirements import Requirement

    for line in requires("torch") or () if "torch" in installed else ():
        needed = Requirement(line)
        here = installed.get(needed.name)
        asked = needed.marker is None or needed.marker.evaluate({"extra": ""})
        there = here is not None and needed.specifier.contains(here, prereleases=True)
        if "triton" in needed.name and asked and not there:
            pair = f"{needed.name}{needed.specifier}"
            return f"torch {installed['torch']} needs {pair} and finds {here or 'none'}: pip install '{pair}'"
    return ""


def _gpu_names() -> str:
    """Return ": " and ``nvidia-smi``'s GPU names, memory and driver version; "" without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ]
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f": {'; '.join(dict.fromkeys(said.splitlines()))}"


if __name__ == "__main__":
    sys.exit(main())
