"""Checks of what this machine can run, without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Mapping
from importlib.metadata import version
from math import gcd
from pathlib import Path

from automoe.config.frozen import Device
from automoe.config.mesh_shape import MeshShape, expand_preset
from automoe.config.pipeline import runs_halves
from automoe.config.rule_engine import Scope, filled, holding, table
from automoe.config.schema import Config
from automoe.config.shipped import own_recipe
from automoe.errors import BackendError
from automoe.interop.torch_parts import missing_part

NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
# A sandbox may have a GPU's device file, such as nvidia0, and lack the driver's folder.
DEVICES = Path("/dev")
NEWEST_TORCH_TRIED = "2.15"
HALVES_SINCE_TORCH = "2.13"
MAX_CPU_RANKS_PER_CORE = 8  # with more, importing torch alone takes minutes


def torch_has_cuda() -> bool:
    """Return True if the installed torch is a CUDA build, according to its ``version.py``."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = Path(spec.origin).with_name("version.py").read_text()
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that this process may use.

    Without ``CUDA_VISIBLE_DEVICES`` it is the driver's number of GPUs, 0 without a driver. With
    it, entries count as CUDA reads them: up to the first that is -1, no GPU or of another kind
    (index, UUID, MIG) than the first entry; 0 if one occurs twice; at most one MIG device.
    """
    present = _present_gpus()
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return present
    prefix = next((kind for kind in ("GPU-", "MIG-") if chosen.strip().startswith(kind)), "")
    shown: list[int | str] = []
    for name in map(str.strip, chosen.split(",")):
        if not (name.startswith(prefix) if prefix else name.isdecimal()):
            break
        gpu = name if prefix else int(name)
        if gpu in shown:
            return 0
        shown.append(gpu)
    if prefix:
        return min(len(shown), 1) if prefix == "MIG-" else len(shown)
    return next((i for i, number in enumerate(shown) if int(number) >= present), len(shown))


def _present_gpus() -> int:
    listed = len(list(NVIDIA_DRIVER.iterdir())) if NVIDIA_DRIVER.is_dir() else 0
    return listed or sum(path.name[6:].isdecimal() for path in DEVICES.glob("nvidia*"))


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_device(config: Config) -> Device:
    """Return ``launch.device``; ``auto`` is cuda if a GPU is visible and torch is a CUDA build, else cpu."""
    if config.launch.device != "auto":
        return config.launch.device
    return "cuda" if visible_gpus() and torch_has_cuda() else "cpu"


def cpu_note(config: Config) -> str | None:
    """Return a note if ``launch.device=auto`` uses the CPU for want of a GPU, under a CUDA build of torch."""
    if config.launch.device != "auto" or _present_gpus() or not torch_has_cuda():
        return None
    return (
        f"note: launch.device=auto trains on the CPU: torch is a CUDA build, and no GPU is seen, neither in "
        f"{NVIDIA_DRIVER} nor as {DEVICES}/nvidia0. Make the driver visible, or set launch.device=cpu"
    )


def _release(installed: str) -> tuple[int, ...]:
    return tuple(map(int, installed.split(".")[:2]))


def torch_lacks(config: Config, shape: MeshShape) -> str:
    """Return why the installed torch cannot run ``config``; an empty string if it can.

    Zero-bubble schedules compute weight gradients apart from input gradients, in which torch 2.11
    fails at operations with a custom backward.
    """
    schedule = config.parallel.schedule
    installed = version("torch")
    split = shape.pp > 1 and runs_halves(schedule)
    if not split or _release(installed) >= _release(HALVES_SINCE_TORCH):
        return missing_part(config, shape, installed)
    return (
        f"parallel.schedule={schedule} runs backward passes in halves, which torch {installed} cannot do "
        f"with this model's operations. Install torch {HALVES_SINCE_TORCH} or later, or set "
        "parallel.schedule=Interleaved1F1B"
    )


def torch_note(installed: str) -> str | None:
    """Return a note if ``installed`` is newer than the newest torch tried with automoe."""
    if _release(installed) <= _release(NEWEST_TORCH_TRIED):
        return None
    return f"note: torch {installed} is newer than {NEWEST_TORCH_TRIED}, the newest that automoe was tried with"


def start_notes(config: Config) -> list[str]:
    """Return the notes that a run prints first, each a line that begins with ``note:``.

    They are about an untried torch, a fallback to the CPU, and a recipe of the user's own.
    """
    notes = [torch_note(version("torch")), cpu_note(config)]
    if recipe := own_recipe(config.recipe):
        # ``named_recipe`` made it absolute; only its name was typed.
        recipe_path = Path(config.recipe)
        notes.append(
            f"note: recipe={recipe_path.stem if recipe_path.is_absolute() else recipe_path} is {recipe}"
        )
    return list(filter(None, notes))


def default_num_ranks(config: Config, device: str) -> int | None:
    """Return the number of ranks of a run whose mesh has axes that are -1.

    The number is ``launch.num_ranks`` if that is set. Else ``mesh.preset`` gives one rank per GPU
    or core. Else it is the fewest ranks that the axes which are set allow, times the largest number
    for which this machine has enough GPUs or cores, at least 1. None if an axis of the mesh is
    invalid, or a preset finds no GPU.
    """
    if config.launch.num_ranks is not None:
        return config.launch.num_ranks
    here = visible_gpus() if device == "cuda" else num_cores()
    if config.mesh.preset:
        return here or None
    mesh = expand_preset(config.mesh, None)
    # -1, which is derived, counts as 1.
    attention = abs(mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp)
    experts = abs(mesh.ep_replicate * mesh.ep_shard * mesh.ep * mesh.etp)
    if not attention * experts:
        return None
    unit = mesh.pp * attention * experts // gcd(attention, experts)
    return max(here // unit, 1) * unit


def missing_hardware(shape: MeshShape, device: str, asked: int | None = None) -> str | None:
    """Return why this machine cannot hold the ranks of ``shape``; None if it can.

    Args:
        shape: resolved mesh.
        device: cuda, with one GPU per rank, or cpu, with at most 8 ranks per core.
        asked: ``launch.num_ranks``; this number of CPU ranks is allowed on any number of cores.
    """
    ranks = shape.world_size
    if device == "cuda":
        here = visible_gpus()
        if here and not torch_has_cuda():
            return (
                f"{ranks} CUDA ranks need a CUDA build of torch, and the installed one is for CPUs"
            )
        if ranks <= here:
            return None
        return f"{ranks} CUDA ranks need {ranks} GPUs, and this machine has {here}"
    limit = MAX_CPU_RANKS_PER_CORE * num_cores()
    if ranks <= limit or ranks == asked:
        return None
    return (
        f"{ranks} CPU ranks on {num_cores()} cores: at most {limit} are started, {MAX_CPU_RANKS_PER_CORE} a core. "
        f"launch.num_ranks={ranks} starts them anyway"
    )


# fmt: off
# Rows: two conditions, the setting that an error names, and what it needs or what to set instead.
_PACKAGES = table("""
observe.wandb != off | | observe.wandb={observe.wandb} | wandb | pip install wandb, or set observe.wandb=off
observe.tensorboard | | observe.tensorboard=true | tensorboard
    | pip install tensorboard, or set observe.tensorboard=false
