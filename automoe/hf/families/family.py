"""Declaration of a model family, and the conversion of ``config.json`` that follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from automoe.config.convert import typed
from automoe.config.schema import ModelConfig, RopeConfig
from automoe.config.tier import Tier
from automoe.errors import ConfigError
from automoe.hf.families.as_transformers import as_transformers, damaged, not_computed
from automoe.hf.keys import KeyMap
from automoe.hf.wrapper import HFConfig

REQUIRED = object()

# A family has these parts of the decoder only if it declares them; otherwise they keep their
# defaults.
_OPTIONAL = (
    "attention.qkv_bias attention.o_bias attention.sinks attention.output_gate attention.qk_norm_over_heads "
    "attention.clip_qkv attention.multiplier attention.index_topk attention.index_interleaved attention.index_shared_layers "
    "attention.full_attention_interval attention.linear_num_key_heads attention.linear_split_projections "
    "biased_experts expert_activation hidden_act router.logit_bias shared_expert_gate shared_intermediate_size "
    "zero_centered_norms num_mtp_layers rope.partial_rotary_factor embedding_multiplier residual_multiplier "
    "logits_scaling final_logit_softcapping hc_mult router.num_hash_layers router.logit_scale moe_latent_size "
    "post_norm_eps plain_final_norm embedding_norm residual_gate_temperature attention.qk_scale_factor "
    "attention.split_output_gate attention.output_norm attention.full_attention_offset attention.nope_full_attention "
    "router.num_zero_experts moe_shortcut attention.scale_latents"
).split()
# Keys of a source's config.json that are dropped, since they could contradict the written ones:
# other spellings, and the source's own modelling code.
_ALIASES = (
    "auto_map partial_rotary_factor rope_parameters rope_scaling num_local_experts num_experts num_mtp_layers "
    "original_max_position_embeddings torch_dtype quantization_config transformers_version"
).split()
# Numbers in rope_scaling: YaRN's with transformers' defaults, Llama 3's without defaults.
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True)
class Field:
    """One key of ``config.json`` and the conversion of its value to and from ``ModelConfig``.

    Attributes:
        key: name of the key.
        default: value if neither config.json nor the class of transformers gives one; with
            ``REQUIRED`` a ``ConfigError`` is raised then.
        read: function (value in config.json, transformers' configuration object) -> value in
            ``ModelConfig``.
        write: function (value in ``ModelConfig``, the whole ``ModelConfig``) -> value in
            config.json.
    """

    key: str
    default: Any = REQUIRED
    read: Callable[[Any, Any], Any] = lambda value, hf: value
    write: Callable[[Any, ModelConfig], Any] = lambda value, config: value


@dataclass(frozen=True)
class Family(Tier):
    """Declaration of a model family: its keys in ``config.json``, tensor names and limits.

    Attributes:
        model_type: name of the family in ``config.json`` and in ``ModelConfig.family``.
        architecture: name of transformers' class.
        fields: dotted key of ``ModelConfig`` -> key of ``config.json``, a ``Field`` if it has a
            default or its value is converted. If two keys of ``ModelConfig`` have the same key in
            config.json, the later one is written.
        fixed: dotted keys of ``ModelConfig`` whose value is the same in every model of the family.
        only: key of ``config.json`` -> the only value that automoe computes. A config.json
            may lack the key, if transformers has no other default. Exports write these keys.
        written: keys of ``config.json`` that exported files always have, with their value or a
            function of the ``ModelConfig``. Other readers need them (mlx-lm, vLLM).
        unread: keys of published config.json files that change nothing here, and without which some
            readers refuse a file (mistral.rs). An export copies them from its source checkpoint;
            without a source it writes the value given here, or the result of the function of the
            ``ModelConfig`` given here.
        keys: tensor names of the published layout.
        scaled_unless_said: True if transformers scales rotary embeddings by default, that is, if
            config.json has no scaling.
        mscale: True if the attention's scale follows mscale_all_dim (DeepSeek).
        partial_rotary: True if rotary embeddings may apply to the first dims of a head only.
        dense: True if no layer has experts.
        known_as: other model_types of the same architecture.
        most, least: dotted key of ``ModelConfig`` -> largest and smallest value with which
            transformers runs a model (``least``: a model with experts). Exports refuse others.
        rotation: function of transformers' configuration object that returns the rotary settings.
    """

    model_type: str
    architecture: str
    fields: dict[str, Field | str]
    fixed: dict[str, Any]
    only: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, Any] = field(default_factory=dict)
    keys: KeyMap = KeyMap()
    scaled_unless_said: bool = False
    mscale: bool = False
    partial_rotary: bool = False
    dense: bool = False
    known_as: tuple[str, ...] = ()
    most: dict[str, float] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)
    rotation: Callable[[Any], dict[str, Any]] = attrgetter("rope_parameters")

    def of(self, model: ModelConfig) -> Family:
        """Return this family; a subclass may adapt it to the checkpoint of ``model``."""
        return self

    @staticmethod
    def mend() -> None:
        """Mend transformers' class in this process, before a model is built; a subclass may."""

    def read_config(self, hf: HFConfig, path: str) -> ModelConfig:
        """Return our configuration of the model that a ``config.json`` describes.

        Absent keys have the defaults of transformers' configuration class.

        Args:
            hf: content of config.json.
            path: its folder, for errors and as ``hf_path`` of the result.

        Raises:
            ConfigError: a key is missing, or has a value that automoe does not compute.
        """
        theirs = as_transformers(hf, self.model_type, path)
        for key, value in self.only.items():
            stated = getattr(theirs, key, value)
            if stated != value and (key, stated) != ("hidden_act", "swish"):  # silu's other name
                here = f"{self.model_type} here computes only {key}={value}"
                raise not_computed(path, f"{key}={stated}, and {here}")
        config = ModelConfig(family=self.model_type, hf_path=path)  # type: ignore[arg-type]
        values = {}
        for ours, spec in self._fields():
            raw = getattr(theirs, spec.key, spec.default)
            if raw is REQUIRED:
                raise damaged(path, f"no {spec.key}, which a {self.model_type} model needs")
            with _readable(f"{spec.key}={json.dumps(raw, default=str)}", path):
                value = spec.read(raw, theirs)
                try:
                    values[ours] = typed(f"model.{ours}", value)
                except ConfigError as error:
                    raise TypeError(error.rule) from None
        for ours, value in (values | self.fixed).items():
            _set_value(config, ours, value)
        if self.dense:
            config.first_k_dense = config.num_layers
        with _readable("values of rotary embeddings that are not numbers", path):
            rope = self._read_rope(theirs, path)
        return replace(config, rope=replace(rope, interleaved=config.rope.interleaved))

    def write_config(self, config: ModelConfig, base: HFConfig | None = None) -> HFConfig:
        """Return the ``config.json`` of ``config``, the inverse of ``read_config``.

        Args:
            base: config.json of the checkpoint that the model was loaded from, if any; its keys
                that do not describe the model are kept.

        Raises:
            ConfigError: the model has a feature that the family lacks.
        """
        default = ModelConfig()
        fixed = {
            ours: value_of(default, ours) for ours in _OPTIONAL if ours not in self.fields
        } | self.fixed
        if self.partial_rotary:
            del fixed["rope.partial_rotary_factor"]
        if not self.mscale:
            fixed["rope.mscale_all_dim"] = 0.0
        if self.dense:
            fixed["first_k_dense"] = config.num_layers
        for ours, value in fixed.items():
            if value_of(config, ours) != value:
                said = f"a {self.model_type} checkpoint can only have {value}"
                raise _not_exported(config, ours, said, value)
        loads = f"transformers loads a {self.model_type} checkpoint only"
        for ours, least in self.least.items():
            if config.num_moe_layers and value_of(config, ours) < least:
                said = f"{least} or more"
                raise _not_exported(config, ours, f"{loads} with {said}", said)
        for ours, most in self.most.items():
            if value_of(config, ours) > most:
                raise _not_exported(config, ours, f"{loads} with {most} or less", most)
        unread, written = (
            {key: value(config) if callable(value) else value for key, value in stated.items()}
            for stated in (UNREAD | self.unread, self.written)
        )
        hf = unread | {key: value for key, value in (base or {}).items() if key not in _ALIASES}
        hf |= {"architectures": [self.architecture], "model_type": self.model_type} | self.only
        hf |= written
        hf |= {
            spec.key: spec.write(value_of(config, ours), config) for ours, spec in self._fields()
        }
        if self.partial_rotary:
            hf["partial_rotary_factor"] = config.rope.partial_rotary_factor
        stated = None if config.rope.extends else hf.get("max_position_embeddings")
        hf |= _write_rope(config.rope, stated)
        if self.scaled_unless_said and hf["rope_scaling"] is None:
            hf["rope_scaling"] = {"type": "default", "rope_type": "default"}
        rotary = (base or {}).get("rope_parameters")
        if "rope_parameters" in hf and isinstance(rotary, dict):
            # A reader with vision needs the sections; for text alone all three positions are equal.
            sections = {key: value for key, value in rotary.items() if key.startswith("mrope_")}
            hf["rope_parameters"] = sections | hf["rope_parameters"]
        self._check_stated(config, hf)
        return hf

    def _check_stated(self, config: ModelConfig, hf: HFConfig) -> None:
        """Raise ``ConfigError`` if ``hf``, the config.json to write, would not be read as ``config`` again."""
        stated = deepcopy(config)
        theirs = SimpleNamespace(name_or_path=self.model_type, **hf)
        for ours, spec in self._fields():
            _set_value(stated, ours, spec.read(getattr(theirs, spec.key, spec.default), theirs))
        for key in differing_values(config, stated, self):
            value = value_of(stated, key)
            said = f"config.json of a {self.model_type} checkpoint would say {value}"
            raise _not_exported(config, key, said, str(value).lower())

    def _fields(self) -> Iterator[tuple[str, Field]]:
        for ours, spec in self.fields.items():
            yield ours, Field(spec) if isinstance(spec, str) else spec

    def _read_rope(self, theirs: Any, path: str) -> RopeConfig:
        params = self.rotation(theirs)
        max_positions = int(getattr(theirs, "max_position_embeddings", 4096))
        kind = params["rope_type"]
        partial = params.get("partial_rotary_factor", 1.0)
        known = kind in ("default", "yarn", "llama3")
        if not known or not (self.partial_rotary or partial in (1, None)):
            stated = f"rope type {kind} and partial_rotary_factor {partial} for rotary embeddings"
            here = f"{self.model_type} here takes none, plain yarn or llama3"
            raise not_computed(path, f"{stated}, and {here}")
        rope = RopeConfig(
            theta=float(params["rope_theta"]),
            original_seq_len=max_positions,
            partial_rotary_factor=float(partial),
        )
        if kind == "default":
            return rope
        stated = params["original_max_position_embeddings"]
        original = int(stated)
        if original != stated or original < 1:
            raise ValueError(f"original_max_position_embeddings={stated}")
        numbers: dict[str, Any]
        if kind == "llama3":
            numbers = {key: float(params[key]) for key in _LLAMA3}
            numbers["mscale_all_dim"] = float(self.mscale and params.get("mscale_all_dim") or 0.0)
        else:
            factor = params["factor"]
            numbers = {"factor": float(max_positions / original if factor is None else factor)}
            numbers |= {key: float(params.get(key) or default) for key, default in _YARN.items()}
            numbers["truncate"] = bool(params.get("truncate", True))
            factor_stated = params.get("attention_factor")
            numbers["attention_factor"] = None if factor_stated is None else float(factor_stated)
            if not self.mscale:  # both numbers then scale only cos and sin: one factor is enough
                both = numbers.pop("mscale"), numbers.pop("mscale_all_dim")
                if factor_stated is None and all(both):
                    from automoe.kernels.rotation import yarn_mscale

                    over, under = (yarn_mscale(numbers["factor"], scale) for scale in both)
                    numbers["attention_factor"] = over / under
        return replace(rope, scaling=kind, original_seq_len=original, **numbers)


def _not_exported(config: ModelConfig, key: str, rule: str, wanted: object) -> ConfigError:
    remedy = f"Set model.{key}={wanted}, or checkpoint.export_hf=false"
    return ConfigError(f"model.{key}", value_of(config, key), rule, remedy)


@contextmanager
def _readable(content: str, path: str) -> Iterator[None]:
    """Context that turns errors from converting a value of config.json into a ``ConfigError``.

    Args:
        content: key and value, for the message.
        path: folder of config.json.
    """
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise damaged(path, f"{content}: {error}") from None


def rope_parameters(config: ModelConfig) -> HFConfig:
    """Return the rotary settings as transformers 5 writes them under the key ``rope_parameters``."""
    written = _write_rope(config.rope, None)
    kind = written["rope_scaling"] or {"rope_type": "default"}
    partial = config.rope.partial_rotary_factor
    return (
        kind
        | {"rope_theta": config.rope.theta}
        | ({} if partial == 1 else {"partial_rotary_factor": partial})
    )


def _write_rope(rope: RopeConfig, max_positions: int | None) -> HFConfig:
    """Return config.json's rotary keys in the published spelling: ``rope_theta``, ``rope_scaling``.

    These keys are written beside ``rope_parameters``, because older readers take the default theta
    if ``rope_parameters`` stands alone.

    Args:
        max_positions: ``max_position_embeddings``; None: computed from the scaling.
    """
    scaling = {}
    factor = 1.0
    if rope.scaling != "none":
        factor = rope.factor
        scaling = {"type": rope.scaling, "rope_type": rope.scaling, "factor": factor}
        scaling |= {"original_max_position_embeddings": rope.original_seq_len}
    if rope.scaling == "llama3":
        scaling |= {key: getattr(rope, key) for key in _LLAMA3}
        if rope.mscale_all_dim:
            scaling["mscale_all_dim"] = rope.mscale_all_dim
    if rope.scaling == "yarn":
        scaling |= {key: getattr(rope, key) for key in _YARN if getattr(rope, key)}
        if not rope.truncate:
            scaling["truncate"] = False
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling or None,
        "max_position_embeddings": max_positions or round(factor * rope.original_seq_len),
    }


