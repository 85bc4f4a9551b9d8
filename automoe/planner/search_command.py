"""``automoe plan search=...``: find the fastest mesh and write it as a preset for training."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from automoe.config.batch import plan_batch
from automoe.config.compose import Arguments, compose_config, key_of
from automoe.config.mesh_shape import ONE_RANK
from automoe.config.paths import user_path
from automoe.config.rule_engine import check_rows
from automoe.config.rules import number_rows
from automoe.config.schema import Config
from automoe.config.validate import check_writable, settings_rows
from automoe.errors import ConfigError, say
from automoe.launch.hardware import resolve_device, torch_lacks
from automoe.launch.prepare import compose
from automoe.planner.candidate import ONE_STAGE, Candidate, changed
from automoe.planner.memory import plan_memory
from automoe.planner.output_file import write_out
from automoe.planner.plan import gib, missing_speeds
from automoe.planner.search import Search, overrides_of, search
from automoe.storage.foreign import brief

KINDS = ("true", "fewest_gpus", "longest_context", "largest_batch")
# Key of ``train`` that a search of this kind doubles until nothing fits.
GROWN = {"longest_context": "seq_len", "largest_batch": "micro_batch_size"}
CALIBRATE = "calibrate"  # key that measures this machine instead of searching
# Keys of ``automoe plan`` that no configuration has.
OWN = ("html", "export", "search", "world", "out", CALIBRATE)
MAX_GPUS = 16_384
MAX_TOKENS = 1 << 20  # largest sequence length


@dataclass(frozen=True)
class Question:
    """Request on the command line of ``automoe plan``: a kind of search, or a calibration.

    Attributes:
        kind: ``true`` (find the best mesh), ``fewest_gpus``, ``longest_context`` (longest rows),
            ``largest_batch`` (largest micro-batch) or ``calibrate``.
        world: number of ranks; None if the search shall find it, or for a calibration.
        folder: directory for the written preset or cluster file.
    """

    kind: str
    world: int | None
    folder: Path


def take_own(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into {key: value} of the planner's own keys, and all other words.

    The keys are ``search``, ``world``, ``out``, ``export``, ``html`` and ``calibrate``.
    """
    typed = [word for word in argv if "=" in word and word.partition("=")[0] in OWN]
    return dict(word.split("=", 1) for word in typed), [word for word in argv if word not in typed]


def question_of(words: dict[str, str], config_dir: str | None = None) -> Question | None:
    """Return the search or calibration that a command line requests; None if it requests none.

    Args:
        words: value of each key of the planner itself, such as ``search`` or ``calibrate``.
        config_dir: value of ``--config-dir``; a preset is written there, since the command that
            takes it names one such folder.

    Raises:
        ConfigError: a value is invalid, or two keys exclude each other.
    """
    kind, number, measures = (words.get(key, "") for key in ("search", "world", CALIBRATE))
    exports, fewest = "export" in words, kind == "fewest_gpus"
    asks = kind or measures
    for key, broken, rule, remedy in (
        ("export", exports and words["export"] != "torchtitan", "a plan is exported for torchtitan",
         "Write export=torchtitan"),
        ("export", exports and words.keys() & {"search", CALIBRATE}, "only a plan is exported, not a search",
         "Export what was found with mesh=found_..."),
        (CALIBRATE, measures and (measures != "true" or kind or number),
         "a machine is calibrated by itself: no search, no world", "Write calibrate=true"),
        ("world", number and not asks, "this is for a search", "Add search=true"),
        ("out", words.get("out") and not asks and not exports, "this is for a search", "Add search=true"),
        ("search", kind and kind not in KINDS, f"the searches are {', '.join(KINDS)}", "Write search=true"),
        ("world", fewest and number, "search=fewest_gpus finds the number itself", "Leave world= out"),
        ("world", kind and not fewest and not number, "a search needs the number of ranks", "Add world=1024"),
    ):  # fmt: skip
        if broken:
            raise ConfigError(key, words.get(key, ""), rule, remedy)
    most = 8 * MAX_GPUS
    if number and not (number.isdecimal() and len(number) < 10 and 0 < int(number) <= most):
        rule = f"must be a number of ranks, at most {most:,}"
        raise ConfigError("world", brief(number), rule, "Write world=1024")
    if not asks:
        return None
    folder = user_path("out", words.get("out") or config_dir or "plans")
    if config_dir and kind and folder.resolve() != user_path("--config-dir", config_dir).resolve():
        rule = "a command reads one folder of configurations, and this one is not --config-dir"
        raise ConfigError("out", words["out"], rule, "Leave it out")
    return Question(kind or CALIBRATE, int(number) if number else None, folder)


