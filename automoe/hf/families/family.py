"""What a model family declares, and the reading and writing of ``config.json`` by that. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from automoe.config.convert import typed
from automoe.config.schema import ModelConfig, RopeConfig
from automoe.errors import ConfigError
from automoe.hf.keys import KeyMap

HFConfig = dict[str, Any]
REQUIRED = object()

# Parts of the decoder that a family has only if it declares them; otherwise they stay at their defaults.
_OPTIONAL = (
    "attention.qkv_bias",
    "attention.o_bias",
    "attention.sinks",
    "attention.output_gate",
    "attention.full_attention_interval",
    "attention.linear_num_key_heads",
    "biased_experts",
    "expert_activation",
    "router.logit_bias",
    "shared_expert_gate",
    "zero_centered_norms",
    "rope.partial_rotary_factor",
)
# What would contradict the rest of a written config if it stayed from a source's: other spellings, and
# modelling code of the source's own.
_ALIASES = (
    "auto_map",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "num_local_experts",
    "num_experts",
    "num_mtp_layers",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
)
# Numbers of rope_scaling: of YaRN, with transformers' defaults, and of Llama 3, which has none.
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True)
class Field:
    """One key of ``config.json``, other names it is known by, and how its value converts."""

    key: str
    default: Any = REQUIRED
    aliases: tuple[str, ...] = ()
    read: Callable[[Any, HFConfig], Any] = lambda value, hf: value
    write: Callable[[Any, ModelConfig], Any] = lambda value, config: value


@dataclass(frozen=True)
class Family:
    """A model family as data.

    Attributes:
        model_type: as ``config.json`` names it; also ``ModelConfig.family``.
        architecture: transformers' class.
        fields: dotted key of ``ModelConfig`` -> key of ``config.json``. Where two of ours share one,
            the later one is written.
        fixed: dotted keys that the family does not leave open.
        only: keys of ``config.json`` with the one value that this decoder computes; an absent key is
            fine. Also written.
        written: keys of ``config.json`` that our files always have with this value.
        keys: tensor names of the published layout.
        rope_theta: transformers' default.
        rope_scaling: transformers' default where config.json has none; None: plain rotary embeddings.
        mscale: the attention's scale follows YaRN's mscale_all_dim (DeepSeek).
        partial_rotary: transformers' default of partial_rotary_factor; None: every dim of a head turns.
        dense: no layer has experts.
        known_as: other model_types of the same architecture.
        whole_heads: transformers wants the heads to divide the hidden size, head_dim or not.
    """

    model_type: str
    architecture: str
    fields: dict[str, Field]
    fixed: dict[str, Any]
    only: dict[str, Any]
    written: dict[str, Any] = field(default_factory=dict)
    keys: KeyMap = KeyMap()
    rope_theta: float = 10000.0
    rope_scaling: HFConfig | None = None
    mscale: bool = False
    partial_rotary: float | None = None
    dense: bool = False
    known_as: tuple[str, ...] = ()
    whole_heads: bool = False

    def read_config(self, hf: HFConfig, path: str) -> ModelConfig:
        """Our configuration for the model that ``config.json`` describes.

        Raises:
            ConfigError: a key is missing, or asks for something this decoder does not compute.
        """
        for key, value in self.only.items():
            if key in hf and hf[key] != value:
                raise not_computed(path, f"{key}={hf[key]}, and {self.model_type} here computes {key}={value} alone")
        config = ModelConfig(family=self.model_type, hf_path=path)  # type: ignore[arg-type]
        values = {ours: self._value(ours, f, hf, path) for ours, f in self.fields.items()} | self.fixed
        for ours, value in values.items():
            group, _, name = ours.rpartition(".")
            setattr(value_of(config, group) if group else config, name, value)
        if self.dense:
            config.first_k_dense = config.num_layers
        with _readable("numbers of rotary embeddings that are none", path):
            rope = self._read_rope(hf, path)
        return replace(config, rope=replace(rope, interleaved=config.rope.interleaved))

    def write_config(self, config: ModelConfig, base: HFConfig | None = None) -> HFConfig:
        """The inverse; keys of ``base`` (a source's config.json) that say nothing about the model stay.

        Raises:
            ConfigError: the model has something that the family does not.
        """
        default = ModelConfig()
        fixed = {ours: value_of(default, ours) for ours in _OPTIONAL if ours not in self.fields} | self.fixed
        if self.partial_rotary is not None:
            del fixed["rope.partial_rotary_factor"]
        if self.dense:
            fixed["first_k_dense"] = config.num_layers
        for ours, value in fixed.items():
            if value_of(config, ours) != value:
                raise ConfigError(
                    f"model.{ours}",
                    value_of(config, ours),
                    f"a {self.model_type} checkpoint can only say {value}",
                    f"Set model.{ours}={value}, or export as another model.family",
                )
        hidden, heads = config.hidden_size, config.attention.num_heads
        if self.whole_heads and hidden % heads:
            raise ConfigError(
                "model.hidden_size",
                hidden,
                f"transformers loads no {self.model_type} checkpoint unless model.attention.num_heads divides it: "
                f"{hidden} % {heads} = {hidden % heads}",
                f"Nearest valid choice: model.hidden_size={hidden - hidden % heads or heads}, or "
                "checkpoint.export_hf=false",
            )
        hf = {key: value for key, value in (base or {}).items() if key not in _ALIASES}
        hf |= {"architectures": [self.architecture], "model_type": self.model_type} | self.only | self.written
        hf |= {f.key: f.write(value_of(config, ours), config) for ours, f in self.fields.items()}
        if self.partial_rotary is not None:
            hf["partial_rotary_factor"] = config.rope.partial_rotary_factor
        hf |= _write_rope(config.rope, hf.get("max_position_embeddings"))
        if self.rope_scaling is not None and hf["rope_scaling"] is None:  # absent, it would mean the default
            hf["rope_scaling"] = {"type": "default", "rope_type": "default"}
        return hf

    def _value(self, ours: str, spec: Field, hf: HFConfig, path: str) -> Any:
        key = next((key for key in (spec.key, *spec.aliases) if key in hf), None)
        if key is None and spec.default is REQUIRED:
            raise _damaged(path, f"no {spec.key}, which a {self.model_type} model needs")
        raw = spec.default if key is None else hf[key]
        with _readable(f"{key or spec.key}={json.dumps(raw)}", path):
            value = spec.read(raw, hf)
            try:
                return typed(f"model.{ours}", value)
            except ConfigError as error:
                raise TypeError(error.rule) from None

    def _read_rope(self, hf: HFConfig, path: str) -> RopeConfig:
        """Both spellings: ``rope_theta`` with ``rope_scaling`` as published, ``rope_parameters`` of transformers 5."""
        params = hf.get("rope_parameters") or hf.get("rope_scaling") or self.rope_scaling or {}
        kind = params.get("rope_type", params.get("type", "default"))
        max_positions = int(hf.get("max_position_embeddings", 4096))
        theta = float(params.get("rope_theta") or hf.get("rope_theta") or self.rope_theta)
        partial = hf.get("partial_rotary_factor", params.get("partial_rotary_factor"))
        refused = {
            "rope type": kind if kind not in ("default", "yarn", "llama3") else None,
            "attention_factor": params.get("attention_factor"),
            "partial_rotary_factor": partial if self.partial_rotary is None and partial != 1 else None,
            "mscale_all_dim": None if self.mscale else params.get("mscale_all_dim"),
        }
        for name, value in refused.items():
            if value is not None:
                here = f"{self.model_type} here has none, plain yarn or llama3"
                raise not_computed(path, f"{name} {value} for rotary embeddings, and {here}")
        if partial is None:
            partial = self.partial_rotary
        rope = RopeConfig(
            theta=theta,
            original_seq_len=max_positions,
            partial_rotary_factor=1.0 if partial is None else float(partial),
        )
        if kind == "default":
            return rope
        original = int(params.get("original_max_position_embeddings") or max_positions)
        numbers: dict[str, Any]
        if kind == "llama3":
            if absent := [key for key in _LLAMA3 if key not in params]:
                raise _damaged(path, f"no {' and no '.join(absent)} for rope type llama3")
            numbers = {key: float(params[key]) for key in _LLAMA3}
        else:
            defaults = {"factor": max_positions / original} | _YARN
            numbers = {key: float(params.get(key) or default) for key, default in defaults.items()}
            numbers["truncate"] = params.get("truncate") is not False
        return replace(rope, scaling=kind, original_seq_len=original, **numbers)


@contextmanager
def _readable(what: str, path: str) -> Iterator[None]:
    """Values of a wrong type are found while they are converted; what is raised then names ``what``."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise _damaged(path, f"{what}: {error}") from None


def not_computed(path: object, what: str) -> ConfigError:
    """A ``config.json`` that is fine, of a model that this decoder does not compute."""
    return ConfigError("model.hf_path", path, f"its config.json has {what}", "Choose another checkpoint")


def _damaged(path: str, what: str) -> ConfigError:
    return ConfigError("model.hf_path", path, f"its config.json has {what}", "Copy the checkpoint's config.json again")


def _write_rope(rope: RopeConfig, max_positions: int | None) -> HFConfig:
    """The published spelling: older readers take the default theta where they find ``rope_parameters`` alone."""
    scaling: HFConfig = {}
    factor = 1.0
    if rope.scaling != "none":
        factor = rope.factor
        scaling = {"type": rope.scaling, "rope_type": rope.scaling, "factor": factor}
        scaling |= {"original_max_position_embeddings": rope.original_seq_len}
    if rope.scaling == "llama3":
        scaling |= {key: getattr(rope, key) for key in _LLAMA3}
    if rope.scaling == "yarn":
        scaling |= {key: getattr(rope, key) for key in _YARN if getattr(rope, key)}
        scaling |= {} if rope.truncate else {"truncate": False}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling or None,
        "max_position_embeddings": max_positions or round(factor * rope.original_seq_len),
    }


