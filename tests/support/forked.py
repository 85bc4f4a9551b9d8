"""Commands of the package without the seconds that its imports take: forks of one process that has done them.

``python -m tests.support.forked`` imports the modules that it is told, reads a request a line and answers with an exit
status. The fork calls the command's own ``main``; ranks that it starts are its own forks, and not those of a fork server.
From there on nothing is different: environment, output, sessions, signals, exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from automoe.config.compose import compose_config
from automoe.launch import fork_server
from automoe.launch.fork_server import Job, become
from automoe.launch.ranks import Imports
from automoe.launch.worker import STOP_SIGNALS

IMPORTED = """
    torch torch._dynamo torch.distributed.fsdp torch.distributed.checkpoint hydra omegaconf jinja2 rich.console matplotlib.pyplot
    automoe.launch.worker automoe.launch.sweep automoe.observe.plots automoe.observe.report automoe.observe.mesh_view
    automoe.checkpoint.store automoe.data.loader automoe.parallel.parallelize automoe.run.run automoe.hf.write
    automoe.export automoe.observe.console transformers.models.deepseek_v3.modeling_deepseek_v3
""".split()
_CAPABILITIES_V3 = 0x20080522
_DAC = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root reads what nobody may


class Forks:
    """The process that forks; ``run`` gives exit status, standard output and standard error of a command."""

    def __init__(self, folder: Path, env: Mapping[str, str], imported: Sequence[str]) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "tests.support.forked", *imported]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=dict(env))

    def run(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        """``python -m MODULE ARGUMENTS`` as a user whom permissions of files concern, root too."""
        files = [str(self.folder / name) for name in ("stdout", "stderr")]
        request = {"module": module, "arguments": arguments, "files": files, "env": dict(env or {})}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, "the forking process is gone"
        out, err = (Path(file).read_text() for file in files)
        return int(answer), out, err

    def close(self) -> None:
        self.process.communicate()


class OwnServer:
    """What ``automoe.launch.local`` asks of a fork server, by a process that has imported everything itself."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env

    def serves(self, env: Mapping[str, str]) -> bool:
        return self.env == env

    def start(self, job: Job, stdout: int = 1) -> list[ForkedRank]:
        return [ForkedRank(self._start(job, rank, stdout)) for rank in range(job.num_ranks)]

    def _start(self, job: Job, rank: int, stdout: int) -> int:
        parent = os.getpid()

        def target() -> NoReturn:
            _streams(os.devnull, None, None)
            _environment(self.env)
            unused, _ = socket.socketpair()
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            become(job, rank, parent, [os.dup(stdout), os.dup(2)], unused, Imports())

        return fork(target)

    def close(self) -> None:
        pass


class ForkedRank:
    """A child of this process, with what ``automoe.launch.fork_server.ForkedRank`` has."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(target: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    end(target)


def end(target: Callable[[], int]) -> NoReturn:
    status = 1
    try:
        status = target()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def command(request: Mapping[str, object]) -> int:
    out, err = request["files"]
    _streams(request.get("stdin", os.devnull), out, err)
    _environment(os.environ | request["env"])
    obey_permissions()
    fork_server.ForkServer = OwnServer
    sys.argv = [request["module"], *request["arguments"]]
    return import_module(request["module"]).main()


def _environment(env: Mapping[str, str]) -> None:
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)


def _streams(*files: str | None) -> None:
    """Standard input, output and error of this process; None leaves one where it is."""
    for number, (file, mode) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        if file is not None:
            handle = os.open(file, mode | (os.O_CREAT | os.O_TRUNC if number else 0), 0o644)
            os.dup2(handle, number)
            os.close(handle)
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))


def obey_permissions() -> None:
    """From now on a file that nobody may read is one that this process cannot read, though it is root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for number in range(3):  # effective, permitted, inheritable; the low halves
        sets[number] &= ~_DAC
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


@contextlib.contextmanager
def forks(folder: Path, env: Mapping[str, str], imported: Sequence[str] = IMPORTED) -> Iterator[Forks]:
    """A ``Forks`` that is gone afterwards."""
    started = Forks(folder, env, imported)
    try:
        yield started
    finally:
        started.close()


def main() -> int:
    for module in sys.argv[1:]:
        import_module(module)
    compose_config()  # Hydra looks through all packages for plugins, once
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = fork(lambda request=request: command(request))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return 0


if __name__ == "__main__":
    end(main)
