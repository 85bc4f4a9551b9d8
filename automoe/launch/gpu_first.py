"""Checks for the first half hour on GPUs: short training runs, the most informative ones first.

Each check trains by the documented command. Most repeat another check, with its data
and initial weights but other settings, and must reproduce its losses: this proves these settings.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automoe.config.rule_engine import table
from automoe.launch.trial_runs import Records, TrialError, differing, train, train_and_kill

RESULTS = "results.json"
STEPS = 10


@dataclass(frozen=True)
class Check:
    """A short training run that checks one feature on GPUs.

    Attributes:
        name: name of the run.
        gpus: number of GPUs needed; 0 runs on the CPU.
        words: command-line arguments after ``automoe train``.
        proves: what is known once the check passes.
        like: name of the check whose losses it must reproduce; empty for none.
        tolerance: largest relative difference of a step's loss; 0: all recorded numbers are equal
            bitwise.
        killed: kill the run once in the middle and start it again.
    """

    name: str
    gpus: int
    words: str
    proves: str
    like: str = ""
    tolerance: float = 1e-3
    killed: bool = False

    def overrides(self, device: str) -> list[str]:
        """Return the overrides that this check trains with: ``words``, ``launch.device`` and ``launch.num_ranks``.

        Args:
            device: device of a check that needs GPUs; another runs on the CPU.
        """
        where = [f"launch.device={device if self.gpus else 'cpu'}"]
        return [*self.words.split(), *where, f"launch.num_ranks={max(1, self.gpus)}"]


_SMALL = (
    f"train.steps={STEPS} train.seq_len=128 train.global_batch_size=8 train.micro_batch_size=1 "
    "train.val_every=0 optim.warmup_steps=2 data.max_bytes=1000000 checkpoint.export_hf=false "
    "checkpoint.every=4 observe.report=false "
)
_F32 = f"{_SMALL} moe.experts=loop mesh.pp=1"
_BF16 = f"{_SMALL} mesh.pp=1 mesh.ep=1 train.dtype=bfloat16"
_MOONLIGHT = (
    "--config-name moonlight_16b_a3b data=benchmark train.steps=20 train.val_every=0 "
    "checkpoint.every=0 checkpoint.every_minutes=0 checkpoint.export_hf=false"
)
# fmt: off
# Name, GPUs, words, what it proves, the check that it is like, and the tolerance.
_TABLE = table("""
cpu | 0 | ALONE | the reference: this machine's CPU trains | | 1e-3
gpu | 1 | ALONE | CUDA, the driver and torch compute what the CPU computes | cpu | 1e-3
gpu-killed | 1 | ALONE | a GPU run killed with SIGKILL goes on to the bit | gpu | 0
bf16 | 1 | BF16 moe.experts=loop | bfloat16 trains | gpu | 0.05
grouped-mm | 1 | BF16 | torch's grouped products | bf16 | 0.02
triton | 1 | BF16 moe.experts=triton kernels.rope=triton kernels.loss=triton | our Triton kernels | bf16 | 0.02
fp8 | 1 | BF16 train.fp8=tensorwise | 8-bit kernels (compute capability 9.0, Hopper) | bf16 | 0.1
rows-in-8-bits | 1 | BF16 moe.dispatch_dtype=fp8 | the kernel that rounds rows to 8 bits | bf16 | 0.05
flex | 1 | BF16 kernels.attention=flex | FlexAttention by document borders | bf16 | 0.02
compile | 1 | BF16 train.compile=true | torch.compile | bf16 | 0.02
speed | 1 | MOONLIGHT model.num_layers=6 train.global_batch_size=8 mesh.dp_shard=1 mesh.ep=1 train.steps=10
    | tokens/s, MFU and memory of full-width layers, to hold beside the plan | | 1e-3
