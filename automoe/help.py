"""The text of ``--help``: what there is to choose from, read from the conf tree."""

from __future__ import annotations

from automoe.config.compose import list_groups, list_options

_USAGE = """\
automoe train: train a mixture-of-experts model on any mesh

  python -m automoe.train [--config-name NAME] [--config-dir DIR] [-m] [key=value ...]

  --config-name NAME   primary configuration (default: config)
  --config-dir DIR     directory with your own YAML files, besides the built-in ones
  -m, --multirun       sweep: one run per combination of comma-separated values
  --print-config       show the composed configuration and leave
"""

_EXAMPLES = """\
examples
  python -m automoe.train
  python -m automoe.train model=small_mixtral train.steps=50 run_dir=runs/mixtral
  python -m automoe.train mesh.pp=1 mesh.cp=2 mesh.ep=4
  python -m automoe.train -m mesh.ep=1,2,4 mesh.pp=1,2 train.steps=20
  python -m automoe.train --config-name dsv3_671b          prints the plan where there are no 1024 GPUs
  torchrun --nproc-per-node 8 -m automoe.train --config-name moonlight_16b_a3b

Any key of the configuration is an override: --print-config shows them all.
"""


def train_help(config_dir: str | None = None) -> str:
    """Usage, primaries, groups and examples of ``automoe train``."""
    primaries = "primary configurations\n  " + ", ".join(list_options("", config_dir)) + "\n"
    groups = list_groups(config_dir)
    width = max(map(len, groups))
    lines = [f"  {group:<{width}}  {', '.join(list_options(group, config_dir))}" for group in groups]
    return "\n".join([_USAGE, primaries, "config groups (group=option)", *lines, "", _EXAMPLES.rstrip()])
