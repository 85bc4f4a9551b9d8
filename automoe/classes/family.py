"""Configuration of a model that its class of ``transformers`` computes.

``FAMILY`` is registered as a plugin's family is (``automoe.config.plugins``). No torch is imported
before a checkpoint is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from automoe.classes.tier import ClassTier
from automoe.config.schema import AttentionConfig, ModelConfig
from automoe.errors import ConfigError
from automoe.hf.families.as_transformers import HFConfig, number_of
from automoe.hf.families.family import Family
from automoe.hf.keys import KeyMap

_TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"
)  # fmt: skip
# Keys that describe the source's files; a written config.json does not have them.
_OF_FILES = ("auto_map", "dtype", "torch_dtype", "quantization_config", "transformers_version")


@dataclass(frozen=True)
class ClassFamily(Family):
    """Family of a class of ``transformers``, derived from the class instead of declared."""

    def of(self, model: ModelConfig) -> Family:
        from automoe.classes.layouts import class_keys  # torch

        keys = class_keys(str(model.hf_path))
        return replace(self, architecture=model.architecture, keys=keys)

    def read_config(self, hf: HFConfig, path: str) -> ModelConfig:
        """Return the configuration that the trainer needs, derived from the class.

        Raises:
            ConfigError: the trainer cannot use the class; the message says why.
        """
        from automoe.classes.build import (  # torch
            build_causal_lm,
            decoder_layers,
            experts_modules,
            is_tied,
            refused,
        )

        model = build_causal_lm(path)
        text = model.config.get_text_config(decoder=True)
        layers = decoder_layers(model)
        experts = list(experts_modules(model).values())
        per_layer = [sum(module in experts for module in layer.modules()) for layer in layers]
        numbers = {module.num_experts for module in experts}
        if not layers or sum(per_layer) != len(experts) or max(per_layer) > 1 or len(numbers) > 1:
            counts = sorted(set(per_layer))
            what = (
                f"{len(layers)} layers with {counts} experts modules of {sorted(numbers)} experts"
            )
            raise refused(path, f"{what}; layers hold one each, with equal numbers")
        names = model.state_dict(keep_vars=True).items()
        if len({id(tensor) for _, tensor in names}) < len(names) - is_tied(model):
            raise refused(path, "modules share parameters")
        if tables := [name for name, one in names if not one.is_floating_point()]:
            raise refused(
                path, f"{tables[0]} holds whole numbers, which its files are not read for"
            )
        head = model.get_output_embeddings()
        config = ModelConfig(
            family="transformers",
            architecture=type(model).__name__,
            hf_path=path,
            vocab_size=head.out_features,
            hidden_size=head.in_features,
            num_layers=len(layers),
            first_k_dense=len(layers) - len(experts),
            tie_embeddings=is_tied(model),
            intermediate_size=number_of(text, "intermediate_size") or 1,
            attention=AttentionConfig(num_heads=1, num_kv_heads=1),
        )
        heads = number_of(text, "num_attention_heads")
        if heads:  # for counts of FLOPs
            dim = number_of(text, "head_dim") or head.in_features // heads
            config.attention = AttentionConfig(num_heads=heads, num_kv_heads=heads, head_dim=dim)
        if experts:
            top_k = next(filter(None, (number_of(text, key) for key in _TOP_K)), None)
            if top_k is None:
                what = f"none of {', '.join(_TOP_K)} says how many experts a token has"
                raise refused(path, what)
            if top_k > min(numbers):
                raise refused(path, f"a token chooses {top_k} experts of {min(numbers)}")
            widths = [size for p in experts[0].parameters() for size in p.shape[1:]]
            config.num_experts = numbers.pop()
            config.num_experts_per_token = top_k
            config.moe_intermediate_size = min(
                (size for size in widths if size != head.in_features), default=head.in_features
            )
        return config

    def write_config(self, config: ModelConfig, base: HFConfig | None = None) -> HFConfig:
        """Return the ``config.json`` of the text model, with the source's keys.

        Raises:
            ConfigError: weights are random, and the text model has no class of its own.
        """
        from automoe.classes.build import build_causal_lm  # torch

        whole = build_causal_lm(str(config.hf_path)).config
        text = whole.get_text_config(decoder=True)
        if config.random_weights and text is not whole:
            rule = f"an export would be the text model of {config.architecture}, which has no class of its own"
            remedy = "Set checkpoint.export_hf=false, or model.random_weights=false"
            raise ConfigError("model.random_weights", True, rule, remedy)
        if base is None or base.get("model_type") != text.model_type:
            base = text.to_dict()
        kept = {key: value for key, value in base.items() if key not in _OF_FILES}
        tied = {"tie_word_embeddings": config.tie_embeddings}
        return kept | {"architectures": [config.architecture]} | tied


# ``check_holds`` expects no tensor per expert, since ``keys`` are ``fused``.
FAMILY = ClassFamily("transformers", "", {}, {}, keys=KeyMap(fused=True), tier=ClassTier())
