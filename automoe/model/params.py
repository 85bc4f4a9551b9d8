"""The table of a model's parameters, from which every other module reads. No torch.

``automoe.model`` builds these parameters (a test compares the two). Plans, sharding, adapters,
weight decay, 8 bits and the keys of HuggingFace files are columns of the table.

Sizes (``sizes_of``) that the table writes shapes in:

    H  hidden                  V   vocabulary                  E   experts
    F  width of a dense FFN    S   width of the shared FFN     I   width of a routed expert
    L  what routed experts read and give: H, or the width of their latent
    N  query heads             G   key and value heads         D   dim of a head
    Q  rows of queries: N, or 2 N with those of a gate         r   rank of an adapter
    P  MLA: dim of a query     C, T  of it from the latent, and rotary     W  dim of a value
    Rq rank of queries         Rkv MLA: rank of keys and values
    Og, Or  compressed: groups of heads, and the rank of their outputs     Dg  width of a group
    A, O  compressed: positions of a layer's windows, and 2 if they overlap, else 1
    J, Dj  indexer: heads and their dim
    Nk, Dk  delta net: key heads and their dim     Nv, Dv  value heads and their dim
    K  delta net: width of its convolution
    Yq, Yk  width of the norm of queries, and of keys: D, or all heads together
    U  streams of hyper-connections                Ek  experts that a token chooses
    Z  zero experts, which have a router's column alone
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from math import prod

from automoe.config.schema import ModelConfig, has_indexer, has_token_table, is_linear, ratio_of
from automoe.config.tier import tier_of
from automoe.model.param_spec import PARTS, Param, ParamSpec, parse_rows

_LAYER = re.compile(r"layers\.\d+\.")


_NORMS = parse_rows("""
input_layernorm.weight          | H | 0 | norm
post_attention_layernorm.weight | H | 6 | norm
post_feedforward_layernorm.weight | H | 8 | norm when=post_norm_eps
""")
_CONNECTION = parse_rows("""
fn    | 2*U+U*U U*H | 0 | matrix when=hc_mult
base  | 2*U+U*U     | 0 | vector when=hc_mult
scale | 3           | 0 | vector when=hc_mult
gate  | H           | 0 | vector when=residual_gate_temperature
""")
# Even a norm over all heads is whole on every tp rank, since ranks may share a key head.
_GQA = parse_rows("""
q_proj.weight | Q*D H | 1 | colwise
k_proj.weight | G*D H | 1 | colwise
v_proj.weight | G*D H | 1 | colwise
gate_proj.weight | N*D H | 1 | colwise when=attention.split_output_gate
o_proj.weight | H N*D | 5 | rowwise
q_proj.bias   | Q*D   | 1 | vector tp=0 when=attention.qkv_bias
k_proj.bias   | G*D   | 1 | vector tp=0 when=attention.qkv_bias
v_proj.bias   | G*D   | 1 | vector tp=0 when=attention.qkv_bias
o_proj.bias   | H     | 5 | vector when=attention.o_bias
sinks         | N     | 3 | vector tp=0 when=attention.sinks
q_norm.weight | Yq    | 2 | norm when=attention.qk_norm_weights
k_norm.weight | Yk    | 2 | norm when=attention.qk_norm_weights
""")
_MLA = parse_rows("""
q_proj.weight             | N*P H       | 1 | colwise unless=attention.q_lora_rank
q_a_proj.weight           | Rq H        | 1 | linear when=attention.q_lora_rank
q_a_layernorm.weight      | Rq          | 2 | norm when=attention.q_lora_rank
q_b_proj.weight           | N*P Rq      | 3 | colwise when=attention.q_lora_rank
kv_a_proj_with_mqa.weight | Rkv+T H     | 1 | linear
kv_a_layernorm.weight     | Rkv         | 2 | norm
kv_b_proj.weight          | N*C+N*W Rkv | 3 | colwise
o_proj.weight             | H N*W       | 5 | rowwise
""")
_COMPRESSED = parse_rows("""
q_a_proj.weight | Rq H     | 1 | linear
q_a_norm.weight | Rq       | 2 | norm
q_b_proj.weight | N*D Rq   | 3 | colwise
kv_proj.weight  | D H      | 1 | linear
kv_norm.weight  | D        | 2 | norm
sinks           | N        | 3 | vector tp=0 when=attention.sinks
o_a_proj.weight | Og*Or Dg | 4 | matrix tp=0
o_b_proj.weight | H Og*Or  | 5 | rowwise
""")
_COMPRESSOR = parse_rows("""
kv_proj.weight   | O*D H | 1 | matrix
gate_proj.weight | O*D H | 1 | matrix
position_bias    | A O*D | 2 | vector
kv_norm.weight   | D     | 3 | norm
""")
# Replicated over tp: each rank computes its own positions. They have neither adapters nor 8 bits.
_INDEXER = tuple(
    replace(spec, detached=True)
    for spec in parse_rows("""
