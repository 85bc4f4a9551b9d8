"""``automoe demo``: one minute on a laptop that shows what automoe is for.

The demo compares all numbers of one training step on one rank and on four. It breaks one collective
on purpose and finds the difference. A short run is trained, killed, and resumed with bit-identical
results; its report is shown.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automoe.errors import ConfigError, exit_status, say
from automoe.storage.files import free_name

if TYPE_CHECKING:
    from rich.console import Console

    from automoe.verify.trajectory import Trajectory

EXIT_DIFFERENT = 1
STEPS = 30
SAVED_EVERY = 10
KILLED_AFTER = 15  # step of the first record that gets the run killed; step 10 is saved
FAULTY_RANK = 3
SMALL = (
    "model.hidden_size=64 model.num_layers=2 train.seq_len=64 train.global_batch_size=8 "
    "data.max_bytes=1000000 launch.device=cpu mesh.pp=1"
)
STEP = f"{SMALL} train.micro_batch_size=2 mesh.dp_shard=4 mesh.ep=4"
RUN = (
    f"{SMALL} train.micro_batch_size=4 mesh.ep=2 launch.num_ranks=2 train.steps={STEPS} "
    f"train.val_every={STEPS // 2} "
    "train.val_batches=2 optim.warmup_steps=5 optim.lr=3e-3 "
    f"checkpoint.every={SAVED_EVERY} checkpoint.export_hf=false"
)


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Run all parts of ``automoe demo``.

    Returns the exit status: 0 if each part had the expected result, else 1; 2 if ``--dir`` exists.
    """
    parser = argparse.ArgumentParser("automoe demo", description=__doc__.split("\n\n", 1)[1])
    parser.add_argument("--dir", type=Path, help="new folder of the two runs (default: runs/demo)")
    parser.add_argument("--no-open", action="store_true", help="leave the report closed")
    args = parser.parse_args(argv)
    folder = _new_folder(args.dir)

    from rich.console import Console

    from automoe.launch.trial_runs import TrialError

    console = Console(highlight=False)
    started = time.monotonic()
    equal = show_step(console)
    try:
        resumed = show_run(console, folder)
    except TrialError as error:
        say(f"error: a run failed: {error}")
        return EXIT_DIFFERENT
    seconds = time.monotonic() - started
    if not equal or not resumed:
        console.print(f"[red bold]something is wrong[/] after {seconds:.0f} s; see above")
        return EXIT_DIFFERENT
    report = folder / "killed" / "report.html"
    console.print(f"[bold]done[/] in {seconds:.0f} s. The report of the killed run: {report}")
    console.print("Next: automoe train, or automoe plan --config-name dsv3_671b html=plan.html")
    screen = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if screen and not args.no_open and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(report.absolute().as_uri())
    return 0


def _new_folder(wanted: Path | None) -> Path:
    """Return the demo's folder: ``wanted``, or the first free of runs/demo, runs/demo.1 ...

    Raises:
        ConfigError: ``wanted`` exists.
    """
    if wanted is not None:
        if wanted.exists():
            raise ConfigError("--dir", wanted, "exists, and nothing is overwritten", "Name another")
        return wanted
    folder = Path("runs", "demo")
    return free_name(folder, "demo") if folder.exists() else folder


# ---------------------------------------------------------------- one step


def show_step(console: Console) -> bool:
    """Compare a training step on four ranks with one rank, then again with a broken collective.

    Returns:
        True if only the second comparison found a difference.
    """
    from automoe.config.compose import parse_arguments
    from automoe.data.prepare import prepare_data
    from automoe.launch.prepare import compose
    from automoe.verify.pool import RankPool
    from automoe.verify.run import make_runnable, passes, verify_pass
    from automoe.verify.view import show_result

    config, shape, _ = make_runnable(compose(parse_arguments(STEP.split())))
    prepare_data(config)
    in_float64 = passes(config)[0]
    pool = RankPool(max_ranks=shape.world_size)
    try:
        console.print(
            "[bold]1. the same training step on one rank and on four, experts spread over all[/]"
        )
        right = verify_pass(in_float64, shape, pool)
        show_result(console, right)
        console.print(
            f"[bold]2. again, and rank {FAULTY_RANK}'s gradients get lost in reduce-scatters[/]"
        )
        wrong = verify_pass(in_float64, shape, pool, broken_trajectory)
        show_result(console, wrong)
    finally:
        pool.close()
    if wrong.different and wrong.different[0].kind == "gradient":  # in the order of a step
        console.print("The losses of both are equal: a loss curve would not have shown it.\n")
    return not right.different and bool(wrong.different)


def broken_trajectory(*args: Any, **options: Any) -> Trajectory:
    """Train some steps with broken reduce-scatters, which get zeros as gradients of rank 3.

    Args:
        args, options: arguments of ``automoe.verify.trajectory.run_trajectory``, which trains.

    Returns:
        This rank's losses, gradients and other results of the steps.
    """
    from automoe.verify.trajectory import run_trajectory

    with _lost_gradients():
        return run_trajectory(*args, **options)


@contextmanager
def _lost_gradients() -> Iterator[None]:
    import torch
    import torch.distributed as dist

    from automoe.comm.collectives import GlooReduceScatter

    right = GlooReduceScatter.__call__

    def wrong(self: Any, *, input_tensor: torch.Tensor, **options: Any) -> None:
        if dist.get_rank() == FAULTY_RANK:
            input_tensor = torch.zeros_like(input_tensor)
        right(self, input_tensor=input_tensor, **options)

    GlooReduceScatter.__call__ = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        GlooReduceScatter.__call__ = right  # type: ignore[method-assign]


# ---------------------------------------------------------------- a run


def show_run(console: Console, folder: Path) -> bool:
    """Train a run in ``folder/whole``, and again in ``folder/killed``, where it is killed and resumed.

    Returns:
        True if the loss fell by more than 1 and both runs have the same numbers in every step.
    """
    from automoe.launch.trial_runs import differing, numbers_of, train, train_and_kill

    whole = folder / "whole"
    killed = folder / "killed"
    console.print(f"[bold]3. a run of {STEPS} steps on two ranks, left alone[/]")
    console.print(f"[dim]automoe train run_dir={whole} {RUN}[/]", soft_wrap=True)
    with console.status("training"):  # on a terminal only
        expected = train(whole, f"{RUN} observe.report=false".split())
    console.print(
        f"[bold]4. the same, killed with SIGKILL after step {KILLED_AFTER}, started again[/]"
    )
    with console.status("training, to be killed"):
        at = train_and_kill(killed, RUN.split(), KILLED_AFTER)
    console.print(f"killed after step {at}; the newest checkpoint is of step {SAVED_EVERY}")
    with console.status("going on from the checkpoint"):
        got = train(killed, RUN.split())
    different = differing(expected, got)
    for name, records in (("left alone", expected), ("killed", got)):
        first, last = records[0]["loss"], records[-1]["loss"]
        console.print(f"  {name:<12}loss of step 1 {first:.4f}, of step {STEPS} {last!r}")
    if different:
        console.print(f"[red bold]DIFFERENT[/]  {', '.join(different)}\n")
    else:
        numbers = sum(map(len, map(numbers_of, expected)))
        console.print(
            f"[green bold]EQUAL[/]  to the bit: {numbers:,} numbers of {len(got)} steps\n"
        )
    return not different and expected[-1]["loss"] < expected[0]["loss"] - 1


if __name__ == "__main__":
    sys.exit(main())
