"""MXFP4 as GPT-OSS is published: written by the rule of the format, and byte for byte what it was where nothing changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_mesh_cases import load_on_mesh, mesh_name, stored, world_size
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import automoe
from automoe.comm.agreement import Ranks
from automoe.config.schema import MeshConfig
from automoe.convert import main
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.catalog import check_catalog
from automoe.hf.families.registry import family_of
from automoe.hf.quantized import dequantize_mxfp4, quantize_mxfp4
from automoe.hf.save_plan import Transfer, plan_writes
from automoe.hf.shards import local_shards
from automoe.hf.verify import verify_hf
from automoe.hf.write import convert_hf, to_hf
from automoe.verify.pool import RankPool
from tests.support.hf_models import save_small_hf

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
EXPERTS = ("gate_up_proj", "down_proj")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def naive(group: list[float]) -> tuple[int, list[int]]:
    """OCP Microscaling formats 1.0, section 6.3, number by number: a group's scale and codes."""
    largest = max(map(abs, group))
    shared = max(-127, torch.tensor(largest).frexp().exponent.item() - 1 - 2) if largest else 0
    codes = []
    for number in group:
        size = abs(number) / 2.0**shared
        near = sorted(range(8), key=lambda code: (abs(E2M1[code] - size), code % 2))
        codes.append(near[0] + 8 * (str(number)[0] == "-"))
    return shared + 127, codes


def test_the_rule_of_the_format() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 32, generator=generator) * 2.0 ** torch.randint(-140, 120, (40, 1), generator=generator)
    means = [(one + other) / 2 for one, other in zip(E2M1, E2M1[1:], strict=False)]
    ties = torch.tensor([*means, 4.0, 7.0, 7.9, -7.9, -0.0] + [-mean for mean in means]).repeat(2)[:32]
    rows = torch.cat((rows, ties[None], ties[None] * 2.0**-9, torch.zeros(1, 32)))
    codes, scales = quantize_mxfp4(rows)
    for row, code, scale in zip(rows.tolist(), codes, scales, strict=True):
        unpacked = torch.stack((code & 15, code >> 4), -1).flatten().tolist()
        assert (int(scale), unpacked) == naive(row)
    assert int(scales[40]) == 127 and {7, 15} <= set(torch.stack((codes[40] & 15, codes[40] >> 4)).flatten().tolist())


def test_what_is_not_finite_stays_so() -> None:
    rows = torch.ones(3, 64)
    rows[0, 5], rows[1, 40] = torch.nan, -torch.inf
    numbers = dequantize_mxfp4(*quantize_mxfp4(rows))
    assert torch.equal(numbers.isnan().view(3, 2, 32).all(-1), ~rows.isfinite().view(3, 2, 32).all(-1))
    assert torch.equal(numbers[2], rows[2])


