"""Pool of ranks on one machine, over gloo or NCCL, that run one function after another.

The ranks are forks of a ``ForkServer``, so torch is imported once for all of them. Each case (one
function call) gets a new process group on an empty store. After the case the group is destroyed and
every cache that holds a mesh is cleared: a mesh left behind costs dozens of file descriptors and
threads per rank, and a later case with an equal mesh would get the dead groups of the earlier one.
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
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from automoe.config.frozen import Device
from automoe.config.schema import LaunchConfig
from automoe.launch.fork_server import ForkedRank, ForkServer, Job
from automoe.launch.ranks import LOOPBACK, Imports, check_system, init_ranks, store_file
from automoe.launch.worker import STOP_SIGNALS

# Time until the server has reported the end of a process, with room for a busy machine.
_DEATH_NOTICE_S = 0.5
_STACKS_S = 2.0  # time for a hanging rank to write the stacks of its threads
_PAUSE_S = 0.01  # pause between two looks at the ranks
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_WORLD_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


class RankError(RuntimeError):
    """Error of ``RankPool.run`` if a rank raised, died or did not answer in time.

    Attributes:
        rank: rank whose failure was seen first; after a timeout the lowest rank that is still busy.
        kind: name of the exception type on that rank; ``died`` or ``timeout`` without an exception.
    """

    def __init__(self, rank: int, kind: str, message: str) -> None:
        self.rank = rank
        self.kind = kind
        super().__init__(message)


@dataclass(eq=False)
class RankPool:
    """Pool of ``max_ranks`` processes that run functions as ranks of one world.

    Args:
        max_ranks: largest world size; the processes start with the first call of ``start`` or ``run``.
        device: cpu (gloo) or cuda (one GPU per rank, NCCL and gloo).
        timeout_s: seconds after which a call counts as hanging: its ranks are killed and named. The
            value is a safety net, far above the duration of any call.
    """

    max_ranks: int = 16
    timeout_s: float = 600.0
    device: Device = "cpu"

    def __post_init__(self) -> None:
        check_system()
        self._server: ForkServer | None = None
        self._ranks: list[ForkedRank] = []
        self._pipes: Sequence[connection.Connection] = []
        self._files = contextlib.ExitStack()
        # A store that outlives its case reads its file once more when it is destroyed, and this
        # read never ends if another case has written to the file. So each case has its own file.
        self._stores = Path(self._files.enter_context(TemporaryDirectory(prefix="automoe-ranks-")))
        self._cases = itertools.count()
        self._stacks = self._files.enter_context(store_file())
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any] | str, world_size: int, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks; return the results in rank order.

        During the call ``torch.distributed`` is initialised for exactly ``world_size`` ranks, the
        seed is 0, the default dtype float32, and each rank has one CPU thread. Results travel
        as pickles, so ``fn`` must return local tensors, not DTensors.

        Args:
            fn: module-level function, not a closure, because ranks import it; or its name as
                ``module:function``, which this process then does not import.

        Raises:
            RankError: a rank failed; the error has the first failure and its traceback. The next
                call starts new ranks.
            ValueError: see ``start``.
        """
        self.start(world_size)
        payload = pickle.dumps((fn, args, kwargs))
        store = self._stores / str(next(self._cases))
        try:
            pipes = self._pipes[:world_size]
            for pipe in pipes:
                # Ranks import ``fn``, and callers may have extended sys.path since ranks started.
                pipe.send((store, world_size, sys.path, self.device, self.timeout_s))
                pipe.send_bytes(payload)
            results = self._gather(pipes)
            # A rank may destroy its groups only now: until here a peer could still read from it.
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

    def start(self, world_size: int) -> None:
        """Start the ranks unless they run, and wait until their processes exist.

        Args:
            world_size: largest world size of the calls that follow. A subclass may restart its ranks
                to have more of them, and what a rank keeps for a later call is then lost.

        Raises:
            ValueError: ``world_size`` is not within 1 and ``max_ranks``.
        """
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(f"world_size={world_size}: this pool has 1 to {self.max_ranks} ranks")
        if self._ranks:
            return
        self._server = self._server or ForkServer(os.environ | _THREADS)
        self._pipes, theirs = zip(*(Pipe() for _ in range(self.max_ranks)), strict=True)
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
        self._ranks = []
        self._pipes = []

    def _gather(self, pipes: Sequence[connection.Connection]) -> list[bytes]:
        """Return each rank's pickled answer; raise ``RankError`` for the first failure, or after ``timeout_s``."""
        deadline = time.monotonic() + self.timeout_s
        answers: dict[int, bytes] = {}
        while len(answers) < len(pipes):
            busy = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
            ready = connection.wait(list(busy), max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = list(busy.values())
                text = f"ranks {ranks} of {len(pipes)} did not finish in {self.timeout_s} s"
                os.truncate(self._stacks, 0)
                self._ranks[ranks[0]].send_signal(signal.SIGUSR1)
                until = time.monotonic() + _STACKS_S
                stacks = ""  # of the rank's threads; empty if the rank does not write them
                while time.monotonic() < until and not (
                    stacks and stacks == self._stacks.read_text()
                ):
                    stacks = self._stacks.read_text()
                    time.sleep(0.1)
                raise RankError(ranks[0], "timeout", f"{text}\n{stacks}")
            for pipe, rank in busy.items():
                if pipe not in ready:
                    continue
                try:
                    kind, body = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._raise_death(len(pipes), math.inf)
                if kind:
                    # A rank that dies makes its peers raise, and their errors may arrive first.
                    self._raise_death(len(pipes), _DEATH_NOTICE_S)
                    raise RankError(rank, kind, f"rank {rank} of {len(pipes)} raised\n{body}")
                answers[rank] = body
        return [answers[rank] for rank in range(len(pipes))]

    def _raise_death(self, world_size: int, patience_s: float) -> None:
        """Raise ``RankError`` if one of ranks 0 to ``world_size - 1`` is dead or dies in ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            for number, rank in enumerate(self._ranks[:world_size]):
                if (status := rank.poll()) is not None:
                    raise RankError(number, "died", f"rank {number} died with exit code {status}")
            time.sleep(_PAUSE_S)


def _work(rank: int, world_size: int, imports: Imports, file: int, stacks: Path) -> NoReturn:
    """Run the functions that the pool sends to this rank, until it is killed.

    On SIGUSR1 the rank writes the stacks of its threads into ``stacks``.

    Args:
        world_size: number of the pool's ranks; each call brings the number that take part in it.
        imports: outcome of the imports in the server that forked this rank; its error is raised.
        file: descriptor of this rank's end of the pipe to the pool.
    """
    if imports.error is not None:
        raise imports.error
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    faulthandler.register(signal.SIGUSR1, stacks.open("a"))
    import torch

    from automoe.interop.torch_private import cached_functions

    gc.unfreeze()  # ``cached_functions`` must see the server's imports, which are frozen
    imported = cached_functions()
    gc.freeze()  # imported modules stay, so the collection after each case need not visit them
    pipe = connection.Connection(file)
    while True:
        store, world_size, path, device, timeout_s = pipe.recv()
        payload = pipe.recv_bytes()
        sys.path[:] = path
        try:
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            os.environ |= LOOPBACK | {name: str(world_size) for name in _WORLD_SIZES}
            launch = LaunchConfig(device, init_timeout_s=math.ceil(timeout_s), threads_per_rank=1)
            init_ranks(launch, rank, world_size, rank, store)
            fn, args, kwargs = pickle.loads(payload)
            fn = pkgutil.resolve_name(fn) if isinstance(fn, str) else fn
            answer = pickle.dumps(fn(*args, **kwargs))
        except BaseException as error:  # the caller raises it and kills this process
            pipe.send((type(error).__name__, traceback.format_exc()))
            continue
        pipe.send((None, answer))
        pipe.recv()
        del answer, payload, fn, args, kwargs
        leave_world(imported)
        pipe.send((None, b""))


def leave_world(imported_caches: list[Any]) -> None:
    """Destroy every process group of this process, and clear the caches that hold a mesh.

    On a GPU, cached memory is freed too.

    Args:
        imported_caches: ``functools`` caches of torch.distributed that existed before a
            ``gc.freeze()``, which hides them from a later search (``cached_functions``).
    """
    import torch
    import torch.distributed as dist

    from automoe.interop.torch_private import forget_meshes

    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes(imported_caches)
    if torch.cuda.is_initialized():  # other ranks may use these GPUs in the next case
        torch.cuda.empty_cache()
