"""One pool of gloo ranks that serves many calls, so that torch is imported once and not once a call.

Workers fork from a server that has torch imported. Each case gets a process group of its own, on an empty
store, and loses it afterwards together with every cache that remembers a mesh: a mesh left behind
costs dozens of file descriptors and threads a rank, and an equal mesh of a later case would be answered
with the earlier one's dead groups.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from automoe.config.schema import LaunchConfig
from automoe.launch.ranks import LOOPBACK, check_system, init_ranks, store_file

_PRELOAD = ["torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.distributed.pipelining"]
_DEATH_NOTICE_S = 0.5  # from a process' end to its sentinel, with room for a busy machine
_STACKS_S = 2.0  # for a rank that hangs to write its threads' stacks
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class RankError(RuntimeError):
    """A rank of a case raised, died or did not answer in time.

    Attributes:
        rank: the rank whose failure was seen first, or the lowest one that is still busy.
        kind: name of the exception type on that rank; ``died`` or ``timeout`` where it raised none.
    """

    def __init__(self, rank: int, kind: str, message: str) -> None:
        self.rank, self.kind = rank, kind
        super().__init__(message)


@dataclass
class _Worker:
    process: Any
    pipe: connection.Connection


class RankPool:
    """Up to ``max_ranks`` processes that run functions as ranks of a gloo world.

    Args:
        max_ranks: largest world; workers start when a case first needs them.
        timeout_s: a case that takes longer is a hang: its ranks are killed and named. A safety net, so it
            is far above what any case needs.
    """

    def __init__(self, max_ranks: int = 16, timeout_s: float = 600.0) -> None:
        self.max_ranks, self.timeout_s = max_ranks, timeout_s
        self._workers: list[_Worker] = []
        self._files = contextlib.ExitStack()
        check_system()
        # A store that outlives its case reads its file once more when it is destroyed. If another case has written
        # there, that read never ends. So each case has a file of its own.
        self._stores = Path(self._files.enter_context(TemporaryDirectory(prefix="automoe-ranks-")))
        self._cases = itertools.count()
        self._stacks = self._files.enter_context(store_file())
        atexit.register(self.close)

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ranks 0..world_size-1 and return their results in rank order.

        ``fn`` is a function of a module (not a closure: ranks import it), called with
        ``torch.distributed`` initialised for exactly ``world_size`` gloo ranks, seed 0, float32 as the
        default dtype and one CPU thread. Results travel as pickles: return local tensors, not DTensors.

        Raises:
            RankError: the first failure among the ranks, with its traceback; the pool starts afresh.
        """
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(f"world_size={world_size}: this pool has 1 to {self.max_ranks} ranks")
        payload = pickle.dumps((fn, args, kwargs))
        self._start(world_size)
        store = self._stores / str(next(self._cases))
        workers = self._workers[:world_size]
        try:
            for rank, worker in enumerate(workers):
                # callers may have added directories to sys.path since: ranks import from them too
                worker.pipe.send((store, rank, world_size, sys.path, self.timeout_s))
                worker.pipe.send_bytes(payload)
            results = self._gather(workers)
            for worker in workers:  # only now may groups go: a peer could still be reading from this rank
                worker.pipe.send("release")
            self._gather(workers)
        except BaseException:
            self.close()
            raise
        return [pickle.loads(result) for result in results]

    def close(self) -> None:
        """Kill the workers. The next ``run`` starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()

    def _start(self, world_size: int) -> None:
        """See that there are enough workers."""
        context = multiprocessing.get_context("forkserver")
        if len(self._workers) < world_size:
            before = {name: os.environ.get(name) for name in _THREADS}
            os.environ.update(_THREADS)
            context.set_forkserver_preload(_PRELOAD)
            # Ctrl-C is for the caller: blocked, it does not end the server in the middle of its imports.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            forkserver.ensure_running()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        for index in range(len(self._workers), world_size):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self._stacks), name=f"rank-{index}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, pipe))

    def _gather(self, workers: list[_Worker]) -> list[bytes]:
        """One successful answer from each worker, or the first failure."""
        deadline = time.monotonic() + self.timeout_s
        answers: dict[int, bytes] = {}
        while len(answers) < len(workers):
            busy = {workers[rank].pipe: rank for rank in range(len(workers)) if rank not in answers}
            ready = connection.wait(list(busy), max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = list(busy.values())
                text = f"ranks {ranks} of {len(workers)} did not finish in {self.timeout_s} s"
                raise RankError(ranks[0], "timeout", f"{text}\n{self._stacks_of(workers[ranks[0]])}")
            for rank in [rank for pipe, rank in busy.items() if pipe in ready]:
                try:
                    kind, body = workers[rank].pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise _death(rank, workers[rank]) from None
                if kind is not None:
                    # A rank that dies makes its peers raise, and they may be heard first.
                    processes = {worker.process.sentinel: r for r, worker in enumerate(workers)}
                    for sentinel in connection.wait(list(processes), _DEATH_NOTICE_S):
                        raise _death(processes[sentinel], workers[processes[sentinel]])
                    raise RankError(rank, kind, f"rank {rank} of {len(workers)} raised\n{body}")
                answers[rank] = body
        return [answers[rank] for rank in range(len(workers))]

    def _stacks_of(self, worker: _Worker) -> str:
        """What the threads of a worker that hangs are at; empty if it does not even say that."""
        os.truncate(self._stacks, 0)
        os.kill(worker.process.pid, signal.SIGUSR1)
        deadline, text = time.monotonic() + _STACKS_S, ""
        while time.monotonic() < deadline and (not text or text != self._stacks.read_text()):
            text = self._stacks.read_text()
            time.sleep(0.1)
        return text


def _death(rank: int, worker: _Worker) -> RankError:
    worker.process.join()
    return RankError(rank, "died", f"rank {rank} died with exit code {worker.process.exitcode}")


def _work(pipe: connection.Connection, stacks: Path) -> None:
    """One worker: cases until the pipe closes. SIGUSR1 has it write the stacks of its threads into ``stacks``."""
    faulthandler.register(signal.SIGUSR1, stacks.open("a"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who then closes the pool
    threading.Thread(target=_die_with_parent, daemon=True).start()
    from automoe.interop.torch_private import cached_functions

    imported = cached_functions()
    gc.freeze()  # what is imported by now stays: leave it out of the collection after each case
    while True:
        try:
            store, rank, world_size, path, timeout_s = pipe.recv()
        except EOFError:
            return
        payload = pipe.recv_bytes()
        sys.path[:] = path
        try:
            _join_world(store, rank, world_size, timeout_s)
            fn, args, kwargs = pickle.loads(payload)
            answer = pickle.dumps(fn(*args, **kwargs))
        except BaseException as error:  # handed to the parent, which ends this process
            pipe.send((type(error).__name__, traceback.format_exc()))
            continue
        pipe.send((None, answer))
        pipe.recv()
        del answer, payload, fn, args, kwargs
        leave_world(imported)
        pipe.send((None, b""))


def _die_with_parent() -> None:
    """A rank that hangs in a collective would otherwise outlive a killed caller."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join_world(store: Path, rank: int, world_size: int, timeout_s: float) -> None:
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    os.environ.update(LOOPBACK, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    launch = LaunchConfig(device="cpu", init_timeout_s=math.ceil(timeout_s), threads_per_rank=1)
    init_ranks(launch, rank, world_size, rank, store)


def leave_world(imported_caches: list[Any]) -> None:
    """Destroy every process group of this process, with all that remembers a mesh.

    ``imported_caches`` are those of ``torch_private.cached_functions()`` that a ``gc.freeze()`` has hidden since.
    """
    import torch.distributed as dist

    from automoe.interop.torch_private import forget_meshes

    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes(imported_caches)
