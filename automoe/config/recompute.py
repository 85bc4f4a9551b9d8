"""Activation recomputation: which modules of which layers run again in the backward pass.

The keys are ``parallel.recompute`` and ``parallel.recompute_layers``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from automoe.config.pipeline import runs_halves
from automoe.config.rule_engine import Row, Scope, refused, table
from automoe.config.schema import Config, ParallelConfig

# ``full`` recomputes the whole layer and stands alone. Modules in ``RERUN`` are checkpointed: their
# forward runs again. For ``DISCARDED_OUTPUTS`` only the outputs are recomputed, for the operations
# that read them.
RERUN = ("core_attn", "mlp", "moe", "shared_experts")
DISCARDED_OUTPUTS = ("layernorm", "mla_up_proj")
MODULES = (*RERUN, "moe_act", *DISCARDED_OUTPUTS)
# These backends always recompute the experts' activation from gate and up, as moe_act asks.
RECOMPUTING_EXPERTS = ("grouped_mm", "triton")
FULL = "full"
_EVERY = re.compile(r"every (\d*[1-9]\d*)")


def recomputed_modules(parallel: ParallelConfig, layer: int) -> frozenset[str]:
    """Return the names (of ``MODULES`` and ``FULL``) that layer number ``layer`` recomputes.

    The configuration must be validated.
    """
    layers = parallel.recompute_layers
    if isinstance(layers, str):
        interval = _EVERY.fullmatch(layers)
        assert interval, "every N: config.validate"
        chosen = layer % int(interval[1]) == 0
    else:
        chosen = layers is None or layer in layers
    return frozenset(recomputed_names(parallel) if chosen else ())


def recomputed_names(parallel: ParallelConfig) -> list[str]:
    """Return ``parallel.recompute`` as a list, also if it is a single name."""
    return [parallel.recompute] if isinstance(parallel.recompute, str) else parallel.recompute


# fmt: off
_NO_EFFECT = table("""
SELECTED mlp | model.first_k_dense == 0 | mlp: no layer has a dense FFN
SELECTED moe | model.num_moe_layers == 0
    | moe: no layer has experts: model.first_k_dense={model.first_k_dense} of {model.num_layers} layers
SELECTED moe; SELECTED full | parallel.overlap_all_to_all
    | it repeats the exchange of tokens, which parallel.overlap_all_to_all would then not hide
SELECTED moe_act | model.num_moe_layers == 0
    | moe_act: no layer has experts: model.first_k_dense={model.first_k_dense} of {model.num_layers} layers
SELECTED moe_act | moe.experts != EXPERTS | moe_act: moe.experts={moe.experts} keeps the activation; NAMES do not
SELECTED moe_act | SELECTED moe | moe_act: moe runs the experts again, and their activation with them
SELECTED shared_experts | model.shared_width == 0 | shared_experts: the model has none (model.num_shared_experts=0)
SELECTED mla_up_proj | model.attention.kind != mla | mla_up_proj: attention has no latents
""", SELECTED="parallel.recompute has", EXPERTS="|".join(RECOMPUTING_EXPERTS), NAMES=", ".join(RECOMPUTING_EXPERTS))

def recompute_rows(config: Config) -> Iterator[Row]:
    """Yield rules of ``parallel.recompute``: names and layers must exist and have an effect."""
    key = "parallel.recompute"
    names = recomputed_names(config.parallel)
    model = config.model
    for name in names:
        yield (key, name not in (*MODULES, FULL),
               f"no module {name!r}: the modules are {', '.join(MODULES)}, or {FULL} for the whole layer",
               f"Set {key}=[{MODULES[2]}], or {FULL}")
    schedule = config.parallel.schedule
    if config.mesh.pp > 1 and runs_halves(schedule):
        rerun = [name for name in names if name in (*RERUN, FULL)]
        rest = ",".join(name for name in names if name not in rerun)
        yield (key, bool(rerun),
               f"{', '.join(rerun)}: the halves of a backward pass ({schedule}) each repeat the forward pass, "
               "and the second half repeats it for each weight",
               f"Set {key}=[{rest}], or parallel.schedule=Interleaved1F1B")
    once = list(dict.fromkeys(names))
    yield key, once != names, "names a module twice", f"Set {key}=[{','.join(once)}]"
    yield key, FULL in names and len(names) > 1, f"{FULL} covers all modules by itself", f"Set {key}={FULL}"
    yield from refused(Scope(config, config.mesh), _NO_EFFECT)
    key = "parallel.recompute_layers"
    num_layers = len(model.all_layers)
    layers = config.parallel.recompute_layers
    yield (key, layers is not None and not names,
           "parallel.recompute names nothing to recompute", f"Set parallel.recompute={FULL}")
    if isinstance(layers, str):
        yield (key, not _EVERY.fullmatch(layers),
               "null (all layers), a list of layer numbers, or 'every N': layers 0, N, 2N, ...",
               "Set 'parallel.recompute_layers=every 2', or [0,1]")
        return
    layers = layers or []
    numbers = sorted({layer for layer in layers if 0 <= layer < num_layers})
    nearest = f"Nearest valid choice: {key}=[{','.join(map(str, numbers))}]"
    for layer in layers:
        modules = f" and num_mtp_layers={model.num_mtp_layers}" * bool(model.num_mtp_layers)
        rule = f"layer {layer} is outside 0..{num_layers - 1} (model.num_layers={model.num_layers}{modules})"
        yield key, not 0 <= layer < num_layers, rule, nearest
    yield key, len(set(layers)) < len(layers), "names a layer twice", nearest
