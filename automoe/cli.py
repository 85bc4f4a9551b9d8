"""Console script ``automoe``, which runs its subcommands.

A subcommand's module is imported only when the subcommand is called.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from difflib import get_close_matches
from pathlib import Path

from automoe import __version__
from automoe.errors import exit_status, say

COMMANDS = {
    "demo": "in a minute: prove a step, break a collective, kill a run",
    "doctor": "what this machine has, and what to try first; --gpu proves GPUs",
    "train": "train a model, here or on a cluster; -m sweeps",
    "plan": "memory and batch arithmetic of a configuration, without hardware",
    "verify": "compare one step on the reference mesh and on the configured one",
    "export": "write a run's weights as a HuggingFace checkpoint",
    "convert": "rewrite a HuggingFace checkpoint: dtype, layout, quantization",
    "generate": "ask a run or a checkpoint, or chat with it in the terminal",
    "eval": "run tasks of lm-eval-harness on a run or a checkpoint",
    "upcycle": "turn a dense HuggingFace checkpoint into experts, same logits",
}
_HERE = {
    "recipe": "list the shipped training loops, or copy one to make it your own",
    "completion": "print a bash completion script",
}


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Run the subcommand that ``argv[0]`` names, with the rest of ``argv``.

    Returns the subcommand's exit status, or 2 if ``argv`` (None: ``sys.argv[1:]``) names none.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "completion":
        print(bash_completion())
        return 0
    if argv[0] == "recipe":
        from automoe.config.shipped import copy_recipe, list_recipes
        from automoe.errors import ConfigError

        argv = argv[1:]
        if argv in (["-h"], ["--help"]):
            print(_RECIPE_USAGE, end="")
        elif argv == ["list"]:
            print("\n".join(list_recipes()))
        elif argv[:1] == ["copy"] and len(argv) in (2, 3):
            try:
                path = copy_recipe(*argv[1:])
            except OSError as error:
                raise ConfigError(
                    "recipe", argv[1], f"cannot be copied: {error}", "Name another FILE"
                ) from None
            name = path.stem if path.parent == Path("recipes") else path
            print(f"copied to {path}; run it with: automoe train recipe={name}")
        else:
            print(_RECIPE_USAGE, end="", file=sys.stderr)
            return 2
        return 0
    if argv[0] == "--version":
        print(f"automoe {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        close = get_close_matches(argv[0], [*COMMANDS, *_HERE], n=1)
        meant = f". Did you mean automoe {' '.join([*close, *argv[1:]])}?" if close else ""
        say(f"error: no command {argv[0]!r}{meant}\n\n{_usage()}")
        return 2
    return importlib.import_module(f"automoe.{argv[0]}").main(argv[1:])


def _usage() -> str:
    commands = "\n".join(f"  {name:<11} {purpose}" for name, purpose in (COMMANDS | _HERE).items())
    end = "automoe COMMAND --help says more; automoe --version"
    return f"automoe COMMAND [options] [key=value ...]\n\n{commands}\n\n{end}"


_RECIPE_USAGE = """\
automoe recipe: the training loops that ship with automoe

  automoe recipe list               their names
  automoe recipe copy NAME [FILE]   copy one to ./recipes/NAME.py, or to FILE;
                                    overwrites nothing

`automoe train recipe=NAME` runs ./recipes/NAME.py where the working directory
has it, and says so, else the shipped recipe; without recipe= it runs the one of
the configuration as shipped. `automoe train recipe=FILE.py` runs that file.
"""


_TRAIN_USAGE = """\
automoe train: train a mixture-of-experts model on any mesh

  automoe train [--config-name NAME] [--config-dir DIR] [-m] [key=value ...]

  --config-name NAME   primary configuration (default: config)
  --config-dir DIR     your own YAML files, besides the built-in ones
  -m, --multirun       sweep: one run per combination of comma-separated values
  --print-config       show the composed configuration and leave
  --help [KEY]         this page, or what a section (mesh) or key (mesh.ep) is
"""

_EXAMPLES = """\
examples
  automoe train
  automoe train model=small_mixtral train.steps=50 run_dir=runs/mixtral
  automoe train mesh.pp=1 mesh.cp=2 mesh.ep=4
  automoe train -m mesh.ep=1,2,4 mesh.pp=1,2 train.steps=20
  automoe train --config-name dsv3_671b    without 1,024 GPUs it prints the plan
  torchrun --nproc-per-node 8 -m automoe.train --config-name moonlight_16b_a3b

Any key of the configuration is an override: --print-config shows them all,
--help KEY what they mean.
"""


def train_help(config_dir: str | None) -> str:
    """Return the help of ``automoe train``: usage, primary configurations, config groups, examples.

    Args:
        config_dir: further directory of configuration files; None: the built-in ones alone.
    """
    from automoe.config.compose import list_groups, list_options

    def listed(group: str, width: int) -> str:
        first = f"  {group}".ljust(width)
        options = ", ".join(list_options(group, config_dir))
        return textwrap.fill(options, 80, initial_indent=first, subsequent_indent=" " * width)

    groups = list_groups(config_dir)
    width = max(map(len, groups)) + 4
    lines = [_TRAIN_USAGE, "primary configurations", listed("", 2), ""]
    lines += ["config groups (group=option)", *(listed(group, width) for group in groups), ""]
    return "\n".join([*lines, _EXAMPLES.rstrip()])


_COMPLETION = """\
# eval "$(automoe completion)"
_automoe() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" choices="{words}"
  local word="${{line##* }}"
  case "$line" in
    *--config-name" $word" | *--config-name="${{word#*=}}") choices="{primaries}"; word="${{word#*=}}" ;;
    *" recipe copy "*) choices="{recipes}" ;;
    *" recipe "*) choices="list copy" ;;
    *" "*" "*) ;;
    *) choices="{commands}" ;;
  esac
  COMPREPLY=($(compgen -W "$choices" -- "$word"))
  case "${{COMPREPLY[0]}}" in *=) compopt -o nospace ;; esac
  # Bash splits words at "=" and replaces the last piece only.
  local head="${{word%"${{word##*=}}"}}"
  COMPREPLY=("${{COMPREPLY[@]#"$head"}}")
}}
complete -F _automoe automoe"""


def bash_completion() -> str:
    """Return the bash script for tab completion, to be used as ``eval "$(automoe completion)"``."""
    from automoe.config.compose import list_groups, list_options
    from automoe.config.convert import leaf_keys
    from automoe.config.shipped import list_recipes

    words = ["--config-name", "--config-dir", "--multirun", "--print-config", "--help"]
    words += [f"{group}={option}" for group in list_groups() for option in list_options(group)]
    words += [f"{key}=" for key in leaf_keys()]
    words += [f"recipe={name}" for name in list_recipes()]
    return _COMPLETION.format(
        words=" ".join(words),
        commands=" ".join([*COMMANDS, *_HERE]),
        primaries=" ".join(list_options()),
        recipes=" ".join(list_recipes()),
    )


if __name__ == "__main__":
    sys.exit(main())