wq_b.weight         | J*Dj Rq | 3 | matrix
wk.weight           | Dj H    | 1 | matrix
k_norm.weight       | Dj      | 2 | norm
k_norm.bias         | Dj      | 2 | vector
weights_proj.weight | J H     | 1 | matrix
""")
)
_ENTRY_INDEXER = tuple(
    replace(spec, detached=True)
    for spec in parse_rows("""
q_b_proj.weight     | J*Dj Rq | 3 | matrix
weights_proj.weight | J H     | 1 | matrix hf=self_attn.compressor.indexer.scorer.weights_proj.weight
kv_proj.weight      | O*Dj H  | 1 | matrix
gate_proj.weight    | O*Dj H  | 1 | matrix
position_bias       | A O*Dj  | 2 | vector
kv_norm.weight      | Dj      | 3 | norm
""")
)
# A row of in_proj_ba is one number per head: neither an adapter nor 8 bits. Rows of a tp rank's heads
# lie in three places of in_proj_qkv, so the rank keeps the matrix whole.
_DELTA_NET = parse_rows("""
in_proj_qkvz.weight | 2*Nk*Dk+2*Nv*Dv H | 1 | colwise unless=attention.linear_split_projections
in_proj_ba.weight   | 2*Nv H            | 1 | matrix tp=0 unless=attention.linear_split_projections
in_proj_qkv.weight  | 2*Nk*Dk+Nv*Dv H   | 1 | linear when=attention.linear_split_projections
in_proj_z.weight    | Nv*Dv H           | 1 | colwise when=attention.linear_split_projections
in_proj_b.weight    | Nv H              | 1 | matrix tp=0 when=attention.linear_split_projections
in_proj_a.weight    | Nv H              | 1 | matrix tp=0 when=attention.linear_split_projections
conv1d.weight       | 2*Nk*Dk+Nv*Dv 1 K | 2 | conv
dt_bias             | Nv                | 2 | vector tp=0
A_log               | Nv                | 2 | vector tp=0
norm.weight         | Dv                | 4 | norm
out_proj.weight     | H Nv*Dv           | 5 | rowwise
""")
_DENSE_FFN = parse_rows("""
gate_proj.weight | F H | 7 | colwise
up_proj.weight   | F H | 7 | colwise
down_proj.weight | H F | 8 | rowwise
""")
_ROUTER = parse_rows("""
weight | E+Z H | 7 | matrix hf=mlp.gate.weight
bias   | E+Z   | 7 | vector hf=mlp.gate.bias when=router.logit_bias
""")
_BY_SCORES = parse_rows("""
expert_bias | E+Z | 7 | buffer hf=mlp.gate.e_score_correction_bias when=router.expert_bias
""")
_BY_TABLE = parse_rows("""
tid2eid | V Ek | 7 | buffer hf=mlp.gate.tid2eid
""")
_EXPERTS = parse_rows("""
gate_up_proj      | E 2 I L | 7 | experts fsdp=2 lora=gate_up_proj hf=EXPERT.gate_proj.weight,EXPERT.up_proj.weight
down_proj         | E L I   | 8 | experts fsdp=1 lora=down_proj hf=EXPERT.down_proj.weight
gate_up_proj_bias | E 2 I   | 7 | vector etp=2 fsdp=2 when=biased_experts hf=mlp.experts.gate_up_proj_bias
down_proj_bias    | E L     | 8 | vector etp=1 fsdp=1 when=biased_experts hf=mlp.experts.down_proj_bias
""")
# Replicated over tp: each rank projects its own positions.
_LATENT = parse_rows("""
pre_expert_proj.weight  | L H | 6 | linear hf=mlp.pre_expert_proj.weight when=moe_latent_size
pre_expert_norm.weight  | L   | 6 | norm hf=mlp.pre_expert_norm.weight when=moe_latent_size
post_expert_proj.weight | H L | 8 | linear hf=mlp.post_expert_proj.weight when=moe_latent_size
post_expert_norm.weight | L   | 8 | norm hf=mlp.experts.post_expert_norm.weight when=post_norm_eps
""")
# eh_proj is replicated over tp, and has neither an adapter nor 8 bits
_MTP = parse_rows("""
enorm.weight            | H     | 0 | norm
hnorm.weight            | H     | 0 | norm
eh_proj.weight          | H 2*H | 0 | matrix
shared_head.norm.weight | H     | 8 | norm
""")
# the output gate has one number per token: no adapter, not in 8 bits
_SHARED_EXPERTS = parse_rows("""
gate_proj.weight   | S H | 7 | colwise
up_proj.weight     | S H | 7 | colwise
down_proj.weight   | H S | 8 | rowwise
output_gate.weight | 1 H | 7 | matrix hf=mlp.shared_expert_gate.weight when=shared_expert_gate
""")


@dataclass(frozen=True)
class _Module:
    """A kind of submodule that some layers have, and the specs of its parameters.

    Attributes:
        path: name of the submodule within its layer.
        part: component of the model for counting parameters, one of ``PARTS``.
        when: condition on (model, layer number) under which the layer has the module.
        group: name in ``lora.targets`` of all matrices of the module.
    """

    path: str
    part: str
    specs: tuple[ParamSpec, ...]
    when: Callable[[ModelConfig, int], bool]
    group: str = ""

    @property
    def rows(self) -> list[ParamSpec]:
        """The specs of this module's parameters, with names within the layer."""
        path = f"{self.path}." if self.path else ""
        prefix = (
            "" if self.group == "attention" else f"{self.group}."
        )  # q_proj alone is unambiguous
        return [
            replace(
                spec,
                name=path + spec.name,
                part="norms" if spec.kind == "norm" else self.part,
                group=self.group,
                lora=spec.lora and prefix + spec.lora,
            )
            for spec in self.specs
        ]


