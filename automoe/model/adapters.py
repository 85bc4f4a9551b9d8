"""Which parameters of a model are trained: low-rank adapters (``lora``) and freezing by name.

The file handles names and shapes alone and needs no torch. Letters: r rank, O output and I input
features (of experts: I width), E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from automoe.config.facts import BASE_BLOCKS, ELEMENT_BYTES, ROW_BYTES
from automoe.config.mesh_shape import MeshShape
from automoe.config.rules import Row
from automoe.config.schema import Config, LoraConfig
from automoe.config.tier import tier_of
from automoe.errors import listed
from automoe.model.params import LORA_GROUPS, Param, adapter_specs, layer_params, model_params

_BACKENDS = ("grouped_mm", "loop")  # expert backends that support adapters


def target_names(param: Param) -> tuple[str, ...]:
    """Return the names that ``lora.targets`` may use for this parameter: its group and its own.

    The result is empty if the parameter gets no adapter.
    """
    return () if param.spec.lora is None else (param.spec.group, param.spec.lora)


def is_target(param: Param, lora: LoraConfig) -> bool:
    """Return whether ``param`` gets an adapter."""
    return lora.rank > 0 and any(name in lora.targets for name in target_names(param))


def adapters(param: Param, rank: int) -> list[Param]:
    """Return the adapter of a target: A [r, I] and B [O, r].

    Experts have stacks of adapters, with one A for gate and up.
    """
    stack = param.shape[:1] if param.expert else ()
    shapes = (*stack, rank, param.shape[-1]), (*param.shape[:-1], rank)
    before = param.name.removesuffix(param.spec.name)
    return [
        replace(param, name=before + spec.name, shape=shape, spec=spec)
        for spec, shape in zip(adapter_specs(param.spec), shapes, strict=True)
    ]


def is_trained(name: str, config: Config) -> bool:
    """Return whether the model's own parameter ``name`` is trained.

    With LoRA only parameters in ``train.trainable`` are.
    """
    frozen = ["*"] if config.lora.rank else config.train.freeze
    return not _matches(name, frozen) or _matches(name, config.train.trainable)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def packed_shape(param: Param, config: Config) -> tuple[int, ...] | None:
    """Return the packed shape [..., rows, blocks, bytes] of a frozen matrix, or None.

    None means that ``lora.base`` does not pack the parameter.
    """
    stays = config.lora.base == "weights" or param.spec.lora is None
    if stays or is_trained(param.name, config):
        return None
    size, num_bytes = BASE_BLOCKS[config.lora.base]
    return *param.shape[:-1], -(-param.shape[-1] // size), num_bytes


def as_stored(params: list[Param], config: Config) -> list[Param]:
    """Return ``params``, with packed parameters in the shape of their bytes."""
    shapes = [packed_shape(param, config) for param in params]
    return [
        param
        if shape is None
        else replace(param, shape=shape, packed=BASE_BLOCKS[config.lora.base][0])
        for param, shape in zip(params, shapes, strict=True)
    ]


def with_adapters(params: list[Param], config: Config) -> list[Param]:
    """Return ``params``, each target followed by its adapter, with ``Param.trained`` set."""
    made: list[Param] = []
    for param in params:
        made.append(replace(param, trained=is_trained(param.name, config)))
        if is_target(param, config.lora):
            made += adapters(param, config.lora.rank)
    return made


# Parts of a layer that ``parallel.recompute`` may run again, and the part of their adapters.
_RUN_AGAIN = {"mlp": "dense_ffn", "shared_experts": "shared_experts", "moe": "routed_experts"}


def adapter_activation_bytes(
    config: Config,
    layer: int,
    tokens: int,
    expert_rows: float,
    number_bytes: int,
    recompute: frozenset[str],
) -> float:
    """Return the bytes that a layer's adapters keep for their backward pass.

    An adapter keeps ``x A.T``, r numbers per token, or per expert row for gate and up.

    Args:
        tokens: tokens of a micro-batch on one rank.
        expert_rows: (token, expert) pairs of a micro-batch on one rank.
        number_bytes: bytes of one activation number.
        recompute: parts of the layer that are recomputed.
    """
    again = {_RUN_AGAIN[name] for name in recompute if name in _RUN_AGAIN}
    kept = 0.0
    for param in layer_params(config.model, layer):
        if is_target(param, config.lora) and param.part not in again and "full" not in recompute:
            rows = expert_rows if param.expert else tokens
            if param.name.endswith("experts.down_proj"):
                rows = 0.0
            kept += config.lora.rank * rows * number_bytes
    return kept


def describe_training(config: Config) -> list[str]:
    """Return lines that say what is trained and frozen, or [] if all of the model is trained."""
    model = config.model
    lora = config.lora
    if not (lora.rank or config.train.freeze):
        return []
    own = model_params(model)
    params = with_adapters(own, config)
    trained = sum(param.numel for param in params if param.trained)
    total = sum(param.numel for param in own)
    how = f"frozen: {', '.join(config.train.freeze)}"
    of = "of"
    if lora.rank:
        how = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}"
        of = "beside"
    lines = [
        f"{how}: trains {trained:,} numbers {of} the model's {total:,} ({trained / total:.2%})"
    ]
    routers = [param for param in params if param.part == "router"]
    if routers:
        moving = [param for param in routers if param.trained]
        state = "trained in part" if moving else "frozen"
        if len(moving) == len(routers):
            state = "trained"
        biases = ", and expert biases with them" if model.router.expert_bias else ""
        names = (
            "seq_balance_coef",
            "global_balance_coef",
            "micro_batch_balance_coef",
            "z_loss_coef",
        )
        coefs = ", ".join(
            f"moe.{name}={getattr(config.moe, name):g}"
            for name in names
            if getattr(config.moe, name)
        )
        losses = f"balance losses are on ({coefs})" if coefs else "balance losses are off"
        lines.append(f"routers are {state}{biases}; {losses}")
    return lines


# Rows form a table: the key, whether its rule is broken, the rule with its numbers, the remedy.
# fmt: off

def adapter_rows(config: Config, shape: MeshShape | None = None) -> Iterator[Row]:
    """Yield the rules of ``lora``, ``train.freeze`` and ``train.trainable``.

    Rules about sharding are checked only if ``shape`` is given.
    """
    params = model_params(config.model)
    names = [param.name for param in params]
    for key, patterns in (("train.freeze", config.train.freeze), ("train.trainable", config.train.trainable)):
        for pattern in patterns:
            yield (key, not any(fnmatchcase(name, pattern) for name in names),
                   f"{pattern!r} matches no parameter of the model; its names are {listed(names)}",
                   f"Leave it out of {key}, or write a pattern such as '*.router.*'")
    moved = [param.name for param in params if is_trained(param.name, config) and not param.spec.detached]
    yield ("train.freeze", config.train.indexer == "warmup" and (bool(moved) or config.lora.rank > 0),
           f"train.indexer=warmup trains only indexers, and {len(moved)} other parameters are trained "
           f"(lora.rank={config.lora.rank})",
           "Set train.freeze=['*'], train.trainable=['*.indexer.*'] and lora.rank=0")
    how = config.parallel.expert_wgrad
    matrices = [name for name in moved if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    yield ("parallel.expert_wgrad", how != "autograd" and not matrices,
           f"{how} is for gradients of the experts' matrices, and none is trained (train.freeze={config.train.freeze})",
           "Set parallel.expert_wgrad=autograd")
    yield ("train.trainable", bool(config.train.trainable) and not (config.train.freeze or config.lora.rank),
           "it names exceptions to what is frozen, and nothing is frozen", "Set train.freeze=['*'], or lora.rank")
    if config.lora.rank:
        yield from _lora_rows(config, params)
        if config.lora.base != "weights":
            yield from _base_rows(config, params, shape)
    else:
        yield ("lora.base", config.lora.base != "weights", "it packs frozen matrices beside adapters, and lora.rank=0",
               "Set lora.rank=16, or lora.base=weights")
        yield ("train.freeze", not any(is_trained(name, config) for name in names),
               "it leaves nothing to train", "Name fewer parameters, or set train.trainable=['*.router.*']")


def _lora_rows(config: Config, params: list[Param]) -> Iterator[Row]:
    lora = config.lora
    train = config.train
    moe = config.moe
    yield "lora.alpha", not lora.alpha > 0, "an adapter's product is multiplied by alpha / rank", "Set lora.alpha=32"
    yield "lora.dropout", not 0 <= lora.dropout < 1, "a share in [0, 1)", "Set lora.dropout=0"
    known = sorted({*LORA_GROUPS}.union(*map(target_names, params)))
    for target in lora.targets:
        yield ("lora.targets", target not in known, f"this model has no {target!r}: it has {', '.join(known)}",
               "Set lora.targets=[attention,experts]")
    yield from tier_of(config.model).adapter_rows(config, params)
    yield ("lora.targets", not any(is_target(param, lora) for param in params),
           "no matrix of the model is among them", f"Choose from {', '.join(known)}")
    yield ("train.freeze", bool(train.freeze), f"with lora.rank={lora.rank} all of the model is frozen",
           "Leave train.freeze out; train.trainable names what is trained beside the adapters")
    yield ("train.fp8", train.fp8 != "off", "adapters are multiplied in train.dtype, and have no scales",
           "Set train.fp8=off, or lora.rank=0")
    yield "train.compile", train.compile, "compiled layers have no adapters", "Set train.compile=false"
    yield ("optim.master_weights", config.optim.master_weights == "stochastic",
           "adapters are few, and kept in float32", "Set optim.master_weights=float32, or lora.rank=0")
    yield ("optim.algorithm", config.optim.algorithm == "muon",
           "a product of two adapters is not what Muon orthogonalises", "Set optim.algorithm=adamw, or lora.rank=0")
    yield ("optim.moments", config.optim.moments == "bfloat16",
           "adapters are few, and their moments are kept in float32", "Set optim.moments=float32, or lora.rank=0")
    stacks = [param for param in params if param.expert and is_target(param, lora)]
    yield ("moe.experts", bool(stacks) and moe.experts not in _BACKENDS,
           f"{moe.experts} does not multiply by adapters, and lora.targets names routed experts",
           "Nearest valid choice: moe.experts=grouped_mm")
    step = ROW_BYTES // ELEMENT_BYTES[train.dtype]
    yield ("lora.rank", bool(stacks) and moe.experts == "grouped_mm" and lora.rank % step != 0,
           f"grouped products need rows of a multiple of {ROW_BYTES} bytes: {lora.rank} % {step} = {lora.rank % step}",
           f"Nearest valid choice: lora.rank={-(-lora.rank // step) * step}")
    moved = [param.name for param in stacks if is_trained(param.name, config)]
    yield ("train.trainable", bool(moved), f"{moved[0] if moved else ''} has an adapter, and routed experts have one "
           "or are trained themselves", "Leave experts out of lora.targets, or of train.trainable")
    yield ("lora.export", lora.export == "adapter" and bool(train.trainable),
           f"an adapter does not hold other trained weights (train.trainable={train.trainable})",
           "Set lora.export=merged, or train.trainable=[]")
    yield ("lora.export", lora.export == "adapter" and config.checkpoint.export_hf and not config.model.hf_path,
           "an adapter needs a checkpoint, and the model began from random weights (model.hf_path=null)",
           "Set lora.export=merged, or model.hf_path")


def _base_rows(config: Config, params: list[Param], shape: MeshShape | None) -> Iterator[Row]:
    base = config.lora.base
    moe = config.moe
    packed = [param for param in params if packed_shape(param, config) is not None]
    yield ("moe.experts", any(param.expert for param in packed) and moe.experts not in _BACKENDS,
           f"{moe.experts} multiplies by weights as they are, and lora.base={base} packs those of routed experts",
           "Nearest valid choice: moe.experts=grouped_mm")
    yield ("model.upcycle", bool(config.model.upcycle),
           f"lora.base={base} packs matrices of a checkpoint, and upcycled experts are cut from those",
           "Export the upcycled model first (automoe upcycle), or set lora.base=weights")
    if shape is None:
        return
    size, _ = BASE_BLOCKS[base]
    for param in packed:
        axis, ranks = ("etp", shape.etp) if param.expert else ("tp", shape.tp)
        cut = getattr(param.spec, axis) == len(param.shape) - 1
        columns = param.shape[-1]
        yield (f"mesh.{axis}", cut and ranks > 1 and (columns % ranks or columns // ranks % size) != 0,
               f"lora.base={base} has a scale for {size} numbers of a row, and {axis} would cut {param.name} inside "
               f"them: {columns} / {ranks} = {columns / ranks:g}, not a multiple of {size}",
               f"Set mesh.{axis}=1, or lora.base=weights")

# fmt: on
