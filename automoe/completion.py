"""Tab completion of the console script: commands, options, config groups and keys."""

from __future__ import annotations

from automoe.cli import COMMANDS
from automoe.config.compose import list_groups, list_options
from automoe.config.convert import leaf_keys

_SCRIPT = """\
# eval "$(automoe completion)"
_automoe() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" choices="{words}"
  local word="${{line##* }}"
  case "$line" in
    *--config-name" $word" | *--config-name="${{word#*=}}") choices="{primaries}"; word="${{word#*=}}" ;;
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
    """A bash script to be evaluated in the user's shell."""
    options = [f"{group}={option}" for group in list_groups() for option in list_options(group)]
    words = ["--config-name", "--config-dir", "--multirun", "--print-config", "--help", *options]
    words += [f"{key}=" for key in leaf_keys()]
    commands, primaries = " ".join(COMMANDS), " ".join(list_options())
    return _SCRIPT.format(commands=commands, primaries=primaries, words=" ".join(words))