def _has_delta_net(model: ModelConfig, layer: int) -> bool:
    return is_linear(model.attention, layer)


def _has_softmax(kind: str) -> Callable[[ModelConfig, int], bool]:
    return lambda model, layer: model.attention.kind == kind and not _has_delta_net(model, layer)


def _has_entries(model: ModelConfig, layer: int) -> bool:
    return ratio_of(model.attention, layer) > 0


def _indexes(kind: str) -> Callable[[ModelConfig, int], bool]:
    return lambda model, layer: model.attention.kind == kind and has_indexer(model.attention, layer)


def _is_moe(model: ModelConfig, layer: int) -> bool:
    return layer in model.moe_layers


def _selects_by_scores(model: ModelConfig, layer: int) -> bool:
    return _is_moe(model, layer) and not has_token_table(model, layer)


def _always(model: ModelConfig, layer: int) -> bool:
    return True


_MODULES = (
    _Module("", "mtp", _MTP, lambda model, layer: layer >= model.num_layers),
    _Module("attn_residual", "residual", _CONNECTION, _always),
    _Module("ffn_residual", "residual", _CONNECTION, _always),
    _Module("", "norms", _NORMS, _always),
    _Module("linear_attn", "attention", _DELTA_NET, _has_delta_net, "attention"),
    _Module("self_attn", "attention", _GQA, _has_softmax("gqa"), "attention"),
    _Module("self_attn", "attention", _MLA, _has_softmax("mla"), "attention"),
    _Module("self_attn.indexer", "attention", _INDEXER, _indexes("mla")),
    _Module("self_attn", "attention", _COMPRESSED, _has_softmax("compressed"), "attention"),
    _Module("self_attn.compressor", "attention", _COMPRESSOR, _has_entries),
    _Module("self_attn.compressor.indexer", "attention", _ENTRY_INDEXER, _indexes("compressed")),
    _Module("mlp", "dense_ffn", _DENSE_FFN, lambda *where: not _is_moe(*where), "mlp"),
    _Module("mlp.router", "router", _ROUTER, _is_moe),
    _Module("mlp.router", "router", _BY_SCORES, _selects_by_scores),
    _Module("mlp.router", "router", _BY_TABLE, has_token_table),
    _Module("mlp.latent", "latent", _LATENT, _is_moe, "latent"),
    _Module("mlp.experts", "routed_experts", _EXPERTS, _is_moe, "experts"),
    _Module(
        "mlp.shared_experts",
        "shared_experts",
        _SHARED_EXPERTS,
        lambda model, layer: _is_moe(model, layer) and model.shared_width > 0,
        "shared_experts",
    ),
)
_EMBEDDING = ParamSpec("embed_tokens.weight", "V H", tp=0, part="embedding")
_STREAMS_END = tuple(
    replace(spec, part="residual")
    for spec in parse_rows("""
hc_head.hc_fn    | U U*H | 0 | matrix
hc_head.hc_base  | U     | 0 | vector
hc_head.hc_scale | 1     | 0 | vector
""")
)
_FINAL_NORM = ParamSpec("norm.weight", "H", kind="norm", part="norms")
_HEAD = ParamSpec("lm_head.weight", "V H", tp=0, part="head")

