"""INT4 as Kimi-K2-Thinking and Kimi-K2.5 publish their experts: read on any mesh, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_mesh_cases import load_on_mesh, mesh_name, stored, world_size
from safetensors.torch import load_file, save_file

import automoe
from automoe.config.schema import MeshConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.quantized import dequantize_int4, quantize_int4
from automoe.hf.write import convert_hf, to_hf
from automoe.model.params import count_params
from automoe.verify.pool import RankPool
from tests.support.hf_models import save_small_hf
from tests.support.wrappers import save_wrapper

pytestmark = pytest.mark.filterwarnings("ignore:.*not trained, and copied bit for bit")
SIZES = {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2, "n_routed_experts": 4}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, "output_activations": None}
# config.json of moonshotai/Kimi-K2-Thinking
STATED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
}


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Eight numbers of -8 to 7 a word, the first in its lowest bits."""
    words = (codes + 8).unflatten(1, (-1, 8)).long() * 16 ** torch.arange(8)
    return words.sum(-1).to(torch.uint32).view(torch.int32)


def quantize(folder: Path, seed: int = 3) -> dict[str, torch.Tensor]:
    """Store the experts of ``folder`` as INT4; return what all of its tensors mean, in float32."""
    meant = {}
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for key in [key for key in tensors if ".mlp.experts." in key]:
            rows, cols = tensors.pop(key).shape
            codes = torch.randint(-8, 8, (rows, cols), generator=generator)
            scales = (torch.rand(rows, cols // 32, generator=generator) * 0.1 + 0.01).bfloat16()
            tensors[f"{key}_packed"] = packed(codes)
            tensors[f"{key}_scale"] = scales
            tensors[f"{key}_shape"] = torch.tensor([rows, cols])
            meant[key] = codes.float() * scales.float().repeat_interleave(32, 1)
        save_file(tensors, file, {"format": "pt"})
        meant |= {key: one.float() for key, one in tensors.items() if not key.endswith(("_packed", "_scale", "_shape"))}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = {key: file.name for file in folder.glob("*.safetensors") for key in load_file(file)}
        index.write_text(json.dumps({"weight_map": names}))
    return meant


def declare(folder: Path, quantization: Any = STATED, **more: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | more
    inner = config.get("text_config", config)
    inner["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def int4(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path / "int4"
    save_small_hf("kimi", folder, dtype=torch.bfloat16, other_sizes=SIZES)
    meant = quantize(folder)
    declare(folder, model_type="kimi_k2")
    return folder, meant


def test_words_are_those_of_compressed_tensors() -> None:
    """``pack_to_int32`` of compressed-tensors 0.20 gives these words for -8 to 7."""
    words = torch.tensor([[0x76543210, -0x1234568]], dtype=torch.int32)
    assert torch.equal(packed(torch.arange(-8, 8)[None]), words)
    numbers = dequantize_int4(words.repeat(1, 2), torch.tensor([[0.5]]))
    assert torch.equal(numbers, torch.arange(-8, 8).repeat(2)[None] * 0.5)


def round_trip(path: Path, out: Path, mesh: MeshConfig) -> None:
    parts, _, _ = load_on_mesh(path, mesh)
    to_hf(parts, out, dtype="float32", verify=False)


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(dp_shard=4, ep=2, ep_shard=2),
        pytest.param(MeshConfig(dp_shard=1), marks=pytest.mark.exhaustive),
        # 96 columns over 2 ranks: shards begin inside a group
        pytest.param(MeshConfig(dp_shard=4, ep_shard=2, etp=2), marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(pp=2, dp_shard=2, ep=2), marks=pytest.mark.exhaustive),
    ],
    ids=mesh_name,
)
def test_experts_are_what_codes_and_scales_say(
    mesh: MeshConfig, int4: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, ranks: RankPool
) -> None:
    folder, meant = int4
    ranks.run(round_trip, world_size(mesh), folder, tmp_path / "out", mesh)
    after = stored(tmp_path / "out")
    assert after.keys() == meant.keys()
    assert all(torch.equal(after[key], one) for key, one in meant.items())


def test_an_export_is_in_bfloat16_and_says_so(int4: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, meant = int4
    written = convert_hf(folder, tmp_path / "out")
    assert written.dtype == torch.bfloat16 and "bfloat16" in str(written)
    after = stored(tmp_path / "out")
    assert all(torch.equal(after[key], one.to(after[key].dtype)) for key, one in meant.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.exhaustive
def test_a_wrapper_around_int4_experts(tmp_path: Path) -> None:
    """Kimi-K2.5: names of the published files, kimi_k2 as the text model, its quantization with it."""
    source = tmp_path / "in"
    save_wrapper("kimi_k25", source, torch.bfloat16, **SIZES)
    # transformers 5.23 writes the names of the vision tower's layers for those of the text model, too
    for file in source.glob("*.safetensors"):
        named = {key.replace("model.blocks.", "model.layers."): one for key, one in load_file(file).items()}
        save_file(named, file, {"format": "pt"})
    meant = quantize(source)
    declare(source)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["model_type"] = "kimi_k2"
    (source / "config.json").write_text(json.dumps(config))
    assert model_config_from_hf(source).family == "deepseek_v3"
    convert_hf(source, tmp_path / "out")
    after = stored(tmp_path / "out")
    assert after.keys() == meant.keys() and any("vision_tower" in key for key in after)
    assert all(torch.equal(after[key], one.to(after[key].dtype)) for key, one in meant.items())
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in stated and "quantization_config" not in stated["text_config"]
    convert_hf(source, tmp_path / "again", encoding="int4")
    before, after = stored(source), stored(tmp_path / "again")
    assert before.keys() == after.keys() and all(torch.equal(one, after[key]) for key, one in before.items())
    stated = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert "re:vision_tower.*" in stated["ignore"]


def test_what_was_not_changed_is_written_as_it_was(int4: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, _ = int4
    model = automoe.from_hf(folder, dtype=torch.bfloat16)  # in which numbers are rounded
    written = to_hf(model, tmp_path / "out", encoding="int4")
    assert written.error is not None and written.error < 2**-9 and "INT4 of the weights" in str(written)
    before, after = stored(folder), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, one in before.items():
        same = after[key].to(one.dtype) if key.endswith("bias") else after[key]  # a buffer is float32
        # transformers writes it in float32 since 5.24, and the model has it in bfloat16
        meant = one.bfloat16().to(one.dtype) if key.endswith("gate.weight") else one
        assert one.dtype == same.dtype and torch.equal(meant, same), key
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated["ignore"] == STATED["ignore"] and stated["format"] == STATED["format"]
    assert stated["config_groups"]["group_0"] == GROUP | {"weights": WEIGHTS | {"dynamic": False}}


def test_numbers_are_quantized_as_compressed_tensors_does(tmp_path: Path) -> None:
    """Symmetric: the scale is the largest magnitude over 7.5, half of the 15 steps, in the weights' dtype."""
    save_small_hf("kimi", tmp_path / "in", dtype=torch.bfloat16, other_sizes=SIZES)
    written = convert_hf(tmp_path / "in", tmp_path / "out", encoding="int4")
    assert written.logits_error is not None and written.logits_error < 1e-5
    assert written.error is not None and 0.05 < written.error < 0.12
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    for key, tensor in before.items():
        if ".mlp.experts." not in key:
            assert torch.equal(after[key], tensor), key
            continue
        groups = tensor.float().unflatten(1, (-1, 32))
        scales = (groups.abs().amax(-1) / 7.5).bfloat16()
        codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).long().flatten(1)
        assert torch.equal(after[f"{key}_scale"], scales) and torch.equal(after[f"{key}_packed"], packed(codes))
        assert after[f"{key}_shape"].tolist() == list(tensor.shape)
    zeros = dequantize_int4(*quantize_int4(torch.zeros(2, 64)))
    assert torch.equal(zeros, torch.zeros(2, 64))
    assert dequantize_int4(*quantize_int4(torch.full((1, 32), torch.nan))).isnan().all()


def test_eight_numbers_of_a_word_count_as_eight(tmp_path: Path) -> None:
    """Of a model that is nearly all experts, as Kimi-K2 is: its files hold an eighth as many words as it has parameters."""
    save_small_hf("kimi", tmp_path / "in", dtype=torch.bfloat16, other_sizes=SIZES | {"moe_intermediate_size": 256})
    to_hf(automoe.from_hf(tmp_path / "in"), tmp_path / "out", encoding="int4")
    config = model_config_from_hf(tmp_path / "out")
    words = sum(one.numel() for file in (tmp_path / "out").glob("*.safetensors") for one in load_file(file).values())
    assert count_params(config).total > 2 * words


def test_int4_of_other_families_and_sizes_is_refused(tmp_path: Path) -> None:
    for name, sizes, says in (
        ("qwen3_moe", {}, "model.family=qwen3_moe: INT4 is written in the format of published deepseek_v3 files"),
        ("dsv3", {"moe_intermediate_size": 24}, "model.moe_intermediate_size=24: INT4 has .* 24 % 32 = 24"),
    ):
        save_small_hf(name, tmp_path / name, other_sizes={"hidden_size": 64} | sizes)
        with pytest.raises(ConfigError, match=says):
            convert_hf(tmp_path / name, tmp_path / "out", encoding="int4")
    with pytest.raises(ConfigError, match="encoding=nf4: must be one of plain, fp8, mxfp4, int4"):
        convert_hf(tmp_path / "dsv3", tmp_path / "out", encoding="nf4")
    save_small_hf("dsv3", tmp_path / "faint", other_sizes={"hidden_size": 64, "moe_intermediate_size": 32})
    file = tmp_path / "faint" / "model.safetensors"
    up = "model.layers.1.mlp.experts.0.up_proj.weight"
    save_file(load_file(file) | {up: torch.full((32, 64), 1e-40)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{up} of .* cannot be stored in INT4: its numbers are 100% off"):
        convert_hf(tmp_path / "faint", tmp_path / "out", encoding="int4")
    save_small_hf("dsv3", tmp_path / "dense", other_sizes={"first_k_dense_replace": 4})
    with pytest.raises(ConfigError, match="INT4 stores experts, and no layer has any"):
        convert_hf(tmp_path / "dense", tmp_path / "out", encoding="int4")


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        automoe.from_hf(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group_size": 64}, "int4 needs scales"),
        ({"group_size": 20}, "group_size=20"),
        ({"num_bits": 8}, "int8_packed needs scales"),
        ({"num_bits": 6}, "type=int, num_bits=6"),
        ({"symmetric": False}, "weight_zero_point is missing"),
        ({"strategy": "channel"}, "int4 needs scales"),
        ({"type": "float"}, "format=pack-quantized, type=float"),
        ({"actorder": "group"}, "actorder=group"),
    ],
)
def test_another_quantization_is_refused_by_name(
    change: dict[str, Any], says: str, int4: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    declare(int4[0], STATED | {"config_groups": {"group_0": GROUP | {"weights": WEIGHTS | change}}})
    assert says in refused(int4[0])


@pytest.mark.parametrize("key", ["transform_config", "sparsity_config"])
def test_transformed_or_sparse_codes_are_refused(key: str, int4: tuple[Path, dict[str, torch.Tensor]]) -> None:
    declare(int4[0], STATED | {key: {"format": "hadamard"}})
    assert f"{key}={{'format': 'hadamard'}}" in refused(int4[0])


def test_other_kinds_of_compressed_tensors_are_refused(int4: tuple[Path, dict[str, torch.Tensor]]) -> None:
    other = GROUP | {"weights": WEIGHTS | {"num_bits": 8}}
    for change, says in (
        ({"format": "nvfp4-pack-quantized"}, "format=nvfp4-pack-quantized, type=int"),
        (
            {"config_groups": {"a": GROUP, "b": other}},
            "groups with .* num_bits of \\[\\['pack-quantized', 'int', 4\\], \\[",
        ),
        ({"config_groups": {}}, "groups with format, type and num_bits of \\[\\]"),
        ({"config_groups": {"a": GROUP | {"weights": None}}}, "a group with weights=None"),
    ):
        declare(int4[0], STATED | change)
        assert re.search(says, refused(int4[0]))


def edit(folder: Path, **replaced: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | replaced
    save_file(
        {key: one for key, one in tensors.items() if one is not None}, folder / "model.safetensors", {"format": "pt"}
    )


def test_wrong_shapes_are_refused_by_name(int4: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = int4
    key = "model.layers.1.mlp.experts.2.down_proj.weight"
    old = load_file(folder / "model.safetensors")
    for changed, says in (
        ({f"{key}_scale": torch.ones(64, 2)}, "needs scales [64, 3]"),
        (
            {f"{key}_packed": old[f"{key}_packed"][:, :8].contiguous(), f"{key}_shape": None},
            f"{key} is [64, 8] I32 with scales [64, 3]",
        ),
        ({f"{key}_packed": old[f"{key}_packed"].long()}, "with scales [64, 3]"),
        ({f"{key}_scale": None}, f"{key}_packed, and their scales are missing"),
    ):
        edit(folder, **(dict(old) | changed))
        assert says in refused(folder)
