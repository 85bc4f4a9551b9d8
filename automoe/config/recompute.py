"""Which parts of which layers run again in the backward pass: ``parallel.recompute`` and its layers."""

from __future__ import annotations

from automoe.config.schema import Config, ParallelConfig
from automoe.errors import ConfigError

# What each name runs again. ``full`` is the whole layer and stands alone. ``RERUN`` run once more, forward
# and backward; of ``DISCARDED_OUTPUTS`` the outputs alone are made again, for those who read them.
RERUN = ("core_attn", "mlp", "moe", "shared_experts")
DISCARDED_OUTPUTS = ("layernorm", "mla_up_proj")
MODULES = (*RERUN, "moe_act", *DISCARDED_OUTPUTS)
# These make the experts' activation again from gate and up in any backward pass: moe_act is always done.
RECOMPUTING_EXPERTS = ("grouped_mm", "triton", "quack")
FULL = "full"


def recomputed_modules(parallel: ParallelConfig, layer: int) -> frozenset[str]:
    """Names among ``MODULES`` and ``FULL`` that layer number ``layer`` recomputes.

    Raises:
        ConfigError: ``parallel.recompute_layers`` is text other than "every N".
    """
    layers = parallel.recompute_layers
    if isinstance(layers, str):
        chosen = layer % _interval(layers) == 0
    else:
        chosen = layers is None or layer in layers
    return frozenset(_names(parallel) if chosen else ())


def _names(parallel: ParallelConfig) -> list[str]:
    return [parallel.recompute] if isinstance(parallel.recompute, str) else parallel.recompute


def _interval(text: str) -> int:
    word, _, number = text.partition(" ")
    if word != "every" or not number.isdecimal() or int(number) < 1:
        raise ConfigError(
            "parallel.recompute_layers",
            text,
            "null (all layers), a list of layer numbers, or 'every N': layers 0, N, 2N, ...",
            "Set 'parallel.recompute_layers=every 2', or [0,1]",
        )
    return int(number)


def check_recompute(config: Config) -> None:
    """Raise ``ConfigError`` for names and layers that there are not, or that would do nothing."""
    parallel, model = config.parallel, config.model
    names = _names(parallel)
    for name in names:
        if name not in (*MODULES, FULL):
            raise ConfigError(
                "parallel.recompute",
                names,
                f"no module {name!r}: the modules are {', '.join(MODULES)}, or {FULL} for the whole layer",
                f"Set parallel.recompute=[{MODULES[2]}], or {FULL}",
            )
    if len(set(names)) < len(names):
        once = list(dict.fromkeys(names))
        raise ConfigError(
            "parallel.recompute", names, "names a module twice", f"Set parallel.recompute=[{','.join(once)}]"
        )
    if FULL in names and len(names) > 1:
        raise ConfigError(
            "parallel.recompute", names, f"{FULL} is all of them and stands alone", f"Set parallel.recompute={FULL}"
        )
    absent = {
        "mlp": (model.first_k_dense == 0, "no layer has a dense FFN (model.first_k_dense=0)"),
        "moe": (
            model.first_k_dense == model.num_layers,
            f"no layer has experts: model.first_k_dense={model.first_k_dense} of {model.num_layers} layers",
        ),
        "shared_experts": (model.num_shared_experts == 0, "there are none (model.num_shared_experts=0)"),
        "mla_up_proj": (
            model.attention.kind != "mla",
            f"attention has no latents (model.attention.kind={model.attention.kind})",
        ),
    }
    absent["moe_act"] = (absent["moe"][0], absent["moe"][1])
    if config.moe.experts not in RECOMPUTING_EXPERTS and not absent["moe_act"][0]:
        absent["moe_act"] = (
            True,
            f"moe.experts={config.moe.experts} keeps the activation; {', '.join(RECOMPUTING_EXPERTS)} never do",
        )
    if "moe" in names and "moe_act" in names:
        absent["moe_act"] = (True, "moe runs the experts again, and their activation with them")
    for name in names:
        missing, why = absent.get(name, (False, ""))
        if missing:
            rest = ",".join(other for other in names if other != name)
            raise ConfigError("parallel.recompute", names, f"{name}: {why}", f"Set parallel.recompute=[{rest}]")
    _check_layers(parallel, model.num_layers, bool(names))


def _check_layers(parallel: ParallelConfig, num_layers: int, any_names: bool) -> None:
    layers, key = parallel.recompute_layers, "parallel.recompute_layers"
    if layers is None:
        return
    if not any_names:
        raise ConfigError(
            key, layers, "parallel.recompute names nothing to recompute", f"Set parallel.recompute={FULL}"
        )
    if isinstance(layers, str):
        _interval(layers)
        return
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if not outside and len(set(layers)) == len(layers):
        return
    kept = sorted({layer for layer in layers if 0 <= layer < num_layers})
    rule = "names a layer twice"
    if outside:
        rule = f"layer {outside[0]} is outside 0..{num_layers - 1} (model.num_layers={num_layers})"
    raise ConfigError(key, layers, rule, f"Nearest valid choice: {key}=[{','.join(map(str, kept))}]")