_ROWS = [(module.when, module.rows) for module in _MODULES]
LORA_GROUPS = tuple(dict.fromkeys(module.group for module in _MODULES if module.group))
# Adapters of stacked experts: A13 multiplies the input of gate and up, B13 gives both outputs.
_EXPERT_ADAPTERS = {
    "gate_up_proj": (
        ParamSpec("lora.A13", "E r L", fsdp=2),
        ParamSpec("lora.B13", "E 2 I r", etp=2, fsdp=2),
    ),
    "down_proj": (
        ParamSpec("lora.A2", "E r I", etp=2, fsdp=2),
        ParamSpec("lora.B2", "E L r", fsdp=1),
    ),
}


@cache
def adapter_specs(target: ParamSpec) -> tuple[ParamSpec, ParamSpec]:
    """Return the specs of the LoRA matrices A and B of the weight ``target``.

    A [r, I] has the last dim of a target [O, I], B [O, r] the others; adapters of stacked experts
    have the dim E too. A dim is sharded as in the target.
    """
    path, _, last = target.name.rpartition(".")
    if last in _EXPERT_ADAPTERS:
        a, b = _EXPERT_ADAPTERS[last]
    else:
        rows, columns = target.shape.split()
        a = ParamSpec("lora.A", f"r {columns}", tp=1 if target.tp == 1 else None)
        b = ParamSpec("lora.B", f"{rows} r", tp=0 if target.tp == 0 else None)
    as_row = partial(replace, place=target.place, part=target.part)
    return as_row(a, name=f"{path}.{a.name}"), as_row(b, name=f"{path}.{b.name}")


# Rows by name within a layer or an end of the model. Rows of several kinds of attention with one name
# differ only in shape and condition.
SPECS = {spec.name: spec for spec in (_EMBEDDING, *_STREAMS_END, _FINAL_NORM, _HEAD)}
for _spec in chain.from_iterable(rows for _, rows in _ROWS):
    SPECS[_spec.name] = _spec
    SPECS |= {adapter.name: adapter for adapter in adapter_specs(_spec)} if _spec.lora else {}

_PATH = "mlp.experts."
EXPERT_SPECS = {  # rows of routed experts by their names within ``GroupedExperts``
    name.removeprefix(_PATH): spec for name, spec in SPECS.items() if name.startswith(_PATH)
}


def find_spec(name: str) -> ParamSpec | None:
    """Return the row of ``SPECS`` for a parameter's name, with or without ``layers.N.``; None if it has none."""
    return SPECS.get(_LAYER.sub("", name, count=1))


def is_wide(name: str) -> bool:
    """Return True if the parameter ``name`` is stored in at least float32 (``ParamSpec.wide``).

    Of a name that the table does not list (a model of transformers), this is true for parameters of modules called
    ``router``."""
    spec = find_spec(name)
    return ".router." in name if spec is None else spec.wide


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Return letter -> size for the letters in the table's shapes, such as "H" for the hidden size."""
    a = model.attention
    return {
        "H": model.hidden_size,
        "V": model.vocab_size,
        "E": model.num_experts,
        "Z": model.router.num_zero_experts,
        "F": model.intermediate_size,
        "S": model.shared_width,
        "I": model.moe_intermediate_size,
        "L": model.expert_hidden_size,
        "N": a.num_heads,
        "G": a.num_kv_heads,
        "D": a.head_dim,
        "Q": (1 + a.joint_output_gate) * a.num_heads,
        "P": a.qk_nope_head_dim + a.qk_rope_head_dim,
        "C": a.qk_nope_head_dim,
        "T": a.qk_rope_head_dim,
        "W": a.v_head_dim,
        "U": model.hc_mult,
        "Ek": model.num_experts_per_token,
        "Rq": a.q_lora_rank or 0,
        "Rkv": a.kv_lora_rank,
        "Og": a.o_groups,
        "Or": a.o_lora_rank,
        "Dg": a.num_heads * a.head_dim // (a.o_groups or 1),
        "J": a.index_n_heads,
        "Dj": a.index_head_dim,
        "Nk": a.linear_num_key_heads,
        "Dk": a.linear_key_head_dim,
        "Nv": a.linear_num_value_heads,
        "Dv": a.linear_value_head_dim,
        "K": a.linear_conv_kernel_dim,
        "Yq": (a.num_heads if a.qk_norm_over_heads else 1) * a.head_dim,
        "Yk": (a.num_kv_heads if a.qk_norm_over_heads else 1) * a.head_dim,
    }


