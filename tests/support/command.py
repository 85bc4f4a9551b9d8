"""Training commands in processes of their own: started, asked to stop, killed, and looked for afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from automoe.observe.metrics import read_expert_load, read_metrics

ROOT = Path(__file__).parents[2]
FAULTY_RECIPE = Path(__file__).with_name("faulty_pretrain.py")
PATIENCE_S = 600  # only a hang reaches it
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
# A variable that marks the processes of a run: forked ranks have their server's command line.
_MARK = "AUTOMOE_TESTED_RUN"
# What of a step's record may differ between two runs of the same numbers: clocks, memory, and what saving did.
_VOLATILE = ("second", "mfu", "memory", "checkpoint_", "slowest")
# A model of 40,000 parameters that uses every part of the state: expert bias, lagged balance loss, moments.
TINY = (
    "model.hidden_size=16",
    "model.num_layers=2",
    "model.intermediate_size=32",
    "model.moe_intermediate_size=16",
    "model.num_experts=8",
    "moe.global_balance_coef=0.01",
    "train.seq_len=32",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.val_every=0",
    "optim.warmup_steps=2",
    "data.max_bytes=100000",
    "checkpoint.export_hf=false",
    "observe.report=false",
    "launch.device=cpu",
)
MESHES = {  # meshes of four and two ranks on which a run is killed
    "pp2-dp2-ep2": ("mesh.pp=2", "mesh.dp_shard=2", "mesh.ep=2"),
    "dp4-ep4": ("mesh.pp=1", "mesh.dp_shard=4", "mesh.ep=4"),
    "cp2-ep2": ("mesh.pp=1", "mesh.dp_shard=1", "mesh.cp=2", "mesh.ep=2"),
}


class TrainCommand:
    """``python -m automoe.train run_dir=... overrides`` in a clean environment.

    Args:
        env: added to the environment of every start.
        python_path: directories with recipes of the test's own.
    """

    def __init__(
        self,
        run_dir: Path,
        overrides: Sequence[str] = (),
        env: dict[str, str] | None = None,
        python_path: Sequence[Path] = (),
    ) -> None:
        self.run_dir, self.overrides = run_dir, tuple(overrides)
        left_over = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "AUTOMOE_FAULT")
        kept = {key: value for key, value in os.environ.items() if key not in left_over}
        path = os.pathsep.join(map(str, (ROOT, *python_path)))
        self.env = kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", _MARK: str(run_dir)} | (env or {})

    def arguments(self, *overrides: str) -> list[str]:
        """What comes after ``python``."""
        return ["-m", "automoe.train", f"run_dir={self.run_dir}", *self.overrides, *overrides]

    def start(
        self, *overrides: str, before: Sequence[str] = (), fault: str = "", group: bool = False
    ) -> subprocess.Popen[str]:
        """The started process.

        Args:
            group: the run is a process group of its own.
            before: goes between Python and ``-m automoe.train``, e.g. torchrun.
            fault: in the language of ``fault_points``; the pretraining recipe runs with it.
        """
        arguments = [*before, *self.arguments(*overrides), *([f"recipe={FAULTY_RECIPE}"] if fault else [])]
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.env | ({"AUTOMOE_FAULT": fault} if fault else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=group,
        )

    def run(self, *overrides: str, before: Sequence[str] = (), fault: str = "") -> tuple[int, str, str]:
        """Exit status, standard output and standard error of the whole run."""
        process = self.start(*overrides, before=before, fault=fault)
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def pids(self) -> list[int]:
        """Every living process that was started with this run in its environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # it has ended meanwhile
                continue
            if f"{_MARK}={self.run_dir}".encode() in variables and state != "Z":
                found.append(int(folder.name))
        return sorted(found)

    def rank_pids(self) -> list[int]:
        """Ranks that have said which process they are, and live."""
        files = sorted((self.run_dir / "logs").glob("rank*.pid"))
        alive = set(self.pids())
        return [pid for pid in (int(file.read_text() or 0) for file in files) if pid in alive]

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.pids():
            assert time.monotonic() < deadline, f"left behind: {self.pids()}"
            time.sleep(0.1)

    def record(self) -> list[dict[str, Any]]:
        """``metrics.jsonl`` and the experts' loads without what depends on clocks: the numbers of the run."""
        steps, loads = read_expert_load(self.run_dir)
        by_step = dict(zip(steps.tolist(), loads.tolist(), strict=True))
        return [
            comparable(record) | {"expert_load": by_step.get(record["step"])} for record in read_metrics(self.run_dir)
        ]

    def checkpoints(self) -> list[str]:
        """Names in the checkpoint folder, sorted; LATEST with what it says."""
        folder = self.run_dir / "checkpoints"
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        return [f"LATEST={(folder / name).read_text().strip()}" if name == "LATEST" else name for name in names]


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """What of a step's record is the same in every run of the same numbers."""
    return {key: value for key, value in record.items() if not any(word in key for word in _VOLATILE)}


def kill(pid: int, signum: int = signal.SIGKILL) -> bool:
    """Send a signal; False where the process has ended before."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Rank 0's output up to the line with ``text``."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without {text!r}: {seen}{process.stderr.read() if process.stderr else ''}")
