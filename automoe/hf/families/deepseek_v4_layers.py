"""DeepSeek-V4: per-layer keys of ``config.json``, and tensor names of the release."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from automoe.config.schema import ModelConfig
from automoe.hf.families.as_transformers import not_computed
from automoe.hf.families.family import Field
from automoe.hf.keys import FUSED, KeyMap

_WINDOW, _SPARSE, _HEAVY = (
    f"{kind}_attention" for kind in ("sliding", "compressed_sparse", "heavily_compressed")
)


def _read_ratios(kinds: list[str], hf: Any) -> list[int]:
    rates = hf.compress_rates
    if _HEAVY in kinds and rates[_HEAVY] == rates[_SPARSE]:
        raise not_computed(hf.name_or_path, f"compress_rates={rates}, and here two rates differ")
    return [rates[kind] if kind != _WINDOW else 0 for kind in kinds]


def _write_kinds(ratios: list[int], config: ModelConfig) -> list[str]:
    names = {0: _WINDOW, config.attention.sparse_ratio: _SPARSE}
    return [names.get(ratio, _HEAVY) for ratio in ratios]


def _write_rates(sparse: int, config: ModelConfig) -> dict[str, int]:
    heavy = {*config.attention.compress_ratios} - {0, sparse}
    return {_SPARSE: sparse, _HEAVY: min(heavy, default=32 * sparse)}


def _read_tables(kinds: list[str], hf: Any) -> int:
    count = kinds.count("hash_moe")
    if "hash_moe" in kinds[count:]:
        raise not_computed(
            hf.name_or_path, f"mlp_layer_types={kinds}, and here hash_moe comes first"
        )
    return count


def rotation(hf: Any) -> dict[str, Any]:
    """Return the rotary settings of layers with compressed keys, with ``rope_theta`` of the other layers.

    ``hf.rope_parameters`` has both. The result has ``partial_rotary_factor`` 1. YaRN's ``truncate``
    is always True, as in transformers, which looks for it outside of ``rope_parameters``. Raises
    ``ConfigError`` if the other layers have scaling or another ``partial_rotary_factor``.
    """
    main, compress = hf.rope_parameters["main"], hf.rope_parameters["compress"]
    shares = [kind.get("partial_rotary_factor", 1.0) for kind in (main, compress)]
    if main["rope_type"] != "default" or shares[0] != shares[1]:
        here = "here main is default, and both have one partial_rotary_factor"
        raise not_computed(hf.name_or_path, f"rope_parameters.main={main}, and {here}")
    other = {"rope_theta": main["rope_theta"], "partial_rotary_factor": 1.0, "truncate": True}
    return compress | other


def _of_compress(key: str, read: Any) -> Field:
    """Return a ``Field`` that reads ``key`` of config.json as ``read(settings, head_dim)``.

    A ``Field`` converts a key's value to one of ``ModelConfig``. ``settings`` are the
    ``rope_parameters`` of layers with compressed keys. If transformers' configuration object has no
    ``rope_parameters``, the value of ``key`` itself is taken.
    """
    return Field(
        key,
        read=lambda value, hf: (
            read(hf.rope_parameters["compress"], hf.head_dim)
            if hasattr(hf, "rope_parameters")
            else value
        ),
    )


# Parts of transformers' names and of the released ones, in the order in which they are replaced.
_RELEASE = """
.compressor.indexer.scorer .indexer, .compressor.indexer.q_b_proj .indexer.wq_b, .compressor.indexer .indexer.compressor,
compressor.kv_norm compressor.norm, compressor.gate_proj compressor.wgate, self_attn attn, .mlp. .ffn.,
q_a_proj wq_a, q_a_norm q_norm, q_b_proj wq_b, .kv_proj .wkv, o_a_proj wo_a, o_b_proj wo_b, sinks attn_sink,
position_bias ape, gate_proj w1, up_proj w3, down_proj w2, e_score_correction_bias bias, attn_hc. hc_attn_,
ffn_hc. hc_ffn_, input_layernorm attn_norm, post_attention_layernorm ffn_norm, lm_head head
"""
_PARTS = tuple(tuple(pair.split()) for pair in _RELEASE.split(","))
_TABLES = ("gate.tid2eid",)
_CONNECTIONS = {
    f"{part}_residual.{name}": f"{part}_hc.{name}"
    for part in ("attn", "ffn")
    for name in ("fn", "base", "scale")
}
_RELEASED = KeyMap(
    _CONNECTIONS,
    renames=(*_PARTS, ("embed_tokens", "embed"), ("hc_head.hc_", "hc_head_"), ("model.", "")),
    integers=_TABLES,
)
# transformers saves some of its own names among the released ones
_SAVED = replace(_RELEASED, renames=(*_PARTS, ("attn.kv_norm", "attn.norm")))
KEYS = replace(
    _RELEASED,
    layouts=(_RELEASED, _SAVED, replace(FUSED, rows=FUSED.rows | _CONNECTIONS, integers=_TABLES)),
)
LAYERS = {
    "attention.compress_ratios": Field("layer_types", read=_read_ratios, write=_write_kinds),
    "attention.sparse_ratio": Field(
        "compress_rates", read=lambda rates, hf: rates[_SPARSE], write=_write_rates
    ),
    "attention.compress_rope_theta": _of_compress(
        "compress_rope_theta", lambda rotary, dim: float(rotary["rope_theta"])
    ),
    "attention.qk_rope_head_dim": _of_compress(
        "qk_rope_head_dim", lambda rotary, dim: int(dim * rotary.get("partial_rotary_factor", 1))
    ),
    "router.num_hash_layers": Field(
        "mlp_layer_types",
        read=_read_tables,
        write=lambda count, config: ["hash_moe"] * count + ["moe"] * (config.num_layers - count),
    ),
}