observe.mlflow | | observe.mlflow | mlflow | pip install mlflow-skinny, or set observe.mlflow=''
observe.mlflow: facts.in_database | | observe.mlflow with a database | sqlalchemy
    | pip install mlflow, or name a server or a folder
moe.dispatcher == deepep | mesh.ep > 1 | moe.dispatcher=deepep | deep_ep
    | Build DeepEP from its sources (the release on the package index does not compile), or set moe.dispatcher=alltoall
lora.base == nf4 | | lora.base=nf4 | bitsandbytes | pip install bitsandbytes, or set lora.base=weights
kernels.attention == te | | kernels.attention=te | TE | INSTALL kernels.attention=sdpa
kernels.norm == te | | kernels.norm=te | TE | INSTALL kernels.norm=torch
moe.experts == te | model.num_moe_layers > 0 | moe.experts=te | TE | INSTALL moe.experts=grouped_mm
""", INSTALL="Install transformer-engine with its torch part for this CUDA, or set",
    # The Python part installs anywhere, but imports only together with the part built for torch.
    TE="transformer_engine transformer_engine_torch")
_CUDA_ONLY = table("""
launch.numa | launch.device != cuda
    | launch.numa=true takes the cores next to a rank's GPU; this run is on cpu. Set it to false
moe.dispatcher == deepep | launch.device != cuda and mesh.ep > 1
    | moe.dispatcher=deepep needs CUDA, and this run is on cpu. Set moe.dispatcher=alltoall
