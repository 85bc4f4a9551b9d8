"""Activation recomputation: which modules of which layers run again in the backward pass.

The keys are ``parallel.recompute`` and ``parallel.recompute_layers``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from automoe.config.pipeline import IN_HALVES, V_SHAPED
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
    """Return the names of the modules that ``layer`` recomputes; {'full'} for the whole layer.

    Args:
        parallel: section ``parallel`` of a validated configuration.
        layer: number of the layer.
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
    """Return the module names of ``parallel.recompute`` as a list, even if it is a single name."""
    return [parallel.recompute] if isinstance(parallel.recompute, str) else parallel.recompute


# fmt: off
_NAMES = table("""
parallel.recompute: facts.unknown | | no module '{facts.unknown}': the modules are MODULES, or FULL for the whole layer
    | Set parallel.recompute=[FIRST], or FULL
parallel.recompute: facts.rerun | mesh.pp > 1 and parallel.schedule == HALVED
    | {facts.rerun}: the halves of a backward pass ({parallel.schedule}) each repeat the forward pass, and the second half
    repeats it for each weight | Set parallel.recompute={facts.rest}, or parallel.schedule=Interleaved1F1B
parallel.recompute: facts.once != parallel.recompute | facts.listed | names a module twice
    | Set parallel.recompute={facts.once}
parallel.recompute has FULL | facts.others | FULL covers all modules by itself | Set parallel.recompute=FULL
""", MODULES=", ".join(MODULES), FULL=FULL, FIRST=MODULES[2], HALVED="|".join((*IN_HALVES, *V_SHAPED)))
_NO_EFFECT = table("""
SELECTED mlp | model.num_dense_layers == 0 | mlp: no layer has a dense FFN (model.first_k_dense=0)
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

_LAYERS = table("""
parallel.recompute_layers != null | not parallel.recompute | parallel.recompute names nothing to recompute
    | Set parallel.recompute=full
parallel.recompute_layers: facts.no_interval |
    | null (all layers), a list of layer numbers, or 'every N': layers 0, N, 2N, ...
    | Set 'parallel.recompute_layers=every 2', or [0,1]
parallel.recompute_layers: facts.outside != null |
    | layer {facts.outside} is outside 0..{facts.last} (model.num_layers={model.num_layers} and
    num_mtp_layers={model.num_mtp_layers}) | Set parallel.recompute_layers={facts.inside}
parallel.recompute_layers: facts.twice | | names a layer twice | Set parallel.recompute_layers={facts.inside}
parallel.recompute_layers: facts.idle | | none of its layers has '{facts.idle}', which layer {facts.having} has
    | Leave it out of parallel.recompute, or name layers that have it
""")
# fmt: on


def recompute_rows(config: Config) -> Iterator[Row]:
    """Yield (key, broken=True, rule, remedy) of broken rules on ``parallel.recompute``.

    Modules and layers must exist, and recomputing them must have an effect.
    """
    parallel, names = config.parallel, recomputed_names(config.parallel)
    all_layers = config.model.all_layers
    chosen = parallel.recompute_layers
    layers = chosen if isinstance(chosen, list) else []
    interval = _EVERY.fullmatch(chosen) if isinstance(chosen, str) else None
    repeated = set(layers or all_layers[:: int(interval[1]) if interval else 1])
    lacking = {"mlp": {*config.model.moe_layers}}
    lacking |= dict.fromkeys(("moe", "moe_act", "shared_experts"), {*all_layers} - lacking["mlp"])
    idle = next((name for name in names if chosen and repeated <= lacking.get(name, set())), "")
    see = Scope(config, config.mesh).knowing(
        unknown=next((name for name in names if name not in (*MODULES, FULL)), ""),
        rerun=", ".join(name for name in names if name in (*RERUN, FULL)),
        rest=[name for name in names if name not in (*RERUN, FULL)],
        listed=names is parallel.recompute,
        once=list(dict.fromkeys(names)),
        others=len(names) > 1,
        no_interval=isinstance(chosen, str) and not interval,
        outside=next((layer for layer in layers if layer not in all_layers), None),
        last=len(all_layers) - 1,
        inside=sorted(set(layers).intersection(all_layers)),
        twice=len(set(layers)) < len(layers),
        idle=idle,
        having=next((layer for layer in all_layers if layer not in lacking.get(idle, ())), None),
    )
    yield from refused(see, _NAMES, _NO_EFFECT, _LAYERS)
