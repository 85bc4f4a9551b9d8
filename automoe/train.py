"""``python -m automoe.train``: parse, check, hand over. Torch is not imported before the configuration is valid.

Exit status: 0 done, 1 a rank failed, 2 the configuration or the launch is wrong, 3 the hardware is not
here (the plan was printed), 130 and 143 stopped by Ctrl-C and SIGTERM after saving.
"""

from __future__ import annotations

import os
import sys

from automoe.config.compose import Arguments, compose_config, parse_arguments
from automoe.config.frozen import Device, dump_config
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.errors import AutomoeError, ConfigError
from automoe.launch import environment
from automoe.launch.hardware import (
    check_backends,
    cpu_note,
    default_num_ranks,
    missing_hardware,
    resolve_device,
)
from automoe.launch.local import RunResult, launch_local
from automoe.launch.run_dir import describe_error

EXIT_WRONG, EXIT_NO_HARDWARE = 2, 3


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``automoe train``; returns the exit status."""
    try:
        return _main(parse_arguments(sys.argv[1:] if argv is None else argv))
    except AutomoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG
    except KeyboardInterrupt:
        return 130


def _main(args: Arguments) -> int:
    if args.help:
        from automoe.cli import train_help

        print(train_help(args.config_dir))
        return 0
    external = environment.detect_external(os.environ)
    if external is not None:
        from automoe.launch.external import run_external

        status = run_external(lambda: _compose_external(args, external.launcher), external)
        if "torch" in sys.modules:  # this process was a rank
            from automoe.launch.worker import end_process

            end_process(status)
        return status
    _mention_left_over()
    if args.multirun:
        from automoe.launch.sweep import run_sweep

        return run_sweep(args)
    config = compose_config(args.config_name, args.overrides, args.config_dir)
    shape, device = check(config)
    if args.print_config:
        print(dump_config(config), end="")
        return 0
    missing = missing_hardware(shape, device)
    if missing is not None:
        from automoe.plan import print_plan

        print_plan(config, shape)
        print(f"\nThe configuration is valid; it cannot train here: {missing}.")
        print("On a cluster, start the same command on every node with torchrun or srun.")
        return EXIT_NO_HARDWARE
    return train(config, shape, device).exit_code


def check(config: Config) -> tuple[MeshShape, Device]:
    """Validate a configuration that this process would launch: its mesh and device. Raises ConfigError."""
    device = resolve_device(config)
    return validate(config, default_num_ranks(config, device), device), device


def train(config: Config, shape: MeshShape, device: Device) -> RunResult:
    """Run a checked configuration on this machine and say how it ended.

    Raises:
        ConfigError, LaunchError, BackendError: the run could not be started.
    """
    check_backends(config, shape, device)
    note = cpu_note(config)
    if note is not None:
        print(note, file=sys.stderr)
    print(f"starting {shape.world_size} ranks on {device} in {config.run_dir}", flush=True)
    from automoe.data.prepare import prepare_data

    prepare_data(config)  # a bad line or a missing file is found here, before ranks start
    result = launch_local(config, shape, device)
    if result.error is not None:
        print(
            f"error: {describe_error(result.error)}\nlogs of every rank: {config.run_dir}/logs",
            file=sys.stderr,
        )
    elif result.state == "preempted":
        print("stopped before the last step, as asked", file=sys.stderr)
    if config.observe.report:
        from automoe.observe.report import write_report

        # By this process and not by rank 0: a run that died by SIGKILL has a report too.
        write_report(config.run_dir)
    return result


def _compose_external(args: Arguments, launcher: str) -> Config:
    if args.multirun:
        raise ConfigError(
            "--multirun",
            True,
            f"a sweep starts ranks of its own for every job, and {launcher} has already started them: they would "
            "all run every job, in one rendezvous that ends with the first",
            f"Run the sweep without {launcher}, or start one {launcher} per job",
        )
    return compose_config(args.config_name, args.overrides, args.config_dir)


def _mention_left_over() -> None:
    names = environment.left_over(os.environ)
    if names:
        print(
            f"note: {', '.join(names)} in the environment, but neither torchrun nor srun started this process; ignored",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
