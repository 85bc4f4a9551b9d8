"""gloo groups with one worker thread, because two of them corrupt the heap.

A gloo group of torch 2.11 to 2.13 runs its collectives on two threads. Each writes the name of what it
finished into one ``std::string`` of the group's status, outside the lock. When a rank posts a collective
the moment the last one has completed, both threads are there at once: a name too long for the string's own
buffer (``ALLGATHER_COALESCED``, which DTensor's all-gather is) is freed twice, and the process dies of
``free(): invalid pointer`` some time later. Collectives of a group run in the order in which they were
posted anyway, so a second thread has little to offer.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

_Gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)


class _OneWorker(type):
    """Stands for torch's class where groups are made and recognised; what it makes is torch's own object."""

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = _Gloo._Options()
        options._threads = 1
        options._timeout = timeout
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options._devices = [_Gloo.create_device(interface=name) for name in interfaces] or [
            _Gloo.create_default_device()
        ]
        return _Gloo(store, rank, size, options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Gloo, name)


class OneWorkerGloo(metaclass=_OneWorker):
    """``ProcessGroupGloo`` with one thread."""


def use_one_worker() -> None:
    """Every gloo group made from now on has one worker thread. Call it before ``init_process_group``."""
    if _Gloo is not None:
        vars(distributed_c10d)["ProcessGroupGloo"] = OneWorkerGloo