def save_mxfp4(folder: Path) -> Path:
    """GPT-OSS in MXFP4 of which no group of down_proj has a code above 3, and some are zeros with scales."""
    save_small_hf("gpt_oss", folder, dtype=torch.bfloat16, other_sizes=SIZES)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for key in [key for key in tensors if key.endswith(EXPERTS)]:
        experts, width, height = tensors.pop(key).shape
        shape = (experts, height, width // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        if "down" in key:
            blocks &= 0x9B
            blocks[:, ::5] = 0x80
        tensors[f"{key}_blocks"] = blocks
        tensors[f"{key}_scales"] = torch.randint(117, 125, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mxfp4(tmp_path_factory.mktemp("mxfp4") / "in")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "in"
    save_small_hf("gpt_oss", folder, dtype=torch.bfloat16, other_sizes=SIZES)
    return folder


def test_what_was_not_changed_has_the_same_bytes(source: Path, tmp_path: Path) -> None:
    converted = convert_hf(source, tmp_path / "converted", encoding="mxfp4")
    model = automoe.from_hf(source)
    written = to_hf(model, tmp_path / "exported", encoding="mxfp4", dtype="bfloat16")
    assert (converted.error, written.error) == (0, 0) and "MXFP4 of the weights, 0.00% off" in str(written)
    before = stored(source)
    for name in ("converted", "exported"):
        after = stored(tmp_path / name)
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert tensor.dtype == after[key].dtype and torch.equal(tensor, after[key]), key
    # Of an expert that was trained, the groups of the numbers that moved are written anew.
    with torch.no_grad():
        model.layers["1"].mlp.experts.down_proj[3, 7, 40] += 0.5
    to_hf(model, tmp_path / "trained", encoding="mxfp4", dtype="bfloat16")
    after = stored(tmp_path / "trained")
    key = "model.layers.1.mlp.experts.down_proj_blocks"
    assert (before[key] != after[key]).any(-1).nonzero().tolist() == [[3, 7, 1]]
    assert all(torch.equal(one, after[name]) for name, one in before.items() if not name.startswith(key[:-7]))


def test_an_export_is_what_transformers_dequantizes(plain: Path, tmp_path: Path) -> None:
    written = to_hf(automoe.from_hf(plain), tmp_path / "out", encoding="mxfp4", dtype="bfloat16")
    assert written.logits_error is not None and written.logits_error < 1e-5
    before, after = stored(plain), stored(tmp_path / "out")
    ends = {f"{name}{end}" for name in EXPERTS for end in ("_blocks", "_scales")}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    square = size = 0.0
    for key, tensor in before.items():
        if not key.endswith(EXPERTS):
            assert torch.equal(after[key], tensor)
            continue
        blocks, scales = after[f"{key}_blocks"], after[f"{key}_scales"]
        ours = torch.stack([dequantize_mxfp4(*quantize_mxfp4(expert.T)).T for expert in tensor])
        read = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert torch.equal(read, ours) and torch.equal(theirs[key].float(), ours)
        square += float((ours - tensor).square().sum())
        size += float(tensor.float().square().sum())
    assert written.error == pytest.approx((square / size) ** 0.5, rel=1e-5) and 0.08 < written.error < 0.15
    assert {key.rpartition(".")[2] for key in after.keys() - before.keys()} == ends
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated == {  # openai/gpt-oss-20b
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    }  # fmt: skip


def test_other_codes_than_those_of_the_weights_are_found(plain: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(plain)
    to_hf(model, tmp_path / "out", encoding="mxfp4", dtype="float32", verify=False)
    plan = plan_writes(
        list(local_shards({0: model})), model.config, family_of(model.config).keys, torch.float32, "mxfp4"
    )
    coded = [item for item in plan if item.target.scales is not None]

    def compare() -> float:
        catalog = check_catalog(tmp_path / "out", model.config)
        return Transfer(coded, Ranks()).compare(catalog)

    assert 0.08 < compare() < 0.15
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    key = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[f"{key}_blocks"][2, 9, 1, 4] ^= 1
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    verify_hf(model, tmp_path / "out", encoding="mxfp4")  # one step more of one number: within rounding
    with pytest.raises(CheckpointError, match=rf"{key} is not what .* holds: 1 of "):
        compare()
    with torch.no_grad():
        model.layers["0"].mlp.experts.gate_up_proj[2] *= 3
    with pytest.raises(CheckpointError, match=r"gate_up_proj is not the model's.*MXFP4 rounds by no more than 33"):
        verify_hf(model, tmp_path / "out", encoding="mxfp4")


def export(path: Path, out: Path, mesh: MeshConfig) -> tuple[float | None, float | None]:
    parts, _, _ = load_on_mesh(path, mesh)
    written = to_hf(parts, out, encoding="mxfp4", dtype="bfloat16")
    return written.error, written.logits_error


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(dp_shard=4, ep_shard=2, etp=2),  # 96 columns over 2 ranks: shards begin inside a group
        MeshConfig(pp=2, dp_shard=2, ep=2),
    ],
    ids=mesh_name,
)
def test_every_mesh_writes_the_same_bytes(mesh: MeshConfig, source: Path, tmp_path: Path, ranks: RankPool) -> None:
    outcomes = ranks.run(export, world_size(mesh), source, tmp_path / "out", mesh)
    assert all(error == 0 and logits < 1e-5 for error, logits in outcomes)
    before, after = stored(source), stored(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(one, after[key]) for key, one in before.items())


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("qwen3_moe", {}, "model.family=qwen3_moe: MXFP4 is written in the format of published gpt_oss files"),
        ("gpt_oss", {"hidden_size": 80}, "model.hidden_size=80: MXFP4 has one scale per 32 .* 80 % 32 = 16"),
        ("gpt_oss", {"intermediate_size": 72}, "model.moe_intermediate_size=72: MXFP4 has .* 72 % 32 = 8"),
    ],
)
def test_what_has_no_such_files_is_refused_before_weights_are_read(
    name: str, sizes: dict[str, int], says: str, tmp_path: Path
) -> None:
    save_small_hf(name, tmp_path / "in", other_sizes={"num_hidden_layers": 1} | sizes)
    (tmp_path / "in" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=says):
        convert_hf(tmp_path / "in", tmp_path / "out", encoding="mxfp4")


def test_one_encoding_at_a_time(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(plain), "--out", str(tmp_path / "out"), "--fp8", "--mxfp4"])
    assert "not allowed with argument" in capsys.readouterr().err
    assert main([str(plain), "--out", str(tmp_path / "out"), "--mxfp4"]) == 0
    said = capsys.readouterr().out
    assert "MXFP4" in said and "11." in said
