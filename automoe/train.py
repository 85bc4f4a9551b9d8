"""``python -m automoe.train``: parse the arguments, check the configuration, start the ranks.

Torch is imported only once the configuration is valid, or to read a checkpoint's ``config.json``
with ``transformers``. ``automoe.train(...)`` in Python calls this module, which calls
``automoe.launch.from_python.train``.

Exit status: 0 if training finished; 1 if a rank failed; 2 if the configuration or the launch is
wrong; 3 if this machine lacks the hardware (the plan is printed instead); 130, 143 or 129 if the
run was stopped by Ctrl-C, SIGTERM or SIGHUP.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from automoe.errors import ConfigError, exit_status, say

if TYPE_CHECKING:
    from automoe.config.schema import Config
    from automoe.launch.from_python import TrainResult

EXIT_NO_HARDWARE = 3


class _CallableModule(ModuleType):
    """Module type that can be called, so that ``automoe.train`` is both a module and a function.

    ``automoe.train(...)`` also works after ``import automoe.train``, which binds the module.
    """

    def __call__(
        self,
        config: Config | Mapping[str, Any] | Sequence[str] = (),
        config_name: str = "config",
        config_dir: str | os.PathLike[str] | None = None,
    ) -> TrainResult:
        """Train a model in new processes and return the run's result.

        Args:
            config: a ``Config``, a dictionary, or overrides such as ``"mesh.ep=4"``.
            config_name: primary configuration file to which overrides apply.
            config_dir: further directory of configuration files, besides the built-in one.

        Raises:
            ConfigError, DataError, CheckpointError, BackendError, LaunchError: the run could not be started.
            TrainingError: a rank failed, or a signal ended the run before its last step.
            KeyboardInterrupt: Ctrl-C stopped the run after it saved; the same call continues it.
        """
        from automoe.launch.from_python import train

        return train(config, config_name, config_dir)


sys.modules[__name__].__class__ = _CallableModule


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Run ``automoe train``: train, sweep, or print help, a configuration or a plan.

    Returns the exit status: 0 if it succeeded; 1 if a rank failed; 2 for an invalid configuration
    or launch; 3 if this machine lacks the hardware; 130, 143 or 129 after Ctrl-C, SIGTERM or
    SIGHUP.
    """
    from automoe.config.compose import parse_arguments
    from automoe.launch.external import detect_external, left_over, run_external
    from automoe.launch.worker import end_process, outlive_streams

    outlive_streams()
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    if args.help:
        from automoe.cli import train_help
        from automoe.config.compose import composed_container
        from automoe.config.recipe_args import SECTION
        from automoe.config.reference import help_on

        asked = [word for word in args.overrides if "=" not in word]
        recipe = ""
        if any(word.startswith(SECTION) for word in asked):
            typed = [word for word in args.overrides if "=" in word]
            recipe = composed_container(args.config_name, typed, args.config_dir)["recipe"]
        print("\n\n".join(help_on(word, recipe) for word in asked) or train_help(args.config_dir))
        return 0
    if (external := detect_external(os.environ)) is not None:
        status = run_external(args, external)
        # If torch is imported, this process was a rank.
        return end_process(status) if "torch" in sys.modules else status
    if names := left_over(os.environ):
        say(
            f"note: {', '.join(names)} in the environment, but neither torchrun nor srun started this process; ignored"
        )
    if args.multirun:
        from automoe.launch.sweep import run_sweep
        from automoe.planner.plan import predict

        return run_sweep(args, predict)

    from automoe.config.frozen import dump_config
    from automoe.launch.hardware import missing_hardware
    from automoe.launch.local import train_here
    from automoe.launch.prepare import prepare

    config, shape, device = prepare(args)
    if args.print_config:
        print(dump_config(config), end="")
        if (train := config.train).epochs:
            note = f"train.epochs={train.epochs:g} replaces train.steps={train.steps}"
            say(f"note: {note} once the data is read")
        return 0
    if missing := missing_hardware(shape, device, config.launch.num_ranks):
        # Print the plan and the hardware and data that this machine lacks to train it.
        from automoe.launch.prepare import check_data
        from automoe.planner.views.plan_view import print_plan

        print_plan(config, shape)
        print(f"\nThe configuration is valid; it cannot train here:\n{missing}.")
        print("On a cluster, start the same command on every node with torchrun or srun.")
        try:
            check_data(config)
        except ConfigError as lacking:
            columns = max(shutil.get_terminal_size().columns, 40)
            layout = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
            print(layout.fill(f"And it lacks data: {lacking}"))
        return EXIT_NO_HARDWARE
    return train_here(config, shape, device).exit_code


if __name__ == "__main__":
    sys.exit(main())
