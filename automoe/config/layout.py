"""Pipeline layouts in the notation of Megatron-Core, e.g. ``Et*3|(tt|)*29L``.

Letters: E embedding, t decoder layer, m module for multi-token prediction, L final norm, head and
loss; ``|`` ends a stage. ``t*3`` and ``(tt|)*29`` repeat; commas and spaces mean nothing. A stage
may be empty.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

from automoe.config.schema import Config, ParallelConfig
from automoe.errors import ConfigError

KEY = "parallel.layout"
# letters and borders of an expanded layout: more than any model has
MAX_LENGTH = 20_000
# An innermost group, or a letter that is repeated, and how often: ``*3``, ``*2*3``, or nothing
_REPEATED = re.compile(r"(?:\(([EtmL|]*)\)|([EtmL|])(?=\*\d))((?:\*\d+)*)")


def parse_layout(text: str) -> list[str]:
    """Return the letters of every pipeline stage, first stage first.

    ``Et|(t|)*2L`` gives ``["Et", "t", "t", "L"]``: E embedding, t decoder layer, m module for
    multi-token prediction, L final norm, head and loss.

    Raises:
        ConfigError: a foreign character, a parenthesis without its partner, a repetition of
            nothing, more than 20,000 letters, or letters that are not one E, then any number of t,
            then of m, then one L.
    """
    # A space between two digits stays, and is refused.
    expanded = re.sub(r"(?<![\d,\s])[,\s]+|[,\s]+(?![\d,\s])", "", text)
    while repeated := _REPEATED.search(expanded):
        letters = repeated[1] or repeated[2] or ""
        times = prod(map(int, repeated[3].split("*")[1:]))
        if len(expanded) + len(letters) * times > MAX_LENGTH:
            raise ConfigError(
                KEY, text, f"a layout has at most {MAX_LENGTH} letters", "Repeat less often"
            )
        expanded = expanded[: repeated.start()] + letters * times + expanded[repeated.end() :]
    if foreign := re.search(r"\*\d*|[^EtmL|]", expanded):
        rule = f"{foreign[0]!r} has no meaning there: a layout has E, t, m, L, |, (, ) and *n after what it repeats"
        if foreign[0] == "(":
            rule = "a ( has no )"
        raise ConfigError(KEY, text, rule, "Write it as in Et*3|(tt|)*29L")
    stages = expanded.split("|")
    order = "".join(stages)
    if not re.fullmatch(r"Et*m*L", order):
        raise ConfigError(
            KEY,
            text,
            f"a layout is one E, then a t for each layer, an m for each module, one L; this is {order}",
            "Write it as in Et*3|tt|t*3L",
        )
    return stages


def module_sizes(config: Config, num_stages: int) -> list[int]:
    """Return for each of ``num_stages`` pipeline stages its number of multi-token prediction modules.

    ``parallel.layout`` places the modules; without it all are on the last stage.
    """
    if (text := config.parallel.layout) is not None:
        return [stage.count("m") for stage in parse_layout(text)]
    return [0] * (num_stages - 1) + [config.model.num_mtp_layers]


def with_layout(config: Config) -> Config:
    """Return ``config`` with the pipeline stages that ``parallel.layout`` describes, if it is set.

    It sets ``parallel.stages_per_rank`` and ``parallel.layers_per_stage``.

    Raises:
        ConfigError: the layout is malformed, it has another number of modules for multi-token
            prediction than the model, its stages do not divide by ``mesh.pp``, ``mesh.preset`` is
            to choose ``mesh.pp``, or one of the two keys is set to something else.
    """
    text = config.parallel.layout
    if text is None:
        return config
    stages = parse_layout(text)
    sizes = [stage.count("t") for stage in stages]
    modules = "".join(stages).count("m")
    if modules != config.model.num_mtp_layers:
        raise ConfigError(
            "model.num_mtp_layers",
            config.model.num_mtp_layers,
            f"{KEY}={text} has {modules} m",
            f"Set model.num_mtp_layers={modules}, or write as many m before L",
        )
    pp = config.mesh.pp or 1
    if config.mesh.preset and not config.mesh.pp:
        raise ConfigError(
            KEY, text, "mesh.preset chooses mesh.pp by the number of ranks", "Set mesh.pp instead"
        )
    if pp < 1 or len(sizes) % pp:
        raise ConfigError(
            KEY,
            text,
            f"every rank of mesh.pp={pp} holds the same number of stages, and there are {len(sizes)}",
            f"Set mesh.pp to a divisor of {len(sizes)}, or add or remove a |",
        )
    described: dict[str, Any] = {"stages_per_rank": len(sizes) // pp, "layers_per_stage": sizes}
    for name, value in described.items():
        named = getattr(config.parallel, name)
        if named not in (getattr(ParallelConfig, name), value):
            raise ConfigError(
                f"parallel.{name}",
                named,
                f"{KEY}={text} says {value}",
                f"Leave it out, or leave out {KEY}",
            )
    return replace(config, parallel=replace(config.parallel, **described))
