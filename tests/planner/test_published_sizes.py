"""Parameter counts of every published model, against its checkpoint's own and against the numbers in its name."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from automoe.config.schema import ModelConfig
from automoe.config.shipped import shipped_folder
from automoe.model.params import count_params, layer_params
from tests.support.configurations import quick_model

CONF = shipped_folder("conf") / "model"

# What the checkpoint's safetensors hold, scales of quantized ones apart; and how many multi-token-prediction
# modules that is with: without tables of their own, with their own embedding and head.
CHECKPOINTS = {
    "dsv3_671b": (671_026_419_200, 0, 0),
    "kimi_k2_1t_a32b": (1_026_408_232_448, 0, 0),
    "dsv2_lite_16b_a2b": (15_706_484_224, 0, 0),
    "dsv2_236b_a21b": (235_741_434_880, 0, 0),
    "qwen3_30b_a3b": (30_532_122_624, 0, 0),
    "qwen3_235b_a22b": (235_093_634_560, 0, 0),
    "qwen3_coder_30b_a3b": (30_532_122_624, 0, 0),
    "qwen3_coder_480b_a35b": (480_154_875_392, 0, 0),
    "qwen2_57b_a14b": (57_408_658_944, 0, 0),
    "mixtral_8x7b": (46_702_792_704, 0, 0),
    "mixtral_8x22b": (140_620_634_112, 0, 0),
    "glm45_355b_a32b": (358_337_791_296, 0, 1),
    "glm45_air_106b_a12b": (110_468_824_832, 0, 1),
    "glm46_355b_a32b": (356_785_898_816, 1, 0),
    "llama3_8b": (8_030_261_248, 0, 0),
    "llama3_70b": (70_553_706_496, 0, 0),
    "llama31_8b": (8_030_261_248, 0, 0),
    "llama31_70b": (70_553_706_496, 0, 0),
    "llama32_1b": (1_235_814_400, 0, 0),
    "qwen3_0_6b": (596_049_920, 0, 0),
    "qwen3_8b": (8_190_735_360, 0, 0),
    "qwen3_32b": (32_762_123_264, 0, 0),
}
# 1,728 more than the model has, in tables that are no parameters.
ABOUT = {"moonlight_16b_a3b": 15_960_111_936}


def preset(name: str) -> ModelConfig:
    return quick_model(name)


def selection_biases(model: ModelConfig, num_layers: int) -> int:
    return num_layers * model.num_experts if model.router.expert_bias else 0


def tables(model: ModelConfig) -> int:
    return 2 * model.vocab_size * model.hidden_size


def prediction_module(model: ModelConfig) -> int:
    """One more last layer, a 2H -> H projection and three norms (arXiv 2412.19437, section 2.2)."""
    layer = sum(param.numel for param in layer_params(model, model.num_layers - 1))
    hidden = model.hidden_size
    return layer + selection_biases(model, 1) + 2 * hidden**2 + 3 * hidden


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_preset_has_the_parameters_of_the_published_checkpoint(name: str) -> None:
    model = preset(name)
    published, plain, with_tables = CHECKPOINTS[name]
    ours = count_params(model).total + selection_biases(model, model.num_layers - model.first_k_dense)
    ours += (plain + with_tables) * prediction_module(model) + with_tables * tables(model)
    assert ours == published


def test_models_with_modules_have_the_parameters_of_published_checkpoints() -> None:
    """Scales apart, and with the copies of embedding and head that the files hold."""
    for name, published in (
        ("dsv3_671b_mtp", 684_489_845_504),
        ("glm45_355b_a32b", CHECKPOINTS["glm45_355b_a32b"][0]),
        ("glm45_air_106b_a12b", CHECKPOINTS["glm45_air_106b_a12b"][0]),
    ):
        model = replace(preset(name), num_mtp_layers=1)
        assert count_params(model).total + selection_biases(model, model.num_moe_layers) + tables(model) == published


def test_moonlight_has_its_parameters_to_a_ten_millionth() -> None:
    for name, published in ABOUT.items():
        model = preset(name)
        ours = count_params(model).total + selection_biases(model, model.num_layers - model.first_k_dense)
        assert published - ours == 1728


# Model card (arXiv 2508.10925), table 1: the active ones without the embedding. Checkpoints are quantized.
CARDS = {"gpt_oss_20b": (20.91, 3.61), "gpt_oss_120b": (116.83, 5.13)}


@pytest.mark.parametrize("name", CARDS)
def test_a_preset_has_the_sizes_of_the_model_card(name: str) -> None:
    count, (total, active) = count_params(preset(name)), CARDS[name]
    assert count.total / 1e9 == pytest.approx(total, abs=0.005)
    assert (count.active - count.by_part["embedding"]) / 1e9 == pytest.approx(active, abs=0.005)


def test_qwen3_next_has_the_sizes_of_its_model_card() -> None:
    """80 B and 3 B active, 79 B without embeddings; the checkpoint's 81.3 B are with a prediction module."""
    model = preset("qwen3_next_80b_a3b")
    count = count_params(model)
    tables = count.by_part["embedding"] + count.by_part["head"]
    assert round(count.total / 1e9) == 80 and round((count.total - tables) / 1e9) == 79
    assert round((count.active - tables) / 1e9) == 3
    assert (count.total + prediction_module(model)) / 1e9 == pytest.approx(81.3, abs=0.05)


