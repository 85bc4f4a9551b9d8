"""Ranks of one machine under torchrun: started, watched, stopped, and judged by the status file."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from automoe.config.frozen import Device, resolved, save_config
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.launch import environment
from automoe.launch import run_dir as runs

_PR_SET_PDEATHSIG = 1
_LOST_PEER_TYPES = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_KILL_AFTER_S = 8  # torchrun's patience between SIGTERM and SIGKILL when a rank has failed


@dataclass(frozen=True)
class RunResult:
    """How a run ended: ``state`` is done, failed or preempted."""

    state: str
    objective: float | None
    error: dict[str, Any] | None
    signum: int | None = None  # the signal that ended it early

    @property
    def exit_code(self) -> int:
        """0 done, 1 failed, 128 + signal preempted (143 after SIGTERM, 130 after Ctrl-C)."""
        if self.state == "done":
            return 0
        return 128 + self.signum if self.state == "preempted" and self.signum else 1


def launch_local(config: Config, shape: MeshShape, device: Device) -> RunResult:
    """Run every rank of ``shape`` on this machine and wait for the end.

    Holds the run directory's lock, writes its ``config.yaml``, forwards SIGTERM and Ctrl-C as a request
    to stop (a second Ctrl-C kills). Call it from the main thread: ranks die with the thread that made them.

    Raises:
        ConfigError: ``run_dir`` cannot be written.
        LaunchError: another run holds it.
    """
    run_dir = Path(config.run_dir).absolute()
    with runs.locked(run_dir):
        runs.start_run(run_dir)
        save_config(resolved(config, shape, device), run_dir)
        return _Launch(run_dir, shape.world_size, config).run()


class _Launch:
    def __init__(self, run_dir: Path, num_ranks: int, config: Config) -> None:
        self.run_dir, self.num_ranks = run_dir, num_ranks
        self.saves = config.checkpoint.every > 0
        self.log = run_dir / runs.LOG_FOLDER / "launcher.log"
        self.signum: int | None = None
        self.env = environment.clean(os.environ)
        self.env["AUTOMOE_LAUNCHER_PID"] = str(os.getpid())
        self.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_KILL_AFTER_S)
        if config.launch.threads_per_rank:
            self.env["OMP_NUM_THREADS"] = str(config.launch.threads_per_rank)
        else:
            # torchrun sets 1 with a warning when the variable is absent; this says it without one.
            self.env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))

    def run(self) -> RunResult:
        old = {number: signal.signal(number, self._forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._start_and_wait()
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        return self._judge()

    def _start_and_wait(self) -> None:
        # --standalone lets the kernel choose the rendezvous port: none to be taken, none to be stale.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(self.num_ranks), "-m", "automoe.worker", str(self.run_dir)]
        with open(self.log, "w") as log:
            self.agent = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
            try:
                if self.signum is not None:
                    self._ask_to_stop()
                self.agent.wait()
            finally:
                self._kill_everything()

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            self._kill_everything()
            return
        if self.signum is None:
            name = signal.Signals(signum).name
            # Not print(): a handler may interrupt one.
            then = "save" if self.saves else "leave without saving (checkpoint.every=0)"
            os.write(
                2, f"\n{name}: the ranks finish their step and {then}; Ctrl-C ends them at once\n".encode()
            )
        self.signum = signum
        if hasattr(self, "agent"):
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        """To the ranks, not to torchrun: that would kill them before they have saved."""
        (self.run_dir / runs.STOP_FILE).touch()
        for pid in self._rank_pids():
            _signal(pid, signal.SIGTERM)

    def _kill_everything(self) -> None:
        """No orphan behind: torchrun and every rank, each in a session of its own."""
        pids = self._rank_pids() if self.agent.poll() is None else []
        for pid in (*pids, *([self.agent.pid] if self.agent.poll() is None else [])):
            _signal(pid, signal.SIGKILL)

    def _rank_pids(self) -> list[int]:
        texts = [path.read_text() for path in (self.run_dir / runs.LOG_FOLDER).glob("rank*.pid")]
        return [int(text) for text in texts if text]

    def _judge(self) -> RunResult:
        status = runs.read_status(self.run_dir)
        killed = self._killed_rank(status.get("error"))
        if killed is not None:
            # What the other ranks say is a consequence: they lost this one in a collective.
            runs.record_failure(self.run_dir, _failure(*killed), overrule=True)
        elif status["state"] in ("starting", "running"):
            if self.signum is not None:
                runs.write_status(self.run_dir, "preempted", objective=None)
            else:
                tail = " | ".join(self.log.read_text().strip().splitlines()[-3:])
                message = (
                    f"the ranks ended without a result, torchrun with status {self.agent.returncode}: {tail}"
                )
                runs.record_failure(self.run_dir, _failure(None, message))
        status = runs.read_status(self.run_dir)
        signum = self.signum if status["state"] == "preempted" else None
        return RunResult(status["state"], status.get("objective"), status.get("error"), signum)

    def _killed_rank(self, recorded: dict[str, Any] | None) -> tuple[int, str] | None:
        """The rank that a signal ended, and what to say of it, where that is this run's first error.

        A rank that dies so cannot report; its peers report that the connection is gone.
        """
        if self.signum is not None or not self.agent.returncode:
            return None
        if recorded is not None and recorded["type"] not in _LOST_PEER_TYPES:
            return None
        # One block per rank in torchrun's closing report: "rank : 1 (local_rank: 1)", next line "exitcode : -9 (...)".
        block = r"^\s*rank\s*:\s*(\d+) \(local_rank.*\n\s*exitcode\s*:\s*(-?\d+)"
        failures = re.findall(block, self.log.read_text(), re.MULTILINE)
        for rank, exit_code in failures:
            if int(exit_code) in (0, -signal.SIGTERM) or int(exit_code) > 0:
                continue
            if recorded is not None and int(exit_code) == -signal.SIGABRT:
                continue  # NCCL's watchdog aborts the ranks that outlive a failure
            what = f"killed by {signal.Signals(-int(exit_code)).name}"
            if int(exit_code) == -signal.SIGKILL:
                what += ", often by the kernel for want of memory: see dmesg, or lower train.micro_batch_size"
            return int(rank), what
        return None


def _failure(rank: int | None, message: str) -> dict[str, Any]:
    return {"rank": rank, "type": "LaunchError", "message": message, "for_user": True, "traceback": []}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass  # it has ended meanwhile