ep8 | 8 | F32 mesh.ep=8 | NCCL, FSDP and the all-to-all over eight GPUs | gpu | 1e-3
ep8-killed | 8 | F32 mesh.ep=8 | eight ranks killed go on to the bit | ep8 | 0
hsdp | 8 | F32 mesh.dp_replicate=2 mesh.dp_shard=4 mesh.ep=4 | replicas beside shards | gpu | 1e-3
tp | 8 | F32 mesh.tp=2 mesh.ep=4 | tensor parallelism, folded with experts | gpu | 1e-3
cp | 8 | F32 mesh.cp=2 mesh.ep=4 | rows cut over ranks | gpu | 1e-3
ulysses | 8 | F32 mesh.cp=2 mesh.ep=4 parallel.context=ulysses | heads for positions | gpu | 1e-3
pp | 8 | F32 mesh.pp=2 mesh.dp_shard=4 mesh.ep=4 | a pipeline over NCCL | gpu | 1e-3
deepep | 8 | BF16 mesh.ep=8 moe.dispatcher=deepep | DeepEP's kernels | bf16 | 0.05
ep8-rows-in-8-bits | 8 | BF16 mesh.ep=8 moe.dispatch_dtype=fp8 | rows that travel in 8 bits | rows-in-8-bits | 0.05
moonlight | 8 | MOONLIGHT | 16B parameters on a node: tokens/s, MFU, memory beside the plan | | 1e-3
""", F32=_F32, ALONE=f"{_F32} mesh.ep=1", BF16=_BF16, MOONLIGHT=_MOONLIGHT)
# fmt: on
CHECKS = tuple(
    Check(name, int(gpus), words, proves, like, float(tolerance), name.endswith("-killed"))
    for name, gpus, words, proves, like, tolerance in _TABLE
)


def run_checks(
    folder: Path, checks: list[Check], facts: dict[str, Any], device: str = "cuda"
) -> Iterator[tuple[Check, dict[str, Any]]]:
    """Run ``checks`` in order, and yield each with its outcome.

    Keys of an outcome: ``proves`` (from the check), ``command`` (overrides), ``records`` (of the
    run's steps), ``worst`` (largest relative difference of a loss, if losses are compared),
    ``wrong`` (why the check failed, or '') and ``seconds``.

    Args:
        folder: new folder for the runs and for ``results.json``, which has every outcome so far.
        facts: description of the machine, which ``results.json`` stores.
        device: cuda, or cpu to try the checks themselves.
    """
    records = {}
    outcomes = {}
    for check in checks:
        started = time.monotonic()
        outcome = {"proves": check.proves, "command": check.overrides(device)}
        try:
            run_dir = folder / check.name
            if check.killed:
                train_and_kill(run_dir, outcome["command"], STEPS // 2 + 1)
            records[check.name] = train(run_dir, outcome["command"])
            outcome |= judge(check, records)
        except TrialError as error:
            outcome["wrong"] = str(error)[-4000:]
        outcome["seconds"] = round(time.monotonic() - started, 1)
        outcomes[check.name] = outcome
        (folder / RESULTS).write_text(json.dumps({"machine": facts, "checks": outcomes}, indent=1))
        yield check, outcome


def judge(check: Check, records: dict[str, Records]) -> dict[str, Any]:
    """Compare a check's losses with those that it must reproduce, and return the outcome.

    Args:
        check: run that was trained; it names the check whose losses to reproduce, and a tolerance.
        records: name of a check -> its records of training steps; this check's are among them.

    Returns:
        ``records``: the records of this check's steps; ``wrong``: why it failed, or ''; ``worst``:
        largest relative difference of a loss, if losses are compared with a tolerance.
    """
    run = records[check.name]
    losses = [float(record["loss"]) for record in run]  # files have the text "NaN"
    outcome = {"records": run}
    wrong = "" if all(map(math.isfinite, losses)) else "a loss is not finite"
    if check.like and check.like not in records:
        wrong = f"nothing to compare with: {check.like} failed"
    elif check.like:
        expected = records[check.like]
        if check.tolerance == 0:
            wrong = wrong or "; ".join(differing(expected, run))
        else:
            pairs = zip(losses, expected, strict=True)
            apart = [abs(loss / float(theirs["loss"]) - 1) for loss, theirs in pairs]
            # max alone may pass over a NaN
            worst = outcome["worst"] = max(apart, key=lambda x: (math.isnan(x), x))
            if not worst <= check.tolerance:
                wrong = wrong or f"losses differ from {check.like}'s by up to {worst:.1e}"
    return outcome | {"wrong": wrong}