def test_qwen3_5_has_the_sizes_of_its_model_card() -> None:
    """35 B and 3 B active; transformers' class of the wrapper has as many numbers beside its vision tower."""
    count = count_params(preset("qwen3_5_35b_a3b"))
    assert (round(count.total / 1e9), round(count.active / 1e9)) == (35, 3)
    assert count.total == 34_660_610_688


def test_olmoe_has_the_size_of_its_paper() -> None:
    """arXiv 2409.02060, table 1: 6.9 B and 1.3 B active."""
    count = count_params(preset("olmoe_7b_a1b"))
    assert (round(count.total / 1e9, 1), round(count.active / 1e9, 1)) == (6.9, 1.3)


def test_ernie_has_the_numbers_of_its_checkpoint() -> None:
    """Whose name rounds 21.6 B without the embedding down."""
    model = preset("ernie45_21b_a3b")
    assert count_params(model).total + selection_biases(model, model.num_moe_layers) == 21_825_437_888


def numbers_of(name: str) -> tuple[float | None, float | None]:
    """Billions in all and active, as the name says them: 8x7b says neither."""
    total = re.search(r"_(\d+(?:_\d+)?)([bt])(?:_|$)", name)
    active = re.search(r"_a(\d+)b$", name)
    if total is None:
        return None, None
    in_all = float(total[1].replace("_", ".")) * (1000 if total[2] == "t" else 1)
    return in_all, float(active[1]) if active else None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*CHECKPOINTS, *ABOUT])
def test_the_name_says_the_size(name: str) -> None:
    """Names leave out embedding and head, or count them; the ends of that range are rounded as names are."""
    model, (in_all, active) = preset(name), numbers_of(name)
    count = count_params(model)
    without = count.total - count.by_part["embedding"] - count.by_part["head"]
    if in_all is None:
        assert name.startswith("mixtral_8x")
        return
    unit = 1e12 if in_all >= 1000 else 1e8 if in_all < 1 else 1e9
    largest = count.total + (prediction_module(model) + tables(model)) * (model.family == "glm4_moe")
    assert round(without / unit) <= round(in_all * 1e9 / unit) <= round(largest / unit)
    if active is not None:
        idle = count.total - count.active
        assert round((without - idle) / 1e9) <= active <= round(count.active / 1e9)
    else:
        assert model.first_k_dense == model.num_layers or name == "dsv3_671b"


def test_upcycled_presets_are_their_source_with_more_ffns_or_more_of_the_router() -> None:
    """The two of arXiv 2504.14960: eight FFNs a layer instead of one, and experts in eight parts each."""
    ffn, eight_experts, more_experts = 3 * 8192 * 28672, 8 * 8192, (64 - 8) * 6144
    dense, coarse = CHECKPOINTS["llama3_70b"][0], CHECKPOINTS["mixtral_8x22b"][0]
    assert count_params(preset("llama3_8x70b")).total == dense + 80 * (7 * ffn + eight_experts)
    assert count_params(preset("mixtral_8x22b_g8t8")).total == coarse + 56 * more_experts


@pytest.mark.exhaustive
def test_no_preset_of_these_families_is_left_out() -> None:
    known = {*CHECKPOINTS, *ABOUT, "llama3_8x70b", "mixtral_8x22b_g8t8", "dsv3_671b_mtp"}
    families = {preset(name).family for name in known}
    names = {path.stem for path in CONF.glob("*.yaml") if not path.stem.startswith("small_")}
    assert {name for name in names if preset(name).family in families} == known
