"""Rules of adapters and freezing, by the names and shapes of a model's parameters. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from automoe.config.facts import BASE_BLOCKS, ELEMENT_BYTES, ROW_BYTES
from automoe.config.mesh_shape import MeshShape
from automoe.config.rules import Row
from automoe.config.schema import Config
from automoe.config.tier import tier_of
from automoe.errors import listed
from automoe.model.adapters import is_target, is_trained, packed_shape, target_names
from automoe.model.params import LORA_GROUPS, Param, model_params

_BACKENDS = ("grouped_mm", "loop")  # expert backends that support adapters

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