def answer(question: Question, args: Arguments, as_json: bool) -> int:
    """Search or calibrate, print the result and write the best preset.

    Args:
        args: command line, with the configuration's name and overrides.
        as_json: print the best candidates as JSON.

    Returns:
        The exit status: 1 if no mesh fits, else 0.

    Raises:
        ConfigError: the configuration is invalid, its cluster lacks a speed, or a file cannot be
            written.
    """
    check_writable(str(question.folder), "out")
    if question.kind == CALIBRATE:
        from automoe.planner.calibrate import calibrate

        return calibrate(question.folder, args)
    from rich.console import Console

    from automoe.planner.views.search_view import print_search

    config = compose(args)
    check_rows(config, number_rows(config))
    check_rows(config, settings_rows(config))
    device = resolve_device(config)
    keys = {key_of(text) for text in args.overrides}
    if question.kind == "largest_batch":
        if "train.micro_batch_size" not in keys:
            config = changed(config, train={"micro_batch_size": 1})
        keys.add("train.micro_batch_size")
    fixed = sorted(keys)
    if "mesh" in keys:
        raise ConfigError(
            "mesh", "", "the search chooses it", "Leave mesh= out, or fix single axes: mesh.tp=2"
        )
    if unknown := missing_speeds(config.cluster, question.world or MAX_GPUS):
        raise ConfigError(
            "cluster",
            config.cluster.name,
            f"a search ranks by time, and cluster {config.cluster.name} has no {', '.join(unknown)}",
            "Set them in its file",
        )
    console = Console(highlight=False)
    with progress() as tell:
        rank = partial(search, device=device, fixed=fixed, tell=tell)
        config, best = _find(question, config, rank)
    if as_json:
        print(json.dumps({"found": [_as_dict(candidate) for candidate in best.found]}, indent=2))
    elif best.found:
        print_search(config, best, console)
    if not best.found:
        if as_json:  # stdout holds only the JSON object
            console = Console(stderr=True, highlight=False)
        _say_nothing_fits(best, config, console)
        return 1
    first = best.found[0]
    command = write_preset(first, question, args)
    if why := torch_lacks(first.config, first.mesh):
        say(f"note: on this machine {why}")
    if not as_json:
        console.print(f"[bold]take it[/] {command}", soft_wrap=True)
    return 0


def _find(
    question: Question, config: Config, look: Callable[[Config, int], Search]
) -> tuple[Config, Search]:
    """Search for meshes, once or repeatedly, until ``question`` is answered.

    For the fewest GPUs the number of ranks doubles until a mesh fits. For the longest rows or the
    largest micro-batch, these double as long as a mesh fits.

    Args:
        look: function of a configuration and a number of ranks, which searches for meshes.

    Returns:
        The last configuration for which a mesh was found, or ``config`` if none was, and the
        result of its search.
    """
    if question.kind == "fewest_gpus":
        least = min(least_ranks(config), MAX_GPUS)
        for world in (2**n for n in range(MAX_GPUS.bit_length()) if 2**n >= least):
            result = look(config, world)
            if result.found:
                break
        return config, result
    assert question.world is not None
    result = look(config, question.world)
    key = GROWN.get(question.kind)
    most = MAX_TOKENS if key == "seq_len" else config.train.global_batch_size
    while key and result.found and (size := 2 * getattr(config.train, key)) <= most:
        larger = changed(config, train={key: size})
        other = look(larger, question.world)
        if not other.found:
            break
        config, result = larger, other
    return config, result


