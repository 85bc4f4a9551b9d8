"""Tries of a stranger's input: a whole command in a fork, with limits of time and memory, and what became of it.

``python -m tests.support.tries`` imports the package's modules once and runs a command for each line that it reads:

    with tries(folder) as attempt:
        found = attempt("automoe.plan", f"cluster={file}")
        assert found.outcome == "refused", found.said
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from automoe.config.compose import compose_config
from automoe.storage import guarded
from tests.support import forked

IMPORTED = (
    *forked.IMPORTED, "automoe.generate", "automoe.convert", "automoe.eval", "automoe.plan", "automoe.upcycle",
    "automoe.verify", "automoe.doctor", "automoe.demo", "automoe.data.chat", "automoe.classes.family",
    "tokenizers", "transformers", "pyarrow.parquet",
)  # fmt: skip
SECONDS = 60
BYTES = 4 << 30  # of private memory that a process may add
_CODE_LINES = re.compile(
    r'Traceback \(most recent|File ".*", line \d+|\.py:\d+ in |^\s*raise |Segmentation|panicked', re.M
)


class Found(NamedTuple):
    """What became of a try: done, refused, traceback, hangs, code; with exit status and everything printed."""

    outcome: str
    status: int
    said: str


class Tries:
    """Runs commands in ``folder``; one that makes the file ``canary`` has run a stranger's code."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self.canary = folder, folder / "canary"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.tries"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**env, "CANARY": str(self.canary)},
        )  # fmt: skip

    def __call__(
        self,
        module: str,
        *arguments: object,
        cwd: Path | None = None,
        seconds: int = SECONDS,
        typed: str = "",
        **env: str,
    ) -> Found:
        """``python -m MODULE ARGUMENTS`` with ``typed`` as standard input."""
        files = [str(self.folder / name) for name in ("stdout", "stderr")]
        (self.folder / "stdin").write_text(typed)
        request = {
            "module": module, "arguments": list(map(str, arguments)), "files": files, "env": env, "seconds": seconds,
            "cwd": str(cwd or self.folder), "stdin": str(self.folder / "stdin"),
        }  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        status = int(self.process.stdout.readline())
        said = "".join(Path(file).read_text(errors="replace") for file in files)
        ran = self.canary.exists()
        self.canary.unlink(missing_ok=True)
        return Found(_outcome(status, said, ran), status, said)

    def close(self) -> None:
        self.process.communicate()


def _outcome(status: int, said: str, ran: bool) -> str:
    if ran:
        return "code"
    if status == -signal.SIGALRM:
        return "hangs"
    if status < 0 or _CODE_LINES.search(said):
        return "traceback"
    if status == 0:
        return "done"
    return "refused" if "error: " in said or "usage: " in said else "traceback"


def _limited(request: dict[str, object]) -> int:
    os.setsid()
    os.chdir(str(request["cwd"]))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/status") as file:
        private = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (private + BYTES, hard))
    os.dup2(os.open(str(request["stdin"]), os.O_RDONLY), 0)
    return forked.command(request)


def main() -> int:
    for module in IMPORTED:
        import_module(module)
    compose_config()
    guarded.MAX_SECONDS, guarded.MAX_BYTES = 3, BYTES // 2  # so that what hits a limit takes no minute
    forked.gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = forked.fork(lambda request=request: _limited(request))
        watch = os.pidfd_open(pid)
        ended, _, _ = select.select([watch], [], [], request["seconds"])
        os.close(watch)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(status if ended else -signal.SIGALRM, flush=True)
    return 0


@contextlib.contextmanager
def tries(folder: Path, env: Mapping[str, str] = os.environ) -> Iterator[Tries]:
    """A ``Tries`` that is gone afterwards."""
    started = Tries(folder, env)
    try:
        yield started
    finally:
        started.close()


if __name__ == "__main__":
    forked.end(main)
