"""Functions run as gloo ranks of one machine, in processes that serve many calls: torch is imported
once for all.

The processes are forks of a ``ForkServer``. Each case gets a process group of its own, on an empty
store, and loses it afterwards together with every cache that remembers a mesh: a mesh left behind
costs dozens of file descriptors and threads a rank, and an equal mesh of a later case would be
answered with the earlier one's dead groups.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import itertools
import math
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from automoe.config.schema import LaunchConfig
from automoe.launch.fork_server import ForkedRank, ForkServer, Job
from automoe.launch.ranks import LOOPBACK, Imports, check_system, init_ranks, store_file
from automoe.launch.worker import STOP_SIGNALS

# from the end of a process until the server has reported it, with room for a busy machine
_DEATH_NOTICE_S = 0.5
_STACKS_S = 2.0  # for a rank that hangs to write its threads' stacks
_PAUSE_S = 0.01  # between two looks at the ranks
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class RankError(RuntimeError):
    """A rank of a case raised, died or did not answer in time.

    Attributes:
        rank: the rank whose failure was seen first, or the lowest one that is still busy.
        kind: name of the exception type on that rank; ``died`` or ``timeout`` if it raised none.
    """

    def __init__(self, rank: int, kind: str, message: str) -> None:
        self.rank, self.kind = rank, kind
        super().__init__(message)


class RankPool:
    """Up to ``max_ranks`` processes that run functions as ranks of a gloo world.

    Args:
        max_ranks: largest world; the processes start with the first case.
        timeout_s: a case that takes longer is a hang: its ranks are killed and named. A safety net,
            so it is far above what any case needs.
    """

    def __init__(self, max_ranks: int = 16, timeout_s: float = 600.0) -> None:
        check_system()
        self.max_ranks, self.timeout_s = max_ranks, timeout_s
        self._server: ForkServer | None = None
        self._ranks: list[ForkedRank] = []
        self._pipes: list[connection.Connection] = []
        self._files = contextlib.ExitStack()
        # A store that outlives its case reads its file once more when it is destroyed. If another
        # case has written there, that read never ends. So each case has a file of its own.
        self._stores = Path(self._files.enter_context(TemporaryDirectory(prefix="automoe-ranks-")))
        self._cases = itertools.count()
        self._stacks = self._files.enter_context(store_file())
        atexit.register(self.close)

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ranks 0..world_size-1 and return their results in rank
        order.

        ``fn`` is a function of a module (not a closure: ranks import it), called with
        ``torch.distributed`` initialised for exactly ``world_size`` gloo ranks, seed 0, float32 as
        the default dtype and one CPU thread. Results travel as pickles: return local tensors, not
        DTensors.

        Raises:
            RankError: the first failure among the ranks, with its traceback; the pool starts
                afresh.
        """
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(f"world_size={world_size}: this pool has 1 to {self.max_ranks} ranks")
        payload = pickle.dumps((fn, args, kwargs))
        store = self._stores / str(next(self._cases))
        try:
            self._start()
            pipes = self._pipes[:world_size]
            for pipe in pipes:
                # callers may have added directories to sys.path since: ranks import from them too
                pipe.send((store, world_size, sys.path, self.timeout_s))
                pipe.send_bytes(payload)
            results = self._gather(pipes)
            # only now may groups go: a peer could still be reading from this rank
            for pipe in pipes:
                pipe.send("release")
            self._gather(pipes)
        except BaseException:
            self._end_ranks()
            raise
        return [pickle.loads(result) for result in results]

    def close(self) -> None:
        """Kill the ranks and their server. The next ``run`` starts new ones."""
        self._end_ranks()
        if self._server is not None:
            self._server.close()
        self._server = None

    def _start(self) -> None:
        """Start all ranks, unless they run, and wait until they have their processes."""
        if self._ranks:
            return
        self._server = self._server or ForkServer(os.environ | _THREADS)
        self._pipes, theirs = map(list, zip(*[Pipe() for _ in range(self.max_ranks)], strict=True))
        job = Job(_work, self.max_ranks, {"stacks": self._stacks}, sys.path)
        self._ranks = self._server.start(job, files=[pipe.fileno() for pipe in theirs])
        for pipe in theirs:
            pipe.close()
        while any([rank.poll() is None and rank.pid is None for rank in self._ranks]):
            time.sleep(_PAUSE_S)

    def _end_ranks(self) -> None:
        """Kill the ranks, and wait until they have gone."""
        for rank in self._ranks:
            rank.kill()
        while any([rank.poll() is None for rank in self._ranks]):
            time.sleep(_PAUSE_S)
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes = [], []

    def _gather(self, pipes: Sequence[connection.Connection]) -> list[bytes]:
        """Return one successful answer from each rank, or raise the first failure."""
        deadline = time.monotonic() + self.timeout_s
        answers: dict[int, bytes] = {}
        while len(answers) < len(pipes):
            busy = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
            ready = connection.wait(list(busy), max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = list(busy.values())
                text = f"ranks {ranks} of {len(pipes)} did not finish in {self.timeout_s} s"
                raise RankError(
                    ranks[0], "timeout", f"{text}\n{self._stacks_of(self._ranks[ranks[0]])}"
                )
            for pipe, rank in busy.items():
                if pipe not in ready:
                    continue
                try:
                    kind, body = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._raise_death(len(pipes), math.inf)
                if kind is not None:
                    # A rank that dies makes its peers raise, and they may be heard first.
                    self._raise_death(len(pipes), _DEATH_NOTICE_S)
                    raise RankError(rank, kind, f"rank {rank} of {len(pipes)} raised\n{body}")
                answers[rank] = body
        return [answers[rank] for rank in range(len(pipes))]

    def _raise_death(self, world_size: int, patience_s: float) -> None:
        """Raise ``RankError`` if one of the ranks is dead, or dies within ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            for number, rank in enumerate(self._ranks[:world_size]):
                if (status := rank.poll()) is not None:
                    raise RankError(number, "died", f"rank {number} died with exit code {status}")
            time.sleep(_PAUSE_S)

    def _stacks_of(self, rank: ForkedRank) -> str:
        """Return the stacks of the threads of a rank that hangs; empty if it does not even write
        these."""
        os.truncate(self._stacks, 0)
        rank.send_signal(signal.SIGUSR1)
        deadline, text = time.monotonic() + _STACKS_S, ""
        while time.monotonic() < deadline and (not text or text != self._stacks.read_text()):
            text = self._stacks.read_text()
            time.sleep(0.1)
        return text


def _work(rank: int, world_size: int, imports: Imports, file: int, stacks: Path) -> NoReturn:
    """Run cases in this rank until it is killed. SIGUSR1 has it write the stacks of its threads
    into ``stacks``."""
    if imports.error is not None:
        raise imports.error
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    faulthandler.register(signal.SIGUSR1, stacks.open("a"))
    from automoe.interop.torch_private import cached_functions

    gc.unfreeze()  # the server's imports are frozen, and their caches are looked for here
    imported = cached_functions()
    gc.freeze()  # what is imported by now stays: leave it out of the collection after each case
    pipe = connection.Connection(file)
    while True:
        store, world_size, path, timeout_s = pipe.recv()
        payload = pipe.recv_bytes()
        sys.path[:] = path
        try:
            _join_world(store, rank, world_size, timeout_s)
            fn, args, kwargs = pickle.loads(payload)
            answer = pickle.dumps(fn(*args, **kwargs))
        except BaseException as error:  # handed to the caller, which ends this process
            pipe.send((type(error).__name__, traceback.format_exc()))
            continue
        pipe.send((None, answer))
        pipe.recv()
        del answer, payload, fn, args, kwargs
        leave_world(imported)
        pipe.send((None, b""))


def _join_world(store: Path, rank: int, world_size: int, timeout_s: float) -> None:
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    os.environ.update(LOOPBACK, WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    launch = LaunchConfig(device="cpu", init_timeout_s=math.ceil(timeout_s), threads_per_rank=1)
    init_ranks(launch, rank, world_size, rank, store)


def leave_world(imported_caches: list[Any]) -> None:
    """Destroy every process group of this process, with all that remembers a mesh.

    ``imported_caches`` are those of ``torch_private.cached_functions()`` that a ``gc.freeze()`` has
    hidden since.
    """
    import torch.distributed as dist

    from automoe.interop.torch_private import forget_meshes

    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes(imported_caches)