def least_ranks(config: Config) -> float:
    """Return a lower bound of the number of ranks: enough for weights, moments and averages alone.

    The bound is the bytes of these three / the memory of one GPU, which may be below 1; it is 1 if
    that memory is unknown. A search with fewer ranks would find nothing.
    """
    if not config.cluster.memory_bytes:
        return 1
    plain = changed(config, parallel=ONE_STAGE)
    (rank,) = plan_memory(plain, ONE_RANK, plan_batch(config, ONE_RANK))
    return (rank.weights + rank.moments + rank.averages) / config.cluster.memory_bytes


def _say_nothing_fits(result: Search, config: Config, console: Any) -> None:
    from automoe.planner.views.search_view import print_search

    if result.missed:
        miss = min(result.missed, key=attrgetter("needed"))
        result = replace(result, found=[miss])
        why = f"a near miss needs {gib(miss.needed)} of {gib(config.cluster.memory_bytes)}"
    else:
        why = "each mesh of these ranks breaks a rule, or needs more than the memory"
    console.print(f"[bold red]nothing fits[/]: {why}")
    print_search(config, result, console)


def preset_text(best: Candidate) -> str:
    """Return the ``mesh=`` preset of ``best`` as YAML."""
    import yaml

    lines = [
        "# @package _global_",
        f"# Of {best.mesh.world_size:,} ranks of {best.config.cluster.name}, the fastest by automoe plan: "
        f"{best.speed:,.0f} tokens/s.",
        *(
            f"{key}: {yaml.safe_dump(value, default_flow_style=True, width=1000).strip()}"
            for key, value in overrides_of(best).items()
        ),
    ]
    return "\n".join(lines) + "\n"


def write_preset(best: Candidate, question: Question, args: Arguments) -> str:
    """Write a preset of ``best`` and return the ``automoe train`` command that uses it.

    The file is ``mesh/found_CONFIG_RANKS.yaml`` in ``question.folder``, with the configuration's
    name and the number of ranks.

    Args:
        args: command line of the search; the returned command repeats its overrides, except mesh.*.

    Raises:
        ConfigError: a different file exists at the path, or the file cannot be written.
    """
    name = f"found_{args.config_name}_{best.mesh.world_size}"
    folder = question.folder
    path = folder / "mesh" / f"{name}.yaml"
    values = overrides_of(best)
    text = preset_text(best)
    write_out(path, text, str(folder), str(path), "out=FOLDER")
    typed = [text for text in args.overrides if not key_of(text).startswith("mesh.")]
    if key := GROWN.get(question.kind):
        others = (text for text in typed if key_of(text) != f"train.{key}")
        typed = [*others, f"train.{key}={getattr(best.config.train, key)}"]
    composed = compose_config(args.config_name, [*typed, f"mesh={name}"], str(folder))
    for section in values:
        ours = asdict(getattr(best.config, section))
        theirs = asdict(getattr(composed, section))
        typed += [
            f"{section}.{key}={json.dumps(ours[key], separators=(',', ':'))}"
            for key in values[section]
            if ours[key] != theirs[key]
        ]
    if best.mesh.world_size != (composed.launch.num_ranks or best.mesh.world_size):
        typed.append(f"launch.num_ranks={best.mesh.world_size}")
    words = ["--config-name", args.config_name, "--config-dir", str(folder), f"mesh={name}", *typed]
    return shlex.join(["automoe", "train", *words])


def _as_dict(candidate: Candidate) -> dict[str, Any]:
    return {
        **overrides_of(candidate),
        "seq_len": candidate.config.train.seq_len,
        "time": candidate.time.to_dict(),
        "peak": candidate.peak,
        "peak_at_twice_the_even_load": candidate.uneven_peak,
        "needed_at_twice_the_even_load": candidate.needed,
    }


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], Any]]:
    """Context manager of a progress bar on stderr, if that is a terminal; gives the function that updates it.

    The function takes the name of the phase, the number of items done, and their total.
    """
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not os.isatty(2)) as bar:
        task = bar.add_task("", total=None)
        yield lambda phase, done, total: bar.update(
            task, description=phase, completed=done, total=total
        )
