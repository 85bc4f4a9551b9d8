"""gloo groups with one worker thread, because two of them corrupt the heap.

A gloo group of torch 2.11 to 2.15 runs its collectives on two threads. Each thread writes the name
of the collective that it finished into one ``std::string`` of the group's status, outside the lock.
If a rank posts a collective when the last one completes, both threads may write at once. A name too
long for the string's own buffer (``ALLGATHER_COALESCED``, used by DTensor's all-gather) is then
freed twice, and some time later the process dies with ``free(): invalid pointer``. Collectives of a
group run in the order in which they were posted anyway, so a second thread gains little.
"""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from typing import Any

from automoe.errors import LaunchError
from automoe.interop.torch_private import Gloo, gloo_group, replace_gloo


class _OneWorker(type):
    """Metaclass of ``OneWorkerGloo``: a call makes a gloo group of torch with one worker thread.

    ``isinstance`` is True for every gloo group, and other attributes are torch's.
    """

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> Any:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        lazy = OneWorkerGloo.lazy
        # the timeout of a DeviceMesh's groups is half an hour, too long to connect
        making = min(timeout, OneWorkerGloo.making_timeout)
        try:
            devices = [Gloo.create_device(interface=name, lazy_init=lazy) for name in interfaces]
            devices = devices or [Gloo.create_default_device(lazy_init=lazy)]
            return gloo_group(store, rank, size, devices, making, timeout, **others)
        except RuntimeError as error:
            if "Too many open files" not in str(error):
                raise
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise LaunchError(
                f"a group of {size} ranks takes two open files a rank, beyond the {most} allowed. Set ulimit -Hn 65536"
            ) from None

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(Gloo, name)


class OneWorkerGloo(metaclass=_OneWorker):
    """Replacement of torch's ``ProcessGroupGloo``: its groups have one worker thread."""

    lazy = False
    making_timeout = timedelta.max


def use_one_worker(lazy: bool = False, making_timeout: timedelta = timedelta.max) -> None:
    """Give every gloo group made from now on one worker thread.

    Call this function before ``init_process_group``.

    Args:
        lazy: connect ranks when they first communicate, not all to all when a group is made.
        making_timeout: time after which a rank stops waiting for its peers to make a group.
    """
    OneWorkerGloo.lazy = lazy
    OneWorkerGloo.making_timeout = making_timeout
    replace_gloo(OneWorkerGloo)
