"""Ranks of one machine as forks of a process that has imported torch and this package, once for all of them.

The launching process starts this server and asks it for ranks through a socket pair. The server answers with their
process ids, and with the exit status of each as it ends. Asked again, for another attempt or the next job of a sweep,
it imports nothing again. It computes nothing and starts no thread, and no rank has touched CUDA before it is a process
of its own: that is what makes a fork of torch safe.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from automoe.launch import ranks
from automoe.launch.worker import STOP_SIGNALS, end_process, run_rank

# With what these import, ranks have nearly all that a recipe of ours needs.
IMPORTED = ("automoe.training.run", "automoe.training.weights", "automoe.training.step", "automoe.data.loader")
_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class Job:
    """The ranks of one attempt: what ``run_rank`` is told.

    Attributes:
        launcher: process id of ``launch_local``'s process.
        paths: where that process finds recipes and plugins, and so do ranks.
    """

    run_dir: str
    num_ranks: int
    store: str
    launcher: int
    paths: list[str]


class ForkedRank:
    """A rank's process, with what ``subprocess.Popen`` has of one."""

    def __init__(self, server: ForkServer) -> None:
        self.pid: int | None = None  # until the server has said it
        self.returncode: int | None = None
        self._server = server
        self._signals: list[int] = []

    def poll(self) -> int | None:
        """Exit status, negative of a signal; None while it runs."""
        self._server.hear()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Now, or as soon as there is a process."""
        if self.poll() is not None:
            return
        if self.pid is None:
            self._signals.append(signum)
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """End it; while the server imports, that ends the server."""
        self.send_signal(signal.SIGKILL)
        if self.pid is None:
            self._server.process.kill()

    def began(self, pid: int) -> None:
        """Its process is there, and gets the signals that came before it."""
        self.pid = pid
        for signum in self._signals:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


class ForkServer:
    """The server as the launching process sees it; it, and all its ranks, die with the thread that made it.

    Args:
        env: of the server and its ranks. OpenMP and others read it once, so another one needs another server.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env, self.folder = dict(env), os.getcwd()
        self._ranks: list[ForkedRank] = []
        self._hearing = False
        self._begin()

    def _begin(self) -> None:
        self._heard = b""
        self._socket, theirs = socket.socketpair()
        # Blocked, a signal waits in a rank that has no handler for it yet.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with theirs:
                # A session of its own: Ctrl-C in the terminal reaches the launching process alone.
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "automoe.launch.fork_server", str(os.getpid()), str(theirs.fileno())],
                    env=self.env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
                )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def serves(self, env: Mapping[str, str]) -> bool:
        """Whether it is what would be started now in ``env``."""
        return (self.env, self.folder) == (dict(env), os.getcwd())

    def start(self, job: Job, stdout: int) -> list[ForkedRank]:
        """Its ranks, which begin when the server has imported what it must; it has no others.

        A server that was killed begins anew: this may be the next attempt.

        Args:
            stdout: file descriptor of rank 0's standard output.
        """
        if self.process.poll() is not None:
            self.close()
            self._begin()
        self._ranks = [ForkedRank(self) for _ in range(job.num_ranks)]
        text = json.dumps(asdict(job)).encode()
        with suppress(BrokenPipeError, ConnectionResetError):  # it has gone meanwhile, which is heard
            socket.send_fds(self._socket, [_LENGTH.pack(len(text))], [stdout, 2])
            self._socket.sendall(text)
        return self._ranks

    def hear(self) -> None:
        """Take in what the server has said of its ranks. It may be called by a signal handler, in its own midst too."""
        if self._hearing:
            return
        self._hearing = True
        try:
            while data := self._received():
                *lines, self._heard = (self._heard + data).split(b"\n")
                for line in lines:
                    self._believe(*map(int, line.split()))
        finally:
            self._hearing = False

    def _believe(self, rank: int, pid: int, status: int) -> None:
        if pid:
            self._ranks[rank].began(pid)
        else:
            self._ranks[rank].returncode = status

    def _received(self) -> bytes:
        """What there is to read; once the server has gone, all its ranks have the status of that."""
        try:
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            status = self.process.wait() or 1
            for rank in self._ranks:
                rank.returncode = status if rank.returncode is None else rank.returncode
        return data

    def close(self) -> None:
        """End it, and what ranks there are."""
        self.process.kill()
        self.process.wait()
        self._socket.close()


