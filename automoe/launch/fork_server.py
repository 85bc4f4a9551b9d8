"""A server that imports torch and this package once, and forks the ranks of one machine.

A launcher starts the server and sends it jobs through a socket pair. For each job the server forks
the ranks, answers with their process ids, and answers again with the exit status of each rank that
ends. The next job, such as another attempt, imports nothing again.

Forking a process that has imported torch is safe because the server computes nothing, starts no
thread, and leaves CUDA untouched.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from automoe.errors import in_words, say, without
from automoe.launch.ranks import Imports, prepare_process
from automoe.launch.worker import STOP_SIGNALS, end_process
from automoe.storage.guarded import die_with_parent, fork

# These modules import nearly everything that a shipped recipe needs.
IMPORTED = "automoe.run.run automoe.run.weights automoe.training.step automoe.data.loader".split()
_MAX_MESSAGE = 1 << 20  # bytes
_MAX_FILES = 253  # Linux's SCM_MAX_FD


class Job(NamedTuple):
    """Ranks to fork, and the call that each rank makes.

    Attributes:
        function: module-level function, called as ``function(rank=, world_size=, imports=,
            **options)``, where ``imports`` says whether the server could import torch; it returns
            the rank's exit status. With ``files`` in ``ForkServer.start``, it also gets ``file=``, the
            rank's own descriptor.
        num_ranks: number of ranks, all on this machine.
        options: further keyword arguments of ``function``.
        paths: ``sys.path`` of the launcher, so that ranks find the same recipes and plugins.
    """

    function: Callable[..., int]
    num_ranks: int
    options: dict[str, Any]
    paths: list[str]


class ForkedRank:
    """A rank's process in the fork server, with the main members of ``subprocess.Popen``.

    These are ``pid``, ``returncode``, ``poll``, ``send_signal`` and ``kill``. ``pid`` is None until the
    server has forked the rank, and ``returncode`` until the rank has ended.
    """

    def __init__(self, server: ForkServer) -> None:
        self.pid: int | None = None  # None until the server has forked the rank
        self.returncode: int | None = None
        self._server = server
        self._signals: list[int] = []  # signals to send once the process exists

    def poll(self) -> int | None:
        """Return the exit status (negative after a signal); None while the rank runs."""
        self._server.hear()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send ``signum`` to the rank, now or as soon as its process exists."""
        if self.poll() is None:
            self._signals.append(signum)
            self._send()

    def _send(self) -> None:
        with suppress(ProcessLookupError):
            while self.pid is not None and self._signals:
                os.kill(self.pid, self._signals.pop(0))

    def kill(self) -> None:
        """Kill the rank; kill the server instead if the rank has no process yet."""
        self.send_signal(signal.SIGKILL)
        if self.pid is None:
            self._server.process.kill()

    def began(self, pid: int) -> None:
        """Store the process id, and send the signals that were waiting for it."""
        self.pid = pid
        self._send()


def python() -> list[str]:
    """Return the command that runs a module: ``[python, "-Pm"]``, to be followed by its name.

    ``-P`` keeps files of the working directory from shadowing libraries. If the working directory
    is a checkout of automoe, the option is ``-m`` alone, so that the checkout can be imported.
    """
    inside = Path(__file__).parents[2] == Path.cwd()
    return [sys.executable, "-m" if inside else "-Pm"]


