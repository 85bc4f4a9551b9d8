"""Adapters beside a base in FP8 or NF4: read from a checkpoint, multiplied, and written again, in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lora_export import logits, off
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from automoe.config.batch import plan_batch
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import check_rows
from automoe.config.schema import Config, LoraConfig, MeshConfig, MoEConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.keys import Encoding
from automoe.hf.peft import to_peft
from automoe.hf.read import load_hf
from automoe.hf.verify import verify_hf
from automoe.hf.write import convert_hf, to_hf
from automoe.launch.hardware import check_backends
from automoe.launch.prepare import _check_fp8_base, check, check_data
from automoe.launch.rules_adapters import adapter_rows
from automoe.model.decoder import Decoder
from automoe.model.lora import freeze_and_adapt
from automoe.parallel.parallelize import allocate, build_decoder
from automoe.planner.memory import plan_memory
from tests.support.hf_models import save_small_hf

ONE = resolve_mesh(MeshConfig(), 1)
SIZES = {"num_hidden_layers": 2, "hidden_size": 160, "moe_intermediate_size": 192}


def config_of(path: Path, base: str, **lora) -> Config:
    settings = LoraConfig(rank=4, alpha=6.0, base=base, **lora)
    return Config(model=model_config_from_hf(path), moe=MoEConfig(experts="loop"), lora=settings)


def trained(path: Path, base: str, dtype: torch.dtype = torch.float32, **lora) -> Decoder:
    """A checkpoint with adapters as after training: every number of B another one."""
    config = config_of(path, base, **lora)
    model = build_decoder(config.model, config.moe, dtype)
    freeze_and_adapt(model, config, torch.promote_types(dtype, torch.float32), dtype)
    allocate({0: model}, torch.device("cpu"))
    load_hf(model, path)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora.B" in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_small_hf("dsv3", folder, dtype=torch.bfloat16, other_sizes=SIZES)
    return folder


@pytest.fixture(scope="module")
def fp8(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "fp8"
    convert_hf(plain, folder, encoding="fp8")
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_base_kept_in_fp8_is_the_one_dequantized_at_load_to_the_bit(
    fp8: Path, dtype: torch.dtype, monkeypatch
) -> None:
    monkeypatch.setattr("automoe.hf.read.CHUNK_BYTES", 16_000)  # 100 rows of 160: reads begin within blocks
    wide, kept = (trained(fp8, base, dtype) for base in ("weights", "fp8"))
    tokens, found = torch.arange(48).view(2, 24), []
    for model in (wide, kept):
        out = model(tokens)
        out.square().sum().backward()
        found.append((out, [p.grad for n, p in model.named_parameters() if ".lora." in n]))
    assert torch.equal(found[0][0], found[1][0]) and all(map(torch.equal, found[0][1], found[1][1]))
    codes = load_file(next(iter(fp8.glob("*.safetensors"))))
    stored = kept.layers["0"].self_attn.q_b_proj.weight
    assert torch.equal(
        stored[..., :128].flatten(1)[:, :20], codes["model.layers.0.self_attn.q_b_proj.weight"].view(torch.uint8)
    )
    assert sum(p.dtype == torch.uint8 for p in kept.parameters()) == 2 * 5 + 3 + 3 + 2


@pytest.mark.parametrize(
    ("name", "encoding", "sizes"),
    [
        ("dsv3", "fp8", SIZES),
        ("gpt_oss", "mxfp4", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}),
    ],
)
def test_a_model_beside_nf4_leaves_quantized_as_the_merged_one(
    name: str, encoding: Encoding, sizes: dict[str, int], tmp_path: Path
) -> None:
    save_small_hf(name, tmp_path / "source", other_sizes=sizes)
    model = trained(tmp_path / "source", "nf4", targets=["attention", "experts"])
    assert to_hf(model, tmp_path / "coded", encoding=encoding).error > 0
    to_hf(model, tmp_path / "merged", verify=False)
    convert_hf(tmp_path / "merged", tmp_path / "converted", encoding=encoding)
    coded, converted = (load_file(tmp_path / one / "model.safetensors") for one in ("coded", "converted"))
    assert coded.keys() == converted.keys() and all(torch.equal(coded[key], converted[key]) for key in coded)


@pytest.mark.parametrize("name", ["dsv3", "gpt_oss", "muse", pytest.param("qwen3_next", marks=pytest.mark.exhaustive)])
def test_what_leaves_is_what_was_trained_beside_nf4(name: str, tmp_path: Path) -> None:
    source, targets = tmp_path / "source", ["attention", "experts", *["latent"] * (name == "muse")]
    save_small_hf(name, source, other_sizes=SIZES if name == "dsv3" else None)
    model, other = trained(source, "nf4", targets=targets), trained(source, "weights", targets=targets)
    expected = logits(model.eval())
    assert off(logits(other.eval()), expected) > 1e-3, "the base has to be another one"
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    written = to_hf(model, tmp_path / "merged")
    assert written.checked and written.logits_error < 1e-5
    assert "equal bit for bit to the weights in the files' dtypes" in str(written)
    loader = AutoModelForImageTextToText if name == "muse" else AutoModelForCausalLM
    theirs = loader.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert off(logits(theirs), expected) < 1e-5
    lora = LoraConfig(4, 6.0, targets=targets, base="nf4")
    for base, said in (("nf4", True), ("fp8", False)):
        adapter = to_peft(model, tmp_path / base, replace(lora, base=base))
        assert ("base in NF4" in adapter) == said
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(logits(model), expected)


def test_an_export_is_compared_with_what_was_merged(plain: Path, tmp_path: Path) -> None:
    model = trained(plain, "nf4")
    to_hf(model, tmp_path, overwrite=True, verify=False)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors[key][5, 7] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{key} is not the model's .*down_proj: 1 of"):
        verify_hf(model, tmp_path, dtype={key: tensor.dtype for key, tensor in tensors.items()})


def test_every_family_is_stored_in_the_bytes_that_the_plan_counts(plain: Path, fp8: Path) -> None:
    for path, base in ((plain, "nf4"), (fp8, "fp8"), (plain, "weights")):
        config = config_of(path, base)
        [planned] = plan_memory(config, ONE, plan_batch(config, ONE))
        model = trained(path, base)
        assert planned.weights == sum(p.nbytes for p in model.parameters())
        largest = 4 * 8 * 2 * 192 * {"fp8": 256, "nf4": 192, "weights": 0}[base]  # gate and up, columns in whole blocks
        assert planned.widened == largest


def test_what_cannot_be_packed_is_refused_before_ranks_start(plain: Path, fp8: Path, monkeypatch) -> None:
    config = replace(config_of(plain, "fp8"), run_dir=str(plain / "run"), data=DataConfig(kind="benchmark"))
    with pytest.raises(ConfigError, match=r"keeps a checkpoint's own block-FP8.*quant_method=None.*nf4"):
        check(config, 1, "cpu")
    check(replace(config, model=model_config_from_hf(fp8)), 1, "cpu")
    with pytest.raises(ConfigError, match="gpt_oss stores those of experts transposed.*nf4"):
        _check_fp8_base(replace(config, model=replace(config.model, family="gpt_oss")))
    random = replace(config, model=replace(config.model, hf_path=None))
    with pytest.raises(ConfigError, match="begins from random weights"):
        check_data(random)
    two = resolve_mesh(MeshConfig(dp_shard=1, tp=2, etp=2), 2)
    for changed, said in (
        (replace(config, lora=LoraConfig(base="nf4")), "lora.rank=0"),
        (replace(config, moe=MoEConfig(experts="triton")), "triton does not multiply"),
        (config, r"128 numbers of a row, and tp would cut .*o_proj.weight inside them: 64 / 2 = 32"),
        (replace(config_of(plain, "nf4"), mesh=MeshConfig(tp=2)), r"64 numbers of a row, and tp would cut .*o_proj"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_rows(changed, adapter_rows(changed, two), two)
    etp = resolve_mesh(MeshConfig(dp_shard=2, etp=2), 2)
    with pytest.raises(ConfigError, match=r"mesh\.etp.*down_proj inside them: 192 / 2 = 96, not a multiple of 64"):
        check_rows(config_of(plain, "nf4"), adapter_rows(config_of(plain, "nf4"), etp), etp)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Exception, match="lora.base=nf4: the package bitsandbytes is not installed"):
        check_backends(config_of(plain, "nf4"), ONE, "cpu")


def test_a_matrix_that_the_checkpoint_does_not_store_in_fp8_is_named(plain: Path) -> None:
    with pytest.raises(CheckpointError, match=r"in block-FP8, and model\.layers\.\d.*weight is BF16"):
        trained(plain, "fp8")


def test_numbers_that_are_not_finite_are_still_counted(fp8: Path, tmp_path: Path) -> None:
    for file in fp8.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.self_attn.o_proj.weight"
    tensors[key].view(torch.uint8)[0, :3] = 0x7F
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = config_of(tmp_path, "fp8")
    model = build_decoder(config.model, config.moe, torch.float32)
    freeze_and_adapt(model, config, torch.float32, torch.float32)
    allocate({0: model}, torch.device("cpu"))
    assert load_hf(model, tmp_path).not_finite == {key: 3}
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