""")
# On CUDA norms and the gradient norm always launch Triton's kernels; on the CPU, torch's own
# operations do what no key asks of Triton.
_TRITON = table("""
kernels.rope == triton | | kernels.rope=triton | kernels.rope=torch
kernels.loss == triton | | kernels.loss=triton | kernels.loss=torch
moe.experts == triton | model.num_moe_layers > 0 | moe.experts=triton | moe.experts=grouped_mm
kernels.attention == flex | CUDA | kernels.attention=flex | kernels.attention=sdpa
train.fp8 != off | CUDA | train.fp8={train.fp8} | train.fp8=off
moe.dispatch_dtype == fp8 | CUDA and model.num_moe_layers > 0 | moe.dispatch_dtype=fp8 | moe.dispatch_dtype=auto
optim.master_weights == stochastic | CUDA | optim.master_weights=stochastic | optim.master_weights=float32
optim.moments == bfloat16 | CUDA | optim.moments=bfloat16 | optim.moments=float32
train.dtype != float64 | CUDA | launch.device=cuda | launch.device=cpu
""", CUDA="launch.device == cuda")
# fmt: on


def check_backends(config: Config, shape: MeshShape, device: str) -> None:
    """Raise ``BackendError`` if a package, compiler, part of torch or CUDA that ``config`` needs is missing."""
    if config.train.compile:
        _check_compiler("train.compile=true", device, "set train.compile=false")
    if why := torch_lacks(config, shape):
        raise BackendError(why)
    # mlflow-skinny cannot write to a database.
    in_database = re.match(r"(sqlite|postgresql|mysql|mssql)\b", config.observe.mlflow)
    see = Scope(config, shape, device).knowing(in_database=in_database)
    for _, _, why in holding(see, _CUDA_ONLY):
        raise BackendError(why)
    kernels = [(filled(see, said), instead) for _, _, said, instead in holding(see, _TRITON)]
    needed = [row[2:] for row in holding(see, _PACKAGES)]
    needed += [(said, "triton", f"Install triton, or set {instead}") for said, instead in kernels]
    for said, packages, how in needed:
        for package in packages.split():
            if importlib.util.find_spec(package) is None:
                raise BackendError(
                    f"{filled(see, said)}: the package {package} is not installed here. {how}"
                )
    for said, instead in kernels if device == "cuda" else ():
        _check_compiler(said, device, f"set {instead}")


def _check_compiler(key: str, device: str, remedy: str) -> None:
    """Raise ``BackendError`` without a compiler on the PATH or without Python's headers.

    Inductor needs them for its kernels on the CPU, and Triton for its launchers on CUDA. The
    variable CXX or CC may name the compiler.

    Args:
        key: setting that needs the compiler.
        remedy: what to set instead.
    """
    variable, names = ("CXX", ["g++"]) if device == "cpu" else ("CC", ["gcc", "clang"])
    compiler = os.environ.get(variable, "")
    try:
        names = shlex.split(compiler)[:1] or names
    except ValueError as error:
        raise BackendError(
            f"{key} on {device}: {variable}={compiler} is not a command ({error}). Correct it, or {remedy}"
        ) from None
    if not any(map(shutil.which, names)):
        raise BackendError(
            f"{key} on {device} compiles with {' or '.join(names)}, and there is none on the PATH. Install it, set "
            f"{variable} to another compiler, or {remedy}"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise BackendError(
            f"{key} compiles against Python's headers, and there is no {header}. Install them (Debian: python3-dev), "
            f"or {remedy}"
        )