class ForkServer:
    """Connection of the launcher to a fork server: a process that has imported torch and forks ranks.

    The server and its ranks die with the thread that made this object.

    Args:
        env: environment of the server and its ranks. Libraries such as OpenMP read the environment
            once, so another environment needs another server.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self.folder = os.getcwd()
        self._ranks: list[ForkedRank] = []
        self._hearing = False
        self._begin()

    def _begin(self) -> None:
        # A socket of packets delivers a message whole or not at all.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Blocked signals stay pending until a rank has installed its handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with theirs:
                # The server has its own session, so Ctrl-C in a terminal reaches only the launcher.
                self.process = subprocess.Popen(
                    [*python(), "automoe.launch.fork_server", str(os.getpid()), str(theirs.fileno())],
                    env=self.env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
                )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def serves(self, env: Mapping[str, str]) -> bool:
        """Return True if the server was started with ``env`` and in the current working directory."""
        return (self.env, self.folder) == (dict(env), os.getcwd())

    def start(self, job: Job, stdout: int = 1, files: Sequence[int] = ()) -> list[ForkedRank]:
        """Start the ranks of ``job``, and return them; the server runs one job at a time.

        The ranks begin once the server has imported its modules. If the server was killed, which
        also ends its job, it is started again first.

        Args:
            stdout: file descriptor that the ranks start with as standard output.
            files: one file descriptor per rank, which its function gets as ``file=``; or empty.
        """
        if self.process.poll() is not None:
            self.close()
            self._begin()
        self._ranks = [ForkedRank(self) for _ in range(job.num_ranks)]
        # If the server was killed, ``hear`` notices this and sets the ranks' exit status.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [pickle.dumps(tuple(job))], [stdout, 2, *files])
        return self._ranks

    def hear(self) -> None:
        """Read from the server which ranks began or ended, and update the ``ForkedRank`` objects.

        The method does not wait. A signal handler that interrupts it may call it too.

        If the server has ended, the ranks that still ran get its exit status, or 1 in place of 0.
        """
        if self._hearing:
            return
        self._hearing = True
        try:
            while answer := self._socket.recv(100, socket.MSG_DONTWAIT):
                number, pid, status = map(int, answer.split())
                if pid:
                    self._ranks[number].began(pid)
                else:
                    self._ranks[number].returncode = status
        except BlockingIOError:  # no answer is waiting
            # Only the server sees that ranks end, so it goes on if a signal has stopped it.
            with suppress(ChildProcessError):
                if os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG) is not None:
                    self.process.send_signal(signal.SIGCONT)
            return
        except OSError:  # as after an empty answer, the server has ended
            pass
        finally:
            self._hearing = False
        status = self.process.wait() or 1
        for rank in self._ranks:
            if rank.returncode is None:
                rank.returncode = status

    def close(self) -> None:
        """Kill the server; its ranks die with it."""
        self.process.kill()
        self.process.wait()
        self._socket.close()


_kept: ForkServer | None = None


@contextmanager
def fork_server(env: Mapping[str, str], keep: bool = False) -> Iterator[ForkServer]:
    """Yield a fork server with environment ``env``: a new one, or the one that the last call kept.

    A kept server must have the same environment and working directory.

    Args:
        keep: keep the server running for the next call, which then need not import torch again; it
            ends with this process at the latest. False, or after an exception: close it at the
            context's end.
    """
    global _kept
    server = _kept
    _kept = None
    if server is None or not server.serves(env):
        if server is not None:
            server.close()
        server = ForkServer(env)
    try:
        yield server
    except BaseException:
        keep = False
        raise
    finally:
        if keep:
            _kept = server
        else:
            server.close()


@atexit.register
def _close_kept() -> None:
    if _kept is not None:
        _kept.close()


# ---------------------------------------------------------------- the server's process


@without("kernels")
def main() -> int:
    """Fork ranks for a launcher, one ``Job`` per message, until it closes the socket; then return exit status 0.

    The command line has the launcher's process id and the socket's file descriptor.
    """
    launcher, number = map(int, sys.argv[1:])
    die_with_parent(launcher)
    # A parent may have left SIGCHLD ignored: the system would then discard the status of children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prepare_process()
    imports = _import_all()
    with socket.socket(fileno=number) as requests:
        while True:
            message, files, _, _ = socket.recv_fds(requests, _MAX_MESSAGE, _MAX_FILES)
            if not message:
                return 0
            # An answer is sent whenever a rank begins or ends.
            job = Job(*pickle.loads(message))
            server = os.getpid()
            numbers = {}
            for rank in range(job.num_ranks):
                pid = fork()  # OpenBLAS has threads, and survives a fork
                if not pid:
                    become(job, rank, server, files, requests, imports)
                numbers[pid] = rank
                requests.send(b"%d %d 0" % (rank, pid))
            for file in files:
                os.close(file)
            while numbers:
                pid, status = os.wait()
                # Other children of this process were left behind by an import.
                if (ended := numbers.pop(pid, None)) is not None:
                    requests.send(b"%d 0 %d" % (ended, os.waitstatus_to_exitcode(status)))


def _import_all() -> Imports:
    terminal = os.dup(2)
    log = os.memfd_create("automoe-imports")
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
    output = Path(f"/proc/self/fd/{log}").read_text(errors="replace")
    os.close(log)
    gc.freeze()  # imported modules stay, so a rank's garbage collector need not visit them
    return Imports(error, output)


def become(
    job: Job, rank: int, parent: int, files: list[int], requests: socket.socket, imports: Imports
) -> NoReturn:
    """Run ``rank`` of ``job`` in this process, a fork of the server, and exit with its status.

    Args:
        parent: process id of the server.
        files: descriptors of standard output and error, then one for each rank or none.
        requests: the server's socket, to be closed.
        imports: outcome of the server's imports, passed on to the job's function.
    """
    try:
        requests.close()
        os.setsid()
        die_with_parent(parent)
        stdout, stderr, *rank_files = files
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for file in files:
            if file not in rank_files[rank : rank + 1]:
                os.close(file)
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
        world = str(job.num_ranks)
        own_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= own_rank | {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        sys.path += [path for path in job.paths if path not in sys.path]
        if "numpy" in sys.modules:
            # Forks would draw the same numbers; Python reseeds its own generator after a fork.
            sys.modules["numpy"].random.seed()
        options = job.options | ({"file": rank_files[rank]} if rank_files else {})
        end_process(job.function(rank=rank, world_size=job.num_ranks, imports=imports, **options))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    try:
        end_process(main())
    except OSError as error:  # no further process can be started
        say(in_words(error))
        end_process(1)
