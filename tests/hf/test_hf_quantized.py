"""Block-FP8 and MXFP4: read on any mesh as one process dequantizes them, and written as they are read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from hf_mesh_cases import load_on_mesh, mesh_name, stored, world_size
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import automoe
from automoe.config.schema import MeshConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf import save_plan
from automoe.hf.catalog import check_catalog
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.keys import Encoding
from automoe.hf.quantized import dequantize_fp8, dequantize_mxfp4, quantize_fp8
from automoe.hf.save_plan import gather
from automoe.hf.verify import verify_hf
from automoe.hf.write import convert_hf, to_hf
from automoe.verify.pool import RankPool
from tests.support.hf_models import save_small_hf

# kv_a_proj_with_mqa has 512 + 64 = 576 rows, four and a half blocks; experts 192, hidden and others off the grid.
BLOCKS = {"hidden_size": 160, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "moe_intermediate_size": 192}
BLOCKS |= {"num_hidden_layers": 2, "n_routed_experts": 8, "q_lora_rank": 136, "intermediate_size": 264}
SUFFIX = "_scale_inv"


def naive(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the format means, in one line and with nothing shared."""
    rows, cols = codes.shape
    return codes.float() * scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a block-FP8 checkpoint, in one process."""
    tensors = stored(folder)
    return {
        key: naive(tensor, tensors[key + SUFFIX]) if key + SUFFIX in tensors else tensor
        for key, tensor in tensors.items()
        if not key.endswith(SUFFIX)
    }


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block-FP8 checkpoint, its codes and scales made here."""
    folder = tmp_path_factory.mktemp("fp8")
    save_small_hf("dsv3", folder, dtype=torch.bfloat16, other_sizes=BLOCKS)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for key in list(tensors):
        if tensors[key].dim() == 2 and "layers" in key and ".gate.weight" not in key:
            scales = torch.rand([-(-size // 128) for size in tensors[key].shape], generator=generator) * 0.1
            tensors[key] = (tensors[key] * 400).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[key + SUFFIX] = scales + 0.001
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    declare(folder, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    return folder


def declare(folder: Path, quantization: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def fp8_copy(fp8: Path, tmp_path: Path) -> Path:
    for file in fp8.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(folder: Path, drop: str = "", **replaced: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {key: tensor for key, tensor in tensors.items() if not (drop and key.endswith(drop))}
    save_file(tensors | replaced, folder / "model.safetensors", {"format": "pt"})


# Arithmetic ---------------------------------------------------------------------------------------


def test_fp8_rectangles_are_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    codes, scales = quantize_fp8(torch.randn(300, 576, generator=generator))
    whole = naive(codes, scales)
    assert torch.equal(dequantize_fp8(codes, scales), whole)
    for _ in range(40):
        top, left = (int(torch.randint(size, (), generator=generator)) for size in codes.shape)
        bottom = int(torch.randint(top + 1, 301, (), generator=generator))
        right = int(torch.randint(left + 1, 577, (), generator=generator))
        blocks = scales[top // 128 : -(-bottom // 128), left // 128 : -(-right // 128)]
        part = dequantize_fp8(codes[top:bottom, left:right], blocks, (top, left))
        assert torch.equal(part, whole[top:bottom, left:right])


def test_every_fp8_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    numbers = dequantize_fp8(codes, torch.full((1, 1), 0.3))
    torch.testing.assert_close(numbers, naive(codes, torch.full((1, 1), 0.3)), rtol=0, atol=0, equal_nan=True)
    finite = codes[:, :127].contiguous()  # without a NaN another way is taken
    assert torch.equal(dequantize_fp8(finite, torch.full((1, 1), 0.3)), naive(finite, torch.full((1, 1), 0.3)))


def test_quantizing_what_was_dequantized_changes_nothing() -> None:
    numbers = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    numbers[:128, :128] = 0
    once = dequantize_fp8(*quantize_fp8(numbers))
    assert torch.equal(dequantize_fp8(*quantize_fp8(once)), once)
    # Half a step: relative for normal numbers, and below them a 2**-10 of the block's scale.
    _, scales = quantize_fp8(numbers)
    assert ((once - numbers).abs() <= numbers.abs() * 2**-4 + scales.max() * 2**-10).all()


def test_every_mxfp4_code_and_scale_as_in_transformers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    theirs = convert_moe_packed_tensors(codes, scales, dtype=torch.bfloat16)
    ours = dequantize_mxfp4(codes.view(255, 256), scales.view(255, 16))
    assert torch.equal(ours.bfloat16(), theirs[0].T)
    # 255 is not a number in the format; transformers makes 2**128 of it.
    assert dequantize_mxfp4(codes[0, :1].reshape(1, -1), torch.full((1, 16), 255, dtype=torch.uint8)).isnan().all()


# Reading ------------------------------------------------------------------------------------------


def round_trip(path: Path, out: Path, mesh: MeshConfig) -> None:
    parts, _, _ = load_on_mesh(path, mesh)
    to_hf(parts, out, dtype="float32", verify=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(dp_shard=2, ep=2),
        MeshConfig(dp_shard=4, ep=2, ep_shard=2),
        pytest.param(MeshConfig(dp_shard=8, ep=2, ep_shard=4), marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(pp=2, dp_shard=1, tp=2, ep=2), marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(dp_shard=4, ep_shard=2, etp=2), marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(dp_replicate=2, dp_shard=2, ep=4), marks=pytest.mark.exhaustive),
    ],
    ids=mesh_name,
)
def test_fp8_on_a_mesh_is_what_one_process_dequantizes(
    mesh: MeshConfig, fp8: Path, tmp_path: Path, ranks: RankPool
) -> None:
    """576 rows over 2, 4 and 8 shards: 288, 144 and 72 rows, which begin anywhere in a block."""
    ranks.run(round_trip, world_size(mesh), fp8, tmp_path / "out", mesh)
    before, after = dequantized(fp8), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert before["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 160)
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor.float()), key
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_bfloat16_parameters_are_rounded_once(fp8: Path) -> None:
    model = automoe.from_hf(fp8, dtype=torch.bfloat16)
    wanted = dequantized(fp8)["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert torch.equal(model.layers["1"].self_attn.kv_a_proj_with_mqa.weight, wanted.bfloat16())


@pytest.fixture
def mxfp4(tmp_path: Path) -> Path:
    """GPT-OSS as published: codes and scales of random experts."""
    folder = tmp_path / "mxfp4"
    save_small_hf("gpt_oss", folder, dtype=torch.bfloat16, other_sizes={"hidden_size": 64, "intermediate_size": 96})
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, height = tensors.pop(key).shape
        shape = (experts, height, width // 32)
        tensors[f"{key}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(117, 125, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    declare(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return folder


def transformers_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = stored(folder)
    for key in [key for key in tensors if key.endswith("_blocks")]:
        scales = tensors.pop(key.replace("_blocks", "_scales"))
        tensors[key.removesuffix("_blocks")] = convert_moe_packed_tensors(tensors.pop(key), scales)
    return tensors


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(dp_shard=1),
        MeshConfig(dp_shard=4, ep_shard=2, etp=2),
        pytest.param(MeshConfig(dp_shard=2, ep=2), marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(dp_shard=3, ep_shard=1, etp=3), marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(pp=2, dp_shard=2, ep_shard=2), marks=pytest.mark.exhaustive),
    ],
    ids=mesh_name,
)
def test_mxfp4_is_what_transformers_dequantizes(mesh: MeshConfig, mxfp4: Path, tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(round_trip, world_size(mesh), mxfp4, tmp_path / "out", mesh)
    before, after = transformers_tensors(mxfp4), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor.float()), key


def test_other_ranks_are_sent_the_same_sources(fp8: Path, mxfp4: Path) -> None:
    for folder, encoding in ((fp8, "fp8"), (mxfp4, "mxfp4")):
        own = check_catalog(folder, model_config_from_hf(folder))
        sent = pickle.loads(pickle.dumps(own))
        assert (sent.folder, sent.keys, sent.block) == (own.folder, own.keys, own.block)
        assert list(sent.sources.items()) == list(own.sources.items()), "in file order"
        assert {source.encoding for source in sent.sources.values()} == {"plain", encoding}
        places = [(source.file, source.start) for source in own.sources.values()]
        assert places == sorted(places)


def test_mxfp4_converts_to_bfloat16_without_ranks(mxfp4: Path, tmp_path: Path) -> None:
    written = convert_hf(mxfp4, tmp_path / "out")
    assert written.logits_error is not None and written.logits_error < 1e-5
    before, after = transformers_tensors(mxfp4), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == torch.bfloat16 and torch.equal(after[key], tensor), key


# Writing ------------------------------------------------------------------------------------------


def export_fp8(path: Path, out: Path, mesh: MeshConfig) -> float | None:
    from automoe.hf.write import to_hf

    parts, _, _ = load_on_mesh(path, mesh)
    return to_hf(parts, out, encoding="fp8").logits_error


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [MeshConfig(pp=2, dp_shard=2, ep_shard=2)], ids=mesh_name)
def test_fp8_export_is_the_quantization_of_the_weights(mesh: MeshConfig, tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf("dsv3", tmp_path / "in", other_sizes=BLOCKS)
    errors = ranks.run(export_fp8, world_size(mesh), tmp_path / "in", tmp_path / "out", mesh)
    assert errors[0] is not None and errors[0] < 1e-5
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    quantized = [key for key in before if key + SUFFIX in after]
    assert after.keys() == before.keys() | {key + SUFFIX for key in quantized}
    for key, tensor in before.items():
        wanted = dequantize_fp8(*quantize_fp8(tensor)) if key in quantized else tensor
        found = naive(after[key], after[key + SUFFIX]) if key in quantized else after[key]
        assert torch.equal(found, wanted), key
    # As DeepSeek-V3's own: the matrices of layers, and not routers, embedding and head.
    assert {key for key in before if before[key].dim() == 2} - set(quantized) == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.mlp.gate.weight",
    }
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert declared["quant_method"] == "fp8" and declared["weight_block_size"] == [128, 128]
    # A second time round is what it was.
    assert dequantized(tmp_path / "out").keys() == before.keys()
    again = automoe.from_hf(tmp_path / "out")
    automoe.to_hf(again, tmp_path / "again", encoding="fp8")
    for key, tensor in stored(tmp_path / "again").items():
        assert torch.equal(tensor.float(), after[key].float()), key


@pytest.mark.parametrize("name", ["dsv3", "qwen2_moe", "qwen3_next", "qwen3_5_moe", "mixtral"])
def test_matrices_without_scales_are_those_that_config_json_names(name: str, tmp_path: Path) -> None:
    """Readers expect scales for every linear layer that is not named."""
    save_small_hf(name, tmp_path / "in")
    automoe.to_hf(automoe.from_hf(tmp_path / "in"), tmp_path / "out", encoding="fp8")
    tensors = stored(tmp_path / "out")
    matrices = {key for key, tensor in tensors.items() if tensor.dim() == 2 and not key.endswith(SUFFIX)}
    bare = {key.removesuffix(".weight") for key in matrices if key + SUFFIX not in tensors}
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert bare - {"model.embed_tokens"} == set(declared["modules_to_not_convert"])


def test_transformers_itself_dequantizes_an_fp8_export(tmp_path: Path) -> None:
    """Where it can: it takes a block's size from the number of scales. Its loader needs a package more."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    save_small_hf("qwen3_moe", tmp_path / "in", other_sizes={"hidden_size": 256, "moe_intermediate_size": 128})
    automoe.to_hf(automoe.from_hf(tmp_path / "in"), tmp_path / "out", encoding="fp8")
    tensors, ours = stored(tmp_path / "out"), dequantized(tmp_path / "out")
    theirs = Fp8Dequantize(None)
    keys = [key for key in tensors if "experts" in key and key + SUFFIX in tensors]
    assert len(keys) == 4 * 8 * 3
    for key in keys:
        assert torch.equal(theirs._dequantize_one(tensors[key], tensors[key + SUFFIX]), ours[key]), key
    with pytest.raises(ValueError, match="not divisible"):  # why verify hands it a dequantized copy
        theirs._dequantize_one(*quantize_fp8(torch.ones(576, 128)))


def test_a_weight_that_is_not_its_quantization_is_found(tmp_path: Path) -> None:
    save_small_hf("qwen3_moe", tmp_path / "in")
    model = automoe.from_hf(tmp_path / "in")
    to_hf(model, tmp_path / "out", encoding="fp8", verify=False)
    assert verify_hf(model, tmp_path / "out", encoding="fp8") < 1e-5
    with torch.no_grad():
        model.layers["2"].mlp.experts.down_proj[5] *= 1.2
    with pytest.raises(CheckpointError, match=r"experts\.5\.down_proj\.weight.*off by .*rounds by no more"):
        verify_hf(model, tmp_path / "out", encoding="fp8")


@pytest.mark.parametrize("encoding", ["fp8", "plain"])
def test_a_mistake_of_the_gathering_is_found_by_the_shards(
    encoding: Encoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are compared to the bit with tensors that were gathered as those in the files were: shards are not."""
    save_small_hf("qwen3_moe", tmp_path / "in")
    monkeypatch.setattr(save_plan, "gather", lambda *args, **rank: gather(*args, **rank).roll(1, 0))
    with pytest.raises(CheckpointError, match=r"is not the model's"):
        to_hf(automoe.from_hf(tmp_path / "in"), tmp_path / "out", encoding=encoding)
    assert not (tmp_path / "out").exists()


def test_fp8_of_a_family_with_stacked_experts_is_refused(tmp_path: Path) -> None:
    save_small_hf("gpt_oss", tmp_path / "in")
    with pytest.raises(ConfigError, match="stores all experts of a layer in one tensor"):
        automoe.to_hf(automoe.from_hf(tmp_path / "in"), tmp_path / "out", encoding="fp8")
    assert not (tmp_path / "out").exists()


# Bad input ----------------------------------------------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        automoe.from_hf(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_fp8_without_scales(fp8_copy: Path) -> None:
    edit(fp8_copy, drop="layers.1.self_attn.o_proj.weight" + SUFFIX)
    message = refused(fp8_copy)
    assert "1 tensors are quantized (F8_E4M3): model.layers.1.self_attn.o_proj.weight" in message
    assert "scales are missing" in message and "copy the checkpoint again" in message


def test_fp8_that_config_json_does_not_mention(fp8_copy: Path) -> None:
    declare(fp8_copy, None)
    edit(fp8_copy, drop=SUFFIX)
    assert "config.json has no quantization_config" in refused(fp8_copy)


def test_scales_of_another_shape(fp8_copy: Path) -> None:
    key = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    edit(fp8_copy, **{key + SUFFIX: torch.ones(4, 2)})
    message = refused(fp8_copy)
    assert key in message and "needs scales [5, 2]" in message and "[4, 2]" in message


@pytest.mark.parametrize("suffix", ["_scale", SUFFIX])
def test_scales_that_belong_to_nothing(suffix: str, fp8_copy: Path) -> None:
    edit(fp8_copy, **{"model.norm.weight" + suffix: torch.ones(1)})
    assert f"not the model's: model.norm.weight{suffix}" in refused(fp8_copy)


def test_mxfp4_blocks_that_are_no_stack_of_matrices(mxfp4: Path) -> None:
    key = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    edit(mxfp4, **{key: torch.zeros(8, 16, dtype=torch.uint8)})
    assert f"quantized (U8): {key}, " in (said := refused(mxfp4)) and "for codes of 3 dims and more" in said


def test_experts_that_are_there_as_codes_and_as_numbers_too(mxfp4: Path) -> None:
    key = "model.layers.0.mlp.experts.gate_up_proj"
    edit(mxfp4, **{key: torch.zeros(8, 64, 192)})
    assert "nothing says which one counts" in (message := refused(mxfp4)) and f"'{key}_blocks' with scales" in message


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "awq"}, "quant_method=awq"),
        ({"quant_method": "fp8"}, "weight_block_size=None"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size=128"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size=[0, 128]"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fmt=e5m2"),
    ],
)
def test_quantizations_that_are_not_read(quantization: object, says: str, fp8_copy: Path) -> None:
    declare(fp8_copy, quantization)
    assert says in (message := refused(fp8_copy)) and "bfloat16" in message


def fails_on(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_on_mesh(path, MeshConfig(dp_shard=2, ep=2))
    return str(caught.value)


def test_all_ranks_refuse_fp8_without_scales_alike(fp8_copy: Path, ranks: RankPool) -> None:
    edit(fp8_copy, drop=SUFFIX)
    messages = ranks.run(fails_on, 2, fp8_copy)
    assert messages[0] == messages[1] and "scales are missing" in messages[0]


def test_a_block_uses_the_whole_range_of_its_code() -> None:
    """Its largest number is the largest code, so numbers 2**-14 times as large keep three bits, and it loses none."""
    sizes = 2.0 ** torch.linspace(-14, 0, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    blocks = torch.tensor([1e-5, 1.0, 3e4]).repeat_interleave(128).unsqueeze(1)
    numbers = sizes.repeat(384, 1) * blocks
    numbers[:, [0, 128]] = blocks
    codes, scales = quantize_fp8(numbers)
    tiles = codes.float().abs().view(3, 128, 2, 128)
    assert torch.equal(tiles.amax((1, 3)), torch.full((3, 2), 448.0))
    back = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert ((back - numbers).abs() / numbers).max() <= 2**-4