_kept: ForkServer | None = None


@contextmanager
def fork_server(env: Mapping[str, str], keep: bool = False) -> Iterator[ForkServer]:
    """A server in ``env``, or the one that was kept, if it is that.

    Args:
        keep: it for the next time, which imports nothing then; it ends with this process.
    """
    global _kept
    server, _kept = _kept, None
    if server is not None and not server.serves(env):
        server.close()
        server = None
    server = server or ForkServer(env)
    try:
        yield server
    except BaseException:
        server.close()
        raise
    if keep:
        _kept = server
    else:
        server.close()


@atexit.register
def _close_kept() -> None:
    if _kept is not None:
        _kept.close()


# ---------------------------------------------------------------- in the server


def main() -> int:
    """Serve the process whose id is on the command line, through the socket whose number is."""
    launcher, number = map(int, sys.argv[1:])
    die_with_parent(launcher)
    ranks.prepare_process()
    error, said = _import_all()
    with socket.socket(fileno=number) as requests:
        while (asked := _receive(requests)) is not None:
            job, files = asked
            _serve(job, files, requests, error, said)
    return 0


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its ``parent`` ends, and leave at once if that has happened (Linux).

    This process is in a session of its own, so nobody else would.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _import_all() -> tuple[BaseException | None, str]:
    """What went wrong, which is for ranks to report, and what was written to standard error."""
    terminal, log = os.dup(2), os.memfd_create("automoe-imports")
    os.dup2(log, 2)
    error = None
    try:
        for name in IMPORTED:
            import_module(name)
    except BaseException as caught:
        error = caught
    sys.stderr.flush()
    os.dup2(terminal, 2)
    os.close(terminal)
    said = Path(f"/proc/self/fd/{log}").read_text(errors="replace")
    os.close(log)
    gc.freeze()  # what is there stays, and is no rank's to look through
    return error, said


def _receive(requests: socket.socket) -> tuple[Job, list[int]] | None:
    """The next request, and the files that come with it: standard output and error; None at the end."""
    head, files, _, _ = socket.recv_fds(requests, _LENGTH.size, 2)
    if len(head) < _LENGTH.size:
        return None
    text, (length,) = b"", _LENGTH.unpack(head)
    while len(text) < length:
        if not (more := requests.recv(length - len(text))):
            return None
        text += more
    return Job(**json.loads(text)), files


def _serve(job: Job, files: list[int], requests: socket.socket, error: BaseException | None, said: str) -> None:
    """Fork the ranks of ``job``, and tell how each ends: lines of rank, process id or 0, exit status."""
    server, numbers = os.getpid(), {}
    for rank in range(job.num_ranks):
        pid = fork(lambda rank=rank: become(job, rank, server, files, requests, error, said))
        numbers[pid] = rank
        requests.sendall(b"%d %d 0\n" % (rank, pid))
    for file in files:
        os.close(file)
    while numbers:
        pid, status = os.wait()
        if (ended := numbers.pop(pid, None)) is not None:  # else something that an import left behind
            requests.sendall(b"%d 0 %d\n" % (ended, os.waitstatus_to_exitcode(status)))


def fork(target: Callable[[], NoReturn]) -> int:
    """The process id of a child that runs ``target``, whatever becomes of it there."""
    with warnings.catch_warnings():  # of Python 3.12: there are threads. OpenBLAS has some and forks well; others none
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        target()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def become(
    job: Job, rank: int, parent: int, files: list[int], requests: socket.socket, error: BaseException | None, said: str
) -> NoReturn:
    """In a fork of ``parent``: run this rank, and leave with its exit status."""
    requests.close()
    os.setsid()
    die_with_parent(parent)
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    world = str(job.num_ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    sys.path += [path for path in job.paths if path not in sys.path]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as a process that had not been forked; Python's own does so by itself
    place = rank, job.num_ranks, rank
    status = run_rank(
        Path(job.run_dir), *place, store=Path(job.store), launcher=job.launcher, imported=error, said=said
    )
    end_process(status)


if __name__ == "__main__":
    end_process(main())
