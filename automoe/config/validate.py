"""Check all rules of a configuration in milliseconds, before any rank starts and without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from automoe.config.batch import least_micro_batches
from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.pipeline import IN_ROUNDS
from automoe.config.recipe_args import check_args
from automoe.config.recompute import recompute_rows
from automoe.config.rule_engine import Row, Scope, check_rows, refused
from automoe.config.rules import number_rows
from automoe.config.rules_kernels import COMPILE, EXPERTS, fp8_rows, kernel_rows
from automoe.config.rules_model import model_rows, moe_rows
from automoe.config.rules_parallel import BATCH, WGRAD, pipeline_rows
from automoe.config.rules_settings import settings_rows
from automoe.config.schema import Config, MeshConfig
from automoe.errors import ConfigError


def validate(config: Config, num_ranks: int | None, device: str | None = None) -> MeshShape:
    """Check a whole configuration and return its resolved mesh.

    ``automoe.launch.prepare`` also checks the files that the configuration names.

    Args:
        config: composed configuration; not changed.
        num_ranks: number of ranks, from which mesh axes that are -1 follow; None if unknown.
        device: ``cpu`` or ``cuda`` if known; None takes ``launch.device``. If that is ``auto``, the
            rules that depend on the device are not checked.

    Returns:
        The mesh with every axis resolved.

    Raises:
        ConfigError: the first broken rule, with its numbers and the nearest valid choice; or the
            run directory cannot be written.
    """
    device = device or config.launch.device
    check_rows(config, number_rows(config))
    shape = resolve_mesh(config.mesh, num_ranks)
    config = replace(config, mesh=MeshConfig(**vars(shape)))
    check_rows(config, mesh_rows(config, shape, device), shape)
    check_rows(config, settings_rows(config))
    parse_profile_steps(config.observe.profile_steps)
    check_args(config)
    check_writable(config.run_dir)
    if config.moe.record_routing is not None:
        check_writable(os.path.expanduser(config.moe.record_routing), "moe.record_routing")
    return shape


# Rows are laid out as a table: key and whether it is broken, the rule with its numbers, the remedy.
# fmt: off

def mesh_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    """Yield (key, whether broken, rule, remedy) of the rules that depend on model and mesh.

    ``config`` must already obey the rules on single numbers (``number_rows``). With ``device``
    ``auto``, rules for cpu alone or cuda alone are left out.
    """
    see = Scope(config, shape, device)
    yield from model_rows(config, shape)
    yield from moe_rows(config)
    yield from refused(see, BATCH)
    yield from pipeline_rows(config, shape)
    yield from refused(see, EXPERTS, WGRAD)
    yield from fp8_rows(config, shape, device)
    yield from recompute_rows(config)
    yield from kernel_rows(config, shape, device)
    yield from refused(see, COMPILE)
    if config.train.rampup_batch_size is not None:
        yield from _rampup_rows(config, shape, device)


def _rampup_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    key, train = "train.rampup_batch_size", config.train
    ramp = train.rampup_batch_size or []
    rows = shape.dp * train.micro_batch_size
    unit = rows * (shape.pp if config.parallel.schedule in IN_ROUNDS else 1)
    first = rows * least_micro_batches(config, shape)
    least = f", start at least {first}" if first > unit else ""
    example = (f"Choose start and increment among multiples of {unit}{least}, and train.global_batch_size as start and "
               "one or more increments")
    yield key, len(ramp) != 3, f"it is [start, increment, rows], three numbers, and has {len(ramp)}", example
    start, increment, over = ramp
    grows = train.global_batch_size - start
    yield (key, start < 1 or increment < 1 or grows < increment or bool(grows % increment),
           f"from start to train.global_batch_size={train.global_batch_size} it grows by whole increments, at least one: "
           f"{train.global_batch_size} - {start} = {grows}", example)
    yield key, over < grows // increment, f"{over} rows are too few for {grows // increment} increments", example
    for rows in (start, start + increment):  # the others differ by more increments
        early = replace(config, train=replace(train, global_batch_size=rows, rampup_batch_size=None))
        for _, broken, rule, _ in mesh_rows(early, shape, device):
            yield key, broken, f"it has batches of {rows} rows, and {rule}", example

# fmt: on


def parse_profile_steps(text: str) -> tuple[int, int] | None:
    """Return the first and last step to profile; None if ``text`` is empty.

    Raises:
        ConfigError: ``text`` is neither ``first-last`` with 1 <= first <= last nor a number from 1.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match and 1 <= (first := int(match[1])) <= (last := int(match[2] or first)):
        return first, last
    raise ConfigError(
        "observe.profile_steps",
        text,
        "a window is first-last with 1 <= first <= last",
        'For example "10-12"',
    )


def check_writable(directory: str, key: str = "run_dir") -> None:
    """Raise ``ConfigError`` unless ``directory`` can be written, or created if it does not exist.

    Nothing is created.

    Args:
        key: configuration key that has ``directory`` as its value, for the error.
    """
    if not directory:
        raise ConfigError(key, directory, "names no directory", f"Set {key} to a directory")
    path = Path(directory).absolute()
    while not os.path.lexists(path):
        path = path.parent
    if not path.is_dir():
        raise ConfigError(key, directory, f"{path} is not a directory", f"Name another {key}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            key, directory, f"no permission to write in {path}", f"Name a {key} that can be written"
        )