def differing_values(ours: ModelConfig, theirs: ModelConfig, family: Family) -> Iterator[str]:
    """Dotted keys that a checkpoint of ``family`` states and that have two values; not those that no layer uses."""
    scalings = {"none": (), "yarn": ("factor", "original_seq_len", *_YARN, "truncate")}
    scalings["llama3"] = ("original_seq_len", *_LLAMA3)
    keys = dict.fromkeys(("family", "num_layers", "first_k_dense", *family.fields, *family.fixed))
    names = ("theta", "interleaved", "partial_rotary_factor", "scaling", *scalings[ours.rope.scaling])
    keys |= dict.fromkeys(f"rope.{name}" for name in names)
    if ours.first_k_dense == 0:
        del keys["intermediate_size"]
    if ours.attention.full_attention_interval == 1:
        keys.pop("attention.sliding_window", None)
    return (key for key in keys if value_of(ours, key) != value_of(theirs, key))


def value_of(config: ModelConfig, key: str) -> Any:
    """The value at a dotted key of ``config``."""
    return attrgetter(key)(config)


def layer_types(other: str, default: int) -> Field:
    """``layer_types``: every how many layers one has full attention, all the rest being ``other``.

    ``default`` is the family's interval where config.json has no ``layer_types`` and no
    ``full_attention_interval``. Reading raises ``ConfigError`` where there is no interval, or a third kind.
    """

    def kinds(interval: int, num_layers: int) -> list[str]:
        return [other if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]

    def read(layers: list[str] | None, hf: HFConfig) -> int:
        if layers is None:
            return int(hf.get("full_attention_interval", default))
        full = [layer for layer, kind in enumerate(layers) if kind == "full_attention"]
        interval = full[0] + 1 if full else len(layers) + 1
        expected = kinds(interval, len(layers))
        if layers != expected:
            odd = next(layer for layer in range(len(layers)) if layers[layer] != expected[layer])
            raise not_computed(
                hf["model_type"],
                f"layer_types[{odd}]={layers[odd]}, and here every {interval} layers (the "
                f"first is layer {interval - 1}) one has full_attention, the others {other}",
            )
        return interval

    return Field("layer_types", None, read=read, write=lambda interval, config: kinds(interval, config.num_layers))