def differing_values(ours: ModelConfig, theirs: ModelConfig, family: Family) -> Iterator[str]:
    """Yield the dotted ``ModelConfig`` keys whose values differ between ``ours`` and ``theirs``.

    Only keys that a checkpoint of ``family`` states and that some layer uses are compared.
    """
    scaling = {"yarn": (*_YARN, "factor", "truncate", "attention_factor"), "llama3": _LLAMA3}
    names = ["theta", "interleaved", "partial_rotary_factor", "scaling"]
    if ours.rope.scaling != "none":
        names += ["original_seq_len", "mscale_all_dim", *scaling[ours.rope.scaling]]
    keys = dict.fromkeys(("family", "num_layers", "first_k_dense", *family.fields, *family.fixed))
    keys |= dict.fromkeys(f"rope.{name}" for name in names)
    if not ours.num_dense_layers:
        keys.pop("intermediate_size", None)
    if ours.attention.kind == "mla":  # each query head has a key head
        keys.pop("attention.num_kv_heads", None)
    if ours.shared_width == theirs.shared_width:
        keys.pop("num_shared_experts", None)
        keys.pop("shared_intermediate_size", None)
    if ours.attention.full_attention_interval == 1:
        keys.pop("attention.sliding_window", None)
    return (key for key in keys if value_of(ours, key) != value_of(theirs, key))


