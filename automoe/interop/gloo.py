"""gloo groups with one worker thread, because two of them corrupt the heap.

A gloo group of torch 2.11 to 2.15 runs its collectives on two threads. Each writes the name of the collective that
it finished into one ``std::string`` of the group's status, outside the lock. If a rank posts a collective at the moment
the last one completes, both threads write at once. A name too long for the string's own buffer
(``ALLGATHER_COALESCED``, used by DTensor's all-gather) is then freed twice, and some time later the process dies with
``free(): invalid pointer``. Collectives of a group run in the order in which they were posted anyway, so a second
thread gains little.
"""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from automoe.errors import LaunchError

_Gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)


class _OneWorker(type):
    """Replaces torch's class where groups are made and recognised; its objects are torch's own."""

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> Any:
        options = _Gloo._Options()
        options._threads = 1
        options._timeout = min(timeout, OneWorkerGloo.making_timeout)  # a DeviceMesh's groups have half an hour
        for name, value in others.items():  # of newer releases, whose options have them: enable_reconfigure
            setattr(options, name, value)
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        lazy = OneWorkerGloo.lazy
        try:
            named = [_Gloo.create_device(interface=name, lazy_init=lazy) for name in interfaces]
            options._devices = named or [_Gloo.create_default_device(lazy_init=lazy)]
            group = _Gloo(store, rank, size, options)
        except RuntimeError as error:
            if "Too many open files" not in str(error):
                raise
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise LaunchError(
                f"a group of {size} ranks takes two open files a rank, beyond the {most} allowed. Set ulimit -Hn 65536"
            ) from None
        group._set_default_timeout(timeout)
        return group

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Gloo, name)


class OneWorkerGloo(metaclass=_OneWorker):
    """``ProcessGroupGloo`` with one thread."""

    lazy = False
    making_timeout = timedelta.max


def use_one_worker(lazy: bool = False, making_timeout: timedelta = timedelta.max) -> None:
    """Every gloo group made from now on has one worker thread. Call it before ``init_process_group``.

    Args:
        lazy: ranks connect when they first send each other something, and not all to all when a group is made.
        making_timeout: after which ranks give up that wait for others to make a group with.
    """
    OneWorkerGloo.lazy, OneWorkerGloo.making_timeout = lazy, making_timeout
    if _Gloo is not None:
        vars(distributed_c10d)["ProcessGroupGloo"] = OneWorkerGloo
