"""Where ranks of one machine meet, and the process group's beginning and end on one rank."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from automoe.config.schema import LaunchConfig
from automoe.errors import LaunchError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store


# Of the environment of ranks of one machine: gloo and NCCL listen on loopback alone.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the latter is the older name


class Imports(NamedTuple):
    """The outcome of importing torch for a rank: an error, which the rank reports, and output to
    standard error."""

    error: BaseException | None = None
    output: str = ""


NOT_IMPORTED = Imports()


def prepare_process() -> None:
    """What a rank needs of its process; called before torch is imported.

    Segments of the CUDA allocator that grow, since sizes that change with every step's routing
    would leave holes; the environment may say otherwise. And as many open files as the system
    allows: gloo's full meshes take two a rank.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_system() -> None:
    """Raise ``LaunchError`` where this machine has no processes as ranks need them: it runs no
    Linux."""
    if sys.platform != "linux":
        raise LaunchError(
            f"ranks run on Linux, and this is {sys.platform}. Start the same command in a Linux container or virtual "
            "machine; automoe plan works here"
        )


@contextmanager
def store_file() -> Iterator[Path]:
    """Path of an empty file in the memory of this process, for the ``FileStore`` of its children
    (Linux).

    A ``TCPStore`` listens on all interfaces and asks nobody who he is, and torch unpickles what it
    delivers. This file has no name; only processes of the same user can open it, and it is gone
    with this process, however that ends.
    """
    with open(os.memfd_create("automoe-store"), "rb") as file:
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def init_ranks(
    launch: LaunchConfig, rank: int, world_size: int, local_rank: int, store: Store | Path | None
) -> torch.device:
    """Pick this rank's device and join the process group: gloo on the CPU, NCCL and gloo on CUDA.

    Args:
        launch: device (resolved), timeout of collectives until the first step is over, threads per
            rank.
        store: where ranks meet; a path is that of a ``FileStore``'s file, None takes torch's
            ``env://``.
    """
    import torch
    import torch.distributed as dist

    from automoe.interop.gloo import use_one_worker

    timeout = timedelta(seconds=launch.init_timeout_s)
    use_one_worker(launch.device == "cuda", timeout)
    if launch.threads_per_rank:
        torch.set_num_threads(launch.threads_per_rank)
    if launch.device == "cuda":
        device = torch.device("cuda", device_index(local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        if launch.numa:
            facts = torch.cuda.get_device_properties(device)
            bind_near(
                f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
            )
        # Metadata, stop flags and pickled objects travel over gloo, without a device copy.
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
        keep_freed_memory()
    if isinstance(store, Path):
        store = dist.FileStore(str(store), world_size)
        store.set_timeout(timeout)
    # Bound to a device, NCCL makes groups by splitting the world's, and one for all sends of a
    # pipeline in place of one for each pair of ranks.
    bound = device if launch.device == "cuda" else None
    dist.init_process_group(backend, None, timeout, world_size, rank, store, device_id=bound)
    return device


def keep_freed_memory() -> None:
    """Let glibc's malloc serve up to a GiB again from what was freed.

    It maps 32 MiB and more afresh at every call, and each page is then faulted in: 4 to 8% of a
    step on the CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    for option in (-1, -3) if mallopt is not None else ():  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(option, 1 << 30)


def device_index(local_rank: int, visible: int) -> int:
    """CUDA device of a rank that sees ``visible`` of them.

    ``srun --gpus-per-task=1`` shows every task its own GPU alone, as device 0 whatever its place on
    the node.
    """
    return 0 if visible == 1 else local_rank


def bind_near(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Bind this thread, and those that it starts, to the CPU cores next to a device that it may
    use.

    Raises:
        LaunchError: the system does not say which they are, or the process may use none of them.
    """
    try:
        listed = (devices / pci_address / "local_cpulist").read_text().strip()
        ranges = [[int(end) for end in part.split("-")] for part in listed.split(",")]
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"launch.numa=true: no list of CPU cores next to {pci_address}: {error}. Set it false"
        ) from None
    cores = {core for first, *last in ranges for core in range(first, (last or [first])[0] + 1)}
    if not (usable := cores & os.sched_getaffinity(0)):
        raise LaunchError(
            f"launch.numa=true: cores {listed} are next to {pci_address}, and this process may use none. Set it "
            "false, or give every task the cores next to its GPU"
        )
    os.sched_setaffinity(0, usable)


def close_ranks() -> None:
    """Leave the process group after a run that ended well on every rank."""
    import torch.distributed as dist

    from automoe.interop.deepep import close_deepep

    if dist.is_initialized():
        close_deepep()
        dist.barrier()  # no rank closes its sockets while another still reads from them
        dist.destroy_process_group()