def common_fields(norm_eps: float) -> dict[str, Field]:
    """The spelling of most families, which state what they spell otherwise; ``norm_eps`` is the family's default."""
    return dense_fields(norm_eps) | {
        "num_experts_per_token": Field("num_experts_per_tok"),
        "num_experts": Field("num_experts", aliases=("num_local_experts",)),
        "moe_intermediate_size": Field("moe_intermediate_size"),
    }


def dense_fields(norm_eps: float) -> dict[str, Field]:
    """The same without what only experts need."""
    return {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("hidden_size"),
        "num_layers": Field("num_hidden_layers"),
        "intermediate_size": Field("intermediate_size"),
        "norm_eps": Field("rms_norm_eps", norm_eps),
        "tie_embeddings": Field("tie_word_embeddings", False),
        "initializer_range": Field("initializer_range", 0.02),
        "attention.num_heads": Field("num_attention_heads"),
        "attention.num_kv_heads": Field("num_key_value_heads", None, read=lambda n, hf: n or hf["num_attention_heads"]),
    }


# Fields and fixed values of more than one family.
HEAD_DIM = Field("head_dim", None, read=lambda size, hf: size or hf["hidden_size"] // hf["num_attention_heads"])
GQA = {"attention.kind": "gqa", "rope.interleaved": False}
SOFTMAX_ROUTER = {
    "router.score": "softmax",
    "router.expert_bias": False,
    "router.num_groups": 1,
    "router.routed_scaling_factor": 1.0,
}
GROUPED_ROUTER = {"router.score": "sigmoid", "router.expert_bias": True, "router.group_score_topk": 2}