def value_of(config: ModelConfig, key: str) -> Any:
    """Return the value at a dotted key of ``config``."""
    return attrgetter(key)(config)


def _set_value(config: ModelConfig, key: str, value: Any) -> None:
    group, _, name = key.rpartition(".")
    setattr(value_of(config, group) if group else config, name, value)


def layer_types(other: str, default: Any = REQUIRED) -> Field:
    """Return the field that converts ``layer_types`` of config.json to an interval N and back.

    Every N-th layer has full attention (``full_attention_interval`` of ``ModelConfig``). Reading
    raises ``ConfigError`` if the interval is irregular or a layer is of a third kind.

    Args:
        other: kind of all other layers, such as ``linear_attention``; empty if there are none.
        default: value if config.json lacks the key.
    """

    def kinds(interval: int, num_layers: int) -> list[str]:
        return [
            other if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
        ]

    def read(layers: list[str], theirs: Any) -> int:
        interval = [*layers, "full_attention"].index("full_attention") + 1 if other else 1
        pairs = zip(layers, kinds(interval, len(layers)), strict=True)
        for layer, (kind, expected) in enumerate(pairs):
            if kind != expected:
                here = f"one in every {interval} layers has full_attention, the others {other or 'too'}"
                said = f"layer_types[{layer}]={kind}, and here {here}"
                raise not_computed(theirs.name_or_path, said)
        return interval

    return Field(
        "layer_types",
        default,
        read=read,
        write=lambda interval, config: kinds(interval, config.num_layers),
    )


