"""``parallel.recompute`` and its layers: what may be written, and what each error says."""

from __future__ import annotations

import pytest

from automoe.config.frozen import dump_config, parse_config
from automoe.config.recompute import MODULES, recomputed_modules
from automoe.config.schema import Config, ParallelConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.verify.proxy import make_proxy
from tests.support.configurations import quick_config


def composed(*overrides: str) -> Config:
    config = quick_config(overrides=list(overrides))
    validate(config, 4)
    return config


@pytest.mark.parametrize(
    "overrides, chosen",
    [
        ([], [(), (), (), ()]),
        (["parallel.recompute=full"], [("full",)] * 4),
        (["parallel.recompute=moe"], [("moe",)] * 4),
        (["parallel.recompute=[core_attn,moe]"], [("core_attn", "moe")] * 4),
        (["parallel.recompute=[moe_act,layernorm,mla_up_proj]"], [("moe_act", "layernorm", "mla_up_proj")] * 4),
        (["parallel.recompute=[full]", "parallel.recompute_layers=every 2"], [("full",), ()] * 2),
        (["parallel.recompute=full", "parallel.recompute_layers=every 3"], [("full",), (), (), ("full",)]),
        (["parallel.recompute=full", "parallel.recompute_layers=[1,2]"], [(), ("full",), ("full",), ()]),
        (["parallel.recompute=full", "parallel.recompute_layers=[]"], [()] * 4),
    ],
)
def test_what_each_layer_recomputes(overrides: list[str], chosen: list[tuple[str, ...]]) -> None:
    config = composed(*overrides)
    assert [recomputed_modules(config.parallel, layer) for layer in range(4)] == [frozenset(n) for n in chosen]
    assert parse_config(dump_config(config)) == config


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "overrides, words",
    [
        (["parallel.recompute=[moe,attention]"], ["'attention'", *MODULES, "full"]),
        (["parallel.recompute=[moe,core_attn,moe]"], ["twice", "parallel.recompute=[moe,core_attn]"]),
        (["parallel.recompute=[full,moe]"], ["covers all modules by itself", "parallel.recompute=full"]),
        (["parallel.recompute=2"], ["a list of text or text", "int 2"]),
        (["parallel.recompute=null"], ["a list of text or text", "null"]),
        (["parallel.recompute=[mlp]", "model.first_k_dense=0"], ["mlp", "model.first_k_dense=0"]),
        (["parallel.recompute=[moe]", "model.first_k_dense=4"], ["moe", "4 of 4 layers"]),
        (
            ["parallel.recompute=[moe,shared_experts]", "model.num_shared_experts=0"],
            ["shared_experts", "model.num_shared_experts=0", "Set parallel.recompute=[moe]"],
        ),
        (
            ["parallel.recompute=[layernorm,mla_up_proj]", "model=small_qwen3_moe"],
            ["mla_up_proj", "model.attention.kind=gqa", "Set parallel.recompute=[layernorm]"],
        ),
        (
            ["parallel.recompute=[moe_act]", "moe.experts=loop"],
            ["moe_act", "moe.experts=loop keeps the activation", "grouped_mm, triton do not"],
        ),
        (["parallel.recompute=[moe_act]", "model.first_k_dense=4"], ["moe_act", "4 of 4 layers"]),
        (["parallel.recompute=[moe,moe_act]"], ["moe runs the experts again", "Set parallel.recompute=[moe]"]),
        (["parallel.recompute=[full,layernorm]"], ["covers all modules by itself", "parallel.recompute=full"]),
        (["parallel.recompute_layers=[0]"], ["parallel.recompute_layers", "names nothing to recompute"]),
        (
            ["parallel.recompute=full", "parallel.recompute_layers=[0,4]"],
            ["layer 4 is outside 0..3", "Set parallel.recompute_layers=[0]"],
        ),
        (["parallel.recompute=full", "parallel.recompute_layers=[1,1]"], ["twice", "parallel.recompute_layers=[1]"]),
        (
            ["parallel.recompute=[mlp,core_attn]", "model.first_k_dense=2", "parallel.recompute_layers=[2,3]"],
            ["none of its layers has 'mlp', which layer 0 has"],
        ),
        (
            ["parallel.recompute=[moe]", "model.first_k_dense=3", "parallel.recompute_layers=every 4"],
            ["none of its layers has 'moe', which layer 3 has"],
        ),
        (
            ["model=small_longcat", "parallel.recompute=[moe]", "parallel.recompute_layers=[1,3]"],
            ["none of its layers has 'moe', which layer 0 has"],
        ),
        (["parallel.recompute=full", "parallel.recompute_layers=2"], ["a list of whole numbers or text"]),
        (["parallel.recompute=full", "parallel.recompute_layers=every"], ["'every N'", "every 2"]),
        (["parallel.recompute=full", "parallel.recompute_layers=every 0"], ["'every N'", "every 2"]),
        (["parallel.recompute=full", "parallel.recompute_layers=each 2"], ["'every N'", "every 2"]),
    ],
)
def test_errors_name_the_rule_and_what_to_write(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        composed(*overrides)
    for word in words:
        assert word in str(raised.value)


def test_the_proxy_of_a_deep_model_recomputes_some_of_its_layers() -> None:
    for layers, expected in (([0, 2, 30], [0, 2, 3]), ([40, 50], [3]), ("every 2", "every 2"), (None, None)):
        config = composed("model.num_layers=61", "parallel.recompute=full", "mesh=fsdp")
        config.parallel.recompute_layers = layers
        shape = validate(config, 4)
        proxy, small = make_proxy(config, shape, 258)
        assert proxy.model.num_layers == 4
        assert proxy.parallel == ParallelConfig(recompute="full", recompute_layers=expected)
        assert validate(proxy, None) == small


@pytest.mark.parametrize(
    ("modules", "layers", "expected"),
    [(["moe"], [40, 42], [2]), (["mlp"], [41], [3]), (["moe", "mlp"], [0, 55], [0, 3])],
)
def test_the_proxy_of_pairs_recomputes_layers_of_the_same_kinds(
    modules: list[str], layers: list[int], expected: list[int]
) -> None:
    config = composed("model=small_longcat", "model.num_layers=56", f"parallel.recompute={modules}", "mesh=fsdp")
    config.parallel.recompute_layers = layers
    proxy, small = make_proxy(config, validate(config, 4), 264)
    assert proxy.model.num_layers == 4 and proxy.parallel.recompute_layers == expected
    assert validate(proxy, None) == small
