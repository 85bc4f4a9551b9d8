"""Set-up and end of one rank's process group, and the store where ranks of a machine meet."""

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


# These variables make gloo and NCCL listen on loopback only, for ranks of one machine.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the latter is the older name


class Imports(NamedTuple):
    """Outcome of importing torch and automoe in the fork server, which hands it to every rank.

    Attributes:
        error: exception that the rank must report; None if the imports succeeded.
        output: text that the imports wrote to standard error.
    """

    error: BaseException | None = None
    output: str = ""


NOT_IMPORTED = Imports()


def prepare_process() -> None:
    """Set the allocator's environment and the file limit of a rank, before torch is imported.

    The CUDA allocator gets expandable segments, unless the environment sets its options: sizes that
    change with every step's routing would fragment fixed segments. The limit of open files rises to
    what the system allows: gloo's full meshes take two file descriptors per rank.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_system() -> None:
    """Raise ``LaunchError`` if this machine does not run Linux, which ranks need."""
    if sys.platform != "linux":
        raise LaunchError(
            f"ranks run on Linux, and this is {sys.platform}. Start the same command in a Linux container or virtual "
            "machine; automoe plan works here"
        )


@contextmanager
def store_file() -> Iterator[Path]:
    """Yield the path of an empty in-memory file, for the ``FileStore`` of child processes (Linux).

    A ``TCPStore`` listens on all interfaces without authentication, and torch unpickles what the
    store delivers. This file has no name in any folder, only processes of the same user can open
    it, and it vanishes with this process, even a killed one.
    """
    with open(os.memfd_create("automoe-store"), "rb") as file:
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def init_ranks(
    launch: LaunchConfig, rank: int, world_size: int, local_rank: int, store: Store | Path | None
) -> torch.device:
    """Join the process group (gloo on the CPU, NCCL and gloo on CUDA), and return the device.

    Args:
        launch: gives the resolved device, the timeout of collectives until the first step is over,
            the threads per rank, and ``numa``: bind to the CPU cores next to the GPU.
        local_rank: rank on this node.
        store: store where ranks meet. A path is the file of a ``FileStore``; None uses torch's
            ``env://``.

    Raises:
        LaunchError: ``launch.numa`` is set and no usable CPU core is next to the GPU.
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
        device = torch.device("cpu")
        backend = "gloo"
        keep_freed_memory()
    if isinstance(store, Path):
        store = dist.FileStore(str(store), world_size)
        store.set_timeout(timeout)
    # If the process group is bound to a device, NCCL makes groups by splitting the world's
    # communicator, and uses one communicator for all sends of a pipeline instead of one for each
    # pair of ranks.
    bound = device if launch.device == "cuda" else None
    dist.init_process_group(backend, None, timeout, world_size, rank, store, device_id=bound)
    return device


def keep_freed_memory() -> None:
    """Make glibc's malloc reuse freed blocks of up to 1 GiB.

    By default malloc maps blocks of 32 MiB and more afresh at every call, and each page then costs
    a page fault: 4 to 8% of a step on the CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack mallopt
    for option in (-1, -3) if mallopt is not None else ():  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(option, 1 << 30)


def device_index(local_rank: int, visible: int) -> int:
    """Return a rank's CUDA device index: ``local_rank``, or 0 if the process sees only one device.

    Args:
        visible: number of devices that it sees, 1 under ``srun --gpus-per-task=1``.
    """
    return 0 if visible == 1 else local_rank


def bind_near(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Bind this thread, and threads that it starts, to the usable CPU cores next to a device.

    Args:
        pci_address: address of the device, such as ``0000:17:00.0``.
        devices: sysfs folder of PCI devices.

    Raises:
        LaunchError: the system does not list the cores next to the device, or this process may use
            none of them.
    """
    try:
        listed = (devices / pci_address / "local_cpulist").read_text().strip()
        ranges = [[int(end) for end in part.split("-")] for part in listed.split(",")]
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"launch.numa=true: no list of CPU cores next to {pci_address}: {error}. Set it to false"
        ) from None
    cores = {core for first, *last in ranges for core in range(first, (last or [first])[0] + 1)}
    if not (usable := cores & os.sched_getaffinity(0)):
        raise LaunchError(
            f"launch.numa=true: cores {listed} are next to {pci_address}, and this process may use none. Set it to "
            "false, or give every task the cores next to its GPU"
        )
    os.sched_setaffinity(0, usable)


def close_ranks() -> None:
    """Wait for all ranks and destroy the process group, after a run that ended well. Collective."""
    import torch.distributed as dist

    from automoe.interop.deepep import close_deepep

    if dist.is_initialized():
        close_deepep()
        dist.barrier()  # no rank closes its sockets while another still reads from them
        dist.destroy_process_group()