def _shape_of(spec: ParamSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    def product(term: str) -> int:
        return prod(int(size) if size.isdigit() else sizes[size] for size in term.split("*"))

    return tuple(sum(map(product, dim.split("+"))) for dim in spec.shape.split())


@dataclass(frozen=True)
class ParamCount:
    """Numbers of parameters of a model.

    Attributes:
        total: number of all parameters.
        active: ``total`` without the experts that a token does not choose.
        by_part: number for each component in ``PARTS``, such as "attention".
    """

    total: int
    active: int
    by_part: dict[str, int]


def layer_params(model: ModelConfig, layer: int, buffers: bool = False) -> list[Param]:
    """Return the parameters of decoder layer ``layer``; with ``buffers`` also the router's buffers."""
    if (other := tier_of(model).params(model, buffers)) is not None:
        return [param for param in other if param.layer == layer]
    ratio = ratio_of(model.attention, layer)
    overlap = 1 + (ratio == model.attention.sparse_ratio)
    sizes = sizes_of(model) | {"A": ratio, "O": overlap}
    params = []
    for is_there, specs in _ROWS:
        for spec in specs if is_there(model, layer) else ():
            if not spec.is_in(model) or (spec.kind == "buffer" and not buffers):
                continue
            kv_heads = model.attention.num_kv_heads if spec.per_kv_head else None
            params.append(
                Param(f"layers.{layer}.{spec.name}", _shape_of(spec, sizes), spec, layer, kv_heads)
            )
    return params


def embedding_stages(model: ModelConfig, layers: list[range]) -> list[int]:
    """Return the pipeline stages that hold the embedding or a copy of it, in ascending order.

    A stage holds a copy if its modules for multi-token prediction read it, or if its head is tied.

    Args:
        layers: the numbers of the layers of each stage.
    """
    last = len(layers) - 1
    return [
        stage
        for stage, held in enumerate(layers)
        if stage == 0
        or held.stop > max(held.start, model.num_layers)
        or (stage == last and model.tie_embeddings)
    ]


def num_states(model: ModelConfig, layers: range) -> int:
    """Return the number of hidden-state tensors that a pipeline stage sends to the next stage.

    One is the model's own; each module for multi-token prediction in this or an earlier stage adds
    one.

    Args:
        layers: numbers of the layers of the stage.
    """
    return 1 + max(0, layers.stop - model.num_layers)


def stage_params(
    model: ModelConfig, layers: list[range], stage: int, buffers: bool = False
) -> list[Param]:
    """Return the parameters of pipeline stage ``stage``, in order.

    A tied head adds nothing in the stage with the embedding; in another stage it is a copy of the embedding. Stages
    with modules for multi-token prediction have a copy too. The final norm is in the stage with the first of these
    modules, else with the head. A model that transformers or a plugin computes is one stage.

    Args:
        layers: the numbers of the layers of each stage.
        buffers: include the routers' buffers: expert biases, and tables of hash layers."""
    if (other := tier_of(model).params(model, buffers)) is not None:
        return other
    first, last = stage == 0, stage == len(layers) - 1
    table = (model.vocab_size, model.hidden_size)
    embedding = Param("embed_tokens.weight", table, _EMBEDDING)
    params = []
    if stage in embedding_stages(model, layers):
        tied = model.tie_embeddings and last and not first
        params.append(replace(embedding, spec=_HEAD) if tied else embedding)
    for layer in layers[stage]:
        params += layer_params(model, layer, buffers)
    if model.num_layers in layers[stage] or (last and not model.num_mtp_layers):
        sizes = sizes_of(model)
        for spec in _STREAMS_END if model.hc_mult else ():
            params.append(Param(spec.name, _shape_of(spec, sizes), spec))
        params.append(Param("norm.weight", (model.hidden_size,), _FINAL_NORM))
    if last and not model.tie_embeddings:
        params.append(Param("lm_head.weight", table, _HEAD))
    return params


def model_params(model: ModelConfig, buffers: bool = False) -> list[Param]:
    """Return all parameters of the model, in order: embedding, layers, final norm, head.

    With ``buffers`` the routers' expert biases and tables of hash layers are included.
    """
    return stage_params(model, [model.all_layers], 0, buffers)


def count_params(model: ModelConfig) -> ParamCount:
    """Return the model's numbers of parameters: all, those a token uses, and by component."""
    by_part = dict.fromkeys(PARTS, 0)
    for param in model_params(model):
        by_part[param.part] += param.numel
    total = sum(by_part.values())
    routed = by_part["routed_experts"]
    idle = routed - routed * model.num_experts_per_token // model.num_scored_experts
    return ParamCount(total=total, active=total - idle, by_part=by_part)
