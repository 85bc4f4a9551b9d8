"""Rules on adapters and frozen parameters, which need the model's names and shapes. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import filter as matching

from automoe.config.facts import BASE_BLOCKS, ELEMENT_BYTES, ROW_BYTES
from automoe.config.mesh_shape import MeshShape
from automoe.config.rule_engine import Row, Scope, refused, table
from automoe.config.schema import Config
from automoe.config.tier import tier_of
from automoe.errors import listed
from automoe.model.params import LORA_GROUPS, model_params
from automoe.model.trainable import is_target, is_trained, packed_shape, target_names

# fmt: off
_FROZEN = table("""
train.freeze: facts.in_freeze | | '{facts.in_freeze}' NAMES | Leave it out of train.freeze, PATTERN
train.trainable: facts.in_trainable | | '{facts.in_trainable}' NAMES | Leave it out of train.trainable, PATTERN
train.freeze: train.indexer == warmup | facts.num_others > 0; lora.rank > 0
    | train.indexer=warmup trains only indexers, and {facts.num_others} other parameters are trained
    (lora.rank={lora.rank}) | Set train.freeze=['*'], train.trainable=['*.indexer.*'] and lora.rank=0
parallel.expert_wgrad != autograd | not facts.trains_experts
    | {parallel.expert_wgrad} is for gradients of the experts' matrices, and none is trained
    (train.freeze={train.freeze})
train.trainable | not train.freeze and lora.rank == 0
    | it names exceptions to what is frozen, and nothing is frozen | Set train.freeze=['*'], or lora.rank
lora.base != weights | lora.rank == 0 | it packs frozen matrices beside adapters, and lora.rank=0
    | Set lora.rank=16, or lora.base=weights
train.freeze | lora.path != null and lora.rank == 0
    | a resumed run reads frozen weights from model.hf_path again, without the adapter
    | Merge it with peft (merge_and_unload, save_pretrained), and name the result
train.freeze: not facts.trained | lora.rank == 0 | it leaves nothing to train
    | Name fewer parameters, or set train.trainable=['*norm*']
""",
    NAMES="matches no parameter of the model; its names are {facts.names}",
    PATTERN="or write a pattern such as '*norm*'",
)
_TARGETS = table("""
lora.alpha <= 0 | | an adapter's product is multiplied by alpha / rank
lora.dropout outside 0|1 | | a share in [0, 1)
lora.targets: facts.unknown | | this model has no '{facts.unknown}': it has {facts.known}
    | Set lora.targets=[attention,experts]
""")
_LORA = table("""
lora.targets: not facts.adapted | | no matrix of the model is among them | Choose from {facts.known}
train.freeze | lora.rank > 0 | with lora.rank={lora.rank} all of the model is frozen
    | Leave train.freeze out; train.trainable names what is trained beside the adapters
train.fp8 != off | lora.rank > 0 | adapters are multiplied in train.dtype, and have no scales
train.compile | lora.rank > 0 | compiled layers have no adapters
optim.master_weights == stochastic | lora.rank > 0 | adapters are few, and kept in float32
optim.algorithm == muon | lora.rank > 0 | a product of two adapters is not what Muon orthogonalises
optim.moments == bfloat16 | lora.rank > 0 | adapters are few, and their moments are kept in float32
moe.experts != BACKENDS | facts.adapts_experts
    | {moe.experts} does not multiply by adapters, and lora.targets names routed experts
lora.rank % facts.row | moe.experts == grouped_mm and facts.adapts_experts
    | grouped products need rows of a multiple of ROW_BYTES bytes
train.trainable: facts.twice | | {facts.twice} has an adapter, and routed experts have one or are trained themselves
    | Leave experts out of lora.targets, or of train.trainable
lora.export == adapter | train.trainable
    | an adapter does not hold other trained weights (train.trainable={train.trainable})
lora.export == adapter | checkpoint.export_hf and model.hf_path == null
    | an adapter needs a checkpoint, and the model began from random weights
    | Set lora.export=merged, or model.hf_path
moe.experts != BACKENDS | facts.packs_experts
    | {moe.experts} multiplies by weights as they are, and lora.base={lora.base} packs those of routed experts
model.upcycle | lora.base != weights
    | lora.base={lora.base} packs matrices of a checkpoint, and upcycled experts are cut from those
    | Export the upcycled model first (automoe upcycle), or set lora.base=weights
""", BACKENDS="grouped_mm|loop", ROW_BYTES=ROW_BYTES)
_CUT = """
mesh.AXIS: facts.inside | mesh.AXIS > 1
    | lora.base={lora.base} has a scale for {facts.block} numbers of a row, and AXIS would cut {facts.name} inside them:
    {facts.columns} / {mesh.AXIS} = {facts.share}, not a multiple of {facts.block}
    | Set mesh.AXIS=1, or lora.base=weights
"""
_CUTS = {axis: table(_CUT, AXIS=axis) for axis in ("tp", "etp")}
# fmt: on


def adapter_rows(config: Config, shape: MeshShape | None = None) -> Iterator[Row]:
    """Yield (key at fault, whether the rule is broken, rule, remedy) of rules on ``lora`` and frozen parameters.

    Only broken rules are yielded, so the second is always True. Rule and remedy are texts. Rules
    about sharding are checked only if the mesh ``shape`` is given.
    """
    params = model_params(config.model)
    names = [param.name for param in params]
    trained = [param.name for param in params if is_trained(param.name, config)]
    others = {param.name for param in params if not param.spec.detached}.intersection(trained)

    def unmatched(patterns: list[str]) -> str:
        return next((pattern for pattern in patterns if not matching(names, pattern)), "")

    see = Scope(config, shape or config.mesh).knowing(
        names=listed(names),
        in_freeze=unmatched(config.train.freeze),
        in_trainable=unmatched(config.train.trainable),
        trained=trained,
        num_others=len(others),
        trains_experts=any(
            name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for name in others
        ),
    )
    yield from refused(see, _FROZEN)
    if not config.lora.rank:
        return
    known = sorted({*LORA_GROUPS}.union(*map(target_names, params)))
    adapted = [param for param in params if is_target(param, config.lora)]
    stacks = [param.name for param in adapted if param.expert]
    packed = [param for param in params if packed_shape(param, config) is not None]
    see = see.knowing(
        known=", ".join(known),
        unknown=next((target for target in config.lora.targets if target not in known), ""),
        adapted=adapted,
        adapts_experts=stacks,
        row=ROW_BYTES // ELEMENT_BYTES[config.train.dtype],
        twice=next((name for name in stacks if name in trained), ""),
        packs_experts=any(param.expert for param in packed),
    )
    yield from refused(see, _TARGETS)
    yield from tier_of(config.model).adapter_rows(config, params)
    yield from refused(see, _LORA)
    for param in packed if shape is not None else ():
        axis = "etp" if param.expert else "tp"
        if getattr(param.spec, axis) == len(param.shape) - 1:
            block, _ = BASE_BLOCKS[config.lora.base]
            columns, ranks = param.shape[-1], getattr(see.mesh, axis)
            cut = see.knowing(
                name=param.name,
                columns=columns,
                block=block,
                share=f"{columns / ranks:g}",
                inside=columns % (ranks * block),
            )
            yield from refused(cut, _CUTS[axis])