def named(words: str) -> dict[str, Field | str]:
    """Return a family's ``fields`` from words ``OUR_KEY=THEIR_KEY``, separated by spaces.

    OUR_KEY is a dotted key of ``ModelConfig``, THEIR_KEY one of config.json. A word without ``=``,
    such as ``attention.head_dim``, has the part after the last dot as its key in config.json.
    """
    pairs = (word.partition("=") for word in words.split())
    return {ours: theirs or ours.rpartition(".")[2] for ours, _, theirs in pairs}


def multiple(key: str, of: Callable[[ModelConfig], int]) -> dict[str, Field]:
    """Return {``key``: ``Field``} for a dotted key of ``ModelConfig``, as part of a family's ``fields``.

    Exports raise ``ConfigError`` unless the key's value is a multiple of ``of(config)``.
    """

    def write(size: int, config: ModelConfig) -> int:
        if rest := size % of(config):
            number = of(config)
            only = (
                f"transformers loads a {config.family} checkpoint only with a multiple of {number}"
            )
            said = f"{only}: {size} % {number} = {rest}"
            raise _not_exported(config, key, said, size - rest or number)
        return size

    return {key: Field(key.rpartition(".")[2], write=write)}


KV_HEADS = Field("num_key_value_heads", None, read=lambda n, hf: n or hf.num_attention_heads)
# Of latents every head has a key, whatever a file says.
LATENT_HEADS = replace(
    KV_HEADS,
    read=lambda n, hf: hf.num_attention_heads,
    write=lambda n, config: config.attention.num_heads,
)
# Spelling of keys in most families, which declare their exceptions: first dense families, then MoE.
DENSE_FIELDS = named("vocab_size hidden_size num_layers=num_hidden_layers intermediate_size") | {
    "norm_eps": Field("rms_norm_eps", 1e-6),
    "tie_embeddings": Field("tie_word_embeddings", False),
    "initializer_range": Field("initializer_range", 0.02),
    "attention.num_heads": "num_attention_heads",
    "attention.num_kv_heads": KV_HEADS,
}
COMMON_FIELDS = DENSE_FIELDS | named(
    "num_experts_per_token=num_experts_per_tok num_experts moe_intermediate_size"
)
# ``layer_types`` may name other kinds in families whose layers all have full attention here.
FULL_ATTENTION = {"attention.full_attention_interval": layer_types("", default=())}
# MoE layers as DeepSeek-V3 declares them; its leading dense layers are given by their number.
GROUPED_MOE = (
    named("num_experts=n_routed_experts num_shared_experts=n_shared_experts")
    | {
        "first_k_dense": Field(
            "first_k_dense_replace", read=lambda n, hf: max(0, min(n, hf.num_hidden_layers))
        )
    }
    | named(
        "router.norm_topk_prob router.routed_scaling_factor router.num_groups=n_group "
        "router.topk_groups=topk_group"
    )
)
# Keys of published files that no reader here obeys (``Family.unread``): of all families, of families
# that balance experts by a loss, and of Qwen's.
UNREAD = {"attention_dropout": 0.0, "use_cache": True}
BALANCED = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
WINDOWS = {"max_window_layers": attrgetter("num_layers"), "sliding_window": None}
# Modules for multi-token prediction are stored as layers after the last one, as in DeepSeek-V3.
MTP: dict[str, Field | str] = {"num_mtp_layers": Field("num_nextn_predict_layers", 0)}

# transformers has two names of silu.
HIDDEN_ACT = Field("hidden_act", read=lambda act, hf: "silu" if act == "swish" else act)

# Several families share these fields and fixed values.
HEAD_DIM = Field(
    "head_dim", None, read=lambda size, hf: size or hf.hidden_size // hf.num_attention_heads
)
GQA = {"attention.kind": "gqa", "rope.interleaved": False}
SOFTMAX_ROUTER = {
    "router.score": "softmax",
    "router.expert_bias": False,
    "router.num_groups": 1,
    "router.routed_scaling_factor": 1.0,
}
GROUPED_ROUTER = {
    "router.score": "sigmoid",
    "router.expert_bias": True,
    "router.group_score_topk": 2,
}
# Its class scores a group by its two best experts, also if there is one group, and always has
# shared experts.
GROUPED_LEAST = {"num_experts": 2, "num_shared_experts": 1}
