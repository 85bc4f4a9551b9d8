"""Adapters leave in two ways, merged and as peft's, and both compute what was trained."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hf_mesh_cases import MESHES, config_for, world_size
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from automoe import cli
from automoe.comm.local_shard import global_offset, local_shard
from automoe.config.frozen import save_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, LoraConfig, MeshConfig, MoEConfig, TrainConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.adapter import from_peft
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.peft import WEIGHTS_FILE, gathered_adapters, to_peft, verify_peft
from automoe.hf.read import load_hf
from automoe.hf.save_plan import gather
from automoe.hf.verify import verify_hf
from automoe.hf.write import plan_export, to_hf
from automoe.model.decoder import Decoder
from automoe.model.lora import freeze_and_adapt
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import allocate, build_decoder, build_parts
from automoe.verify.pool import RankPool
from tests.support.chat import save_tokenizer
from tests.support.hf_models import save_small_hf
from tests.support.hostile import ends_within

LORA = LoraConfig(rank=4, alpha=6.0)
TOKENS = torch.arange(48).view(2, 24)
FAMILIES = [
    "dsv3",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "llama",
    "qwen2_moe",
    "glm4_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "glm4_moe_lite",
    "dsv32",
    "glm_moe_dsa_shared",
    "minimax_m2",
    "olmoe",
    "granitemoeshared",
    "dsv2",
    "ernie4_5_moe",
    "dsv4",
    "longcat",
]
ALWAYS = FAMILIES[:5]
FUSED_ALONE = ("qwen2_moe", "qwen3_5_moe", "granitemoeshared", "dsv4")


def trained(source: Path, lora: LoraConfig = LORA, seed: int = 5) -> Decoder:
    """A checkpoint with adapters as after training: every number of A and B another one."""
    config = Config(model=model_config_from_hf(source), moe=MoEConfig(experts="loop"), lora=lora)
    model = build_decoder(config.model, config.moe, torch.float32)
    freeze_and_adapt(model, config, torch.float32, torch.float32)
    allocate({0: model}, torch.device("cpu"))
    load_hf(model, source)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora." in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model.eval()


@torch.no_grad()
def logits(model, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.exhaustive) for n in FAMILIES]
)
def test_adapters_leave_exactly(name: str, tmp_path: Path) -> None:
    from peft import PeftModel  # which takes seconds

    source = tmp_path / "source"
    save_small_hf(name, source)
    (tmp_path / "plain").touch()
    allowed = (tmp_path / "plain").stat().st_mode & 0o777  # what the umask leaves
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model = trained(source)
    expected = logits(model)
    assert off(logits(plain), expected) > 0.05, "the adapters have to matter"
    before = {n: p.clone() for n, p in model.named_parameters()}
    if name in FUSED_ALONE:
        with pytest.raises(ConfigError, match="Use fused"):
            to_peft(model, tmp_path / "none", LORA, layout="published")
    for layout in ("auto" if name in FUSED_ALONE else "published", "fused"):
        written = to_peft(model, tmp_path / layout, LORA, layout=layout)
        first = "4 of experts, " if name == "longcat" else ""  # whose first layer has experts
        assert re.search(rf"an adapter of [\d,]+ numbers, as peft loads it \({first}\d+ of attention", written)
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / layout).iterdir()} == {allowed}
        base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        loaded = PeftModel.from_pretrained(base, str(tmp_path / layout)).eval()
        assert off(logits(loaded), expected) < 1e-5, layout
        # Read back into a model whose adapters are others: every number is where it was.
        again = trained(source, seed=6)
        from_peft(again, tmp_path / layout, LORA)
        assert not [n for n, p in again.named_parameters() if not torch.equal(p, before[n])]
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters()), "an adapter's export changes nothing"
    merged = to_hf(model, tmp_path / "merged")
    assert merged.checked and merged.logits_error < 1e-5
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert off(logits(theirs), expected) < 1e-5 and off(logits(model), expected) < 1e-5
    untouched = [n for n, p in model.named_parameters() if "norm" in n or "router" in n or "embed" in n]
    assert all(torch.equal(model.get_parameter(n), before[n]) for n in untouched)


def test_an_adapter_of_joined_matrices_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Granite's gate and up have a block of a matrix each: what lies outside, or another rank, is refused."""
    save_small_hf("granitemoeshared", tmp_path / "source")
    model, out = trained(tmp_path / "source"), tmp_path / "out"
    to_peft(model, out, LORA)
    again = trained(tmp_path / "source", seed=6)
    from_peft(again, out, LORA)
    before = dict(model.named_parameters())
    assert not [name for name, p in again.named_parameters() if not torch.equal(p, before[name])]
    metadata = {"belongs": belongs((out / WEIGHTS_FILE).read_bytes())}
    good, settings = load_file(out / WEIGHTS_FILE), json.loads((out / "adapter_config.json").read_text())
    key = next(key for key in good if "input_linear.lora_B" in key)
    rows, columns = good[key].shape
    assert not good[key][: rows // 2, columns // 2 :].any()
    good[key][0, columns - 1] = 0.5
    save_file(good, out / WEIGHTS_FILE, metadata)
    with pytest.raises(CheckpointError, match="input_linear.*mixes gate and up"):
        from_peft(again, out, LORA)
    settings["rank_pattern"] = {}
    (out / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"rank_pattern=\{\}, alpha_pattern=\{'shared_mlp\.input_linear'"):
        from_peft(again, out, LORA)


def test_a_model_of_a_mixtures_family_without_experts_has_an_adapter(tmp_path: Path) -> None:
    """peft goes by the family: it would take a plain ``gate_proj`` for that of experts also where there are none."""
    save_small_hf("glm4_moe", tmp_path / "source", other_sizes={"num_hidden_layers": 1, "first_k_dense_replace": 1})
    written = to_peft(trained(tmp_path / "source"), tmp_path / "out", LORA)
    assert written.endswith("(4 of attention, 3 of mlp)")


def test_an_adapter_that_peft_loads_otherwise_is_no_adapter(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_small_hf("dsv3", source)
    model = trained(source)
    config, ours = model.config, gathered_adapters({0: model})
    to_peft(model, tmp_path / "out", LORA)
    good = load_file(tmp_path / "out" / WEIGHTS_FILE)
    assert verify_peft(tmp_path / "out", config, LORA, ours)["experts"] == 6
    shared = next(key for key in good if "shared_experts.up_proj.lora_B" in key)
    for change, said in (
        ({shared: good[shared] + 1}, r"different numbers to model\.layers\.\d\.mlp\.shared_experts\.up_proj"),
        ({shared: None}, "peft says"),
    ):
        folder = tmp_path / "bad"
        shutil.copytree(tmp_path / "out", folder)
        save_file({k: v for k, v in (good | change).items() if v is not None}, folder / WEIGHTS_FILE)
        with pytest.raises(CheckpointError, match=said):
            verify_peft(folder, config, LORA, ours)
        shutil.rmtree(folder)
    fewer = {name: tensor for name, tensor in ours.items() if "layers.2.mlp.experts" not in name}
    with pytest.raises(CheckpointError, match=r"peft adapts model\.layers\.2\.mlp\.experts"):
        verify_peft(tmp_path / "out", config, LORA, fewer)
    with pytest.raises(ConfigError, match="auto, published, fused"):
        to_peft(model, tmp_path / "other", LORA, layout="other")


def belongs(raw: bytes) -> str:
    """The line in the header of a safetensors file that says which run its adapter is of."""
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["belongs"]


def test_a_run_that_left_an_adapter_alone_is_merged_with_its_own_base(tmp_path: Path, capsys) -> None:
    """With another base, other settings or a damaged file nothing is written."""
    source, run_dir = tmp_path / "source", tmp_path / "run"
    save_small_hf("mixtral", source, other_sizes={"vocab_size": 304})
    save_tokenizer(source, "chatml")
    save_small_hf("mixtral", tmp_path / "other", seed=1, other_sizes={"vocab_size": 304})
    lora = replace(LORA, export="adapter")
    model = trained(source, lora)
    to_peft(model, run_dir / "adapter", lora)
    model_config = replace(model.config, hf_path=str(source))
    config = Config(run_dir=str(run_dir), model=model_config, lora=lora, train=TrainConfig(dtype="float32"))
    save_config(config, run_dir)

    def export(*more: str) -> int:
        return cli.main(["export", str(run_dir), "--out", str(tmp_path / "merged"), *more])

    for changed in (
        {"model": replace(model_config, hf_path=str(tmp_path / "other"))},
        {"lora": replace(lora, alpha=7.0)},
        {"lora": replace(lora, targets=["attention"])},
    ):
        save_config(replace(config, **changed), run_dir)
        assert export() == 2
        said = capsys.readouterr().err
        assert "adapter_model.safetensors belongs to crc32:" in said and "Use what it was trained with" in said
    save_config(config, run_dir)
    whole = (run_dir / "adapter" / WEIGHTS_FILE).read_bytes()
    (run_dir / "adapter" / WEIGHTS_FILE).write_bytes(whole[:-8])
    assert export() == 2 and "cannot be read" in capsys.readouterr().err
    (run_dir / "adapter" / WEIGHTS_FILE).write_bytes(whole)
    tensors, metadata = load_file(run_dir / "adapter" / WEIGHTS_FILE), {"belongs": belongs(whole)}
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for change in (
        {key: tensors[key][:1]},  # torch would copy the row to all others
        {key: tensors[key].T.contiguous()},
        {key: tensors[key].long()},
        {key: tensors[key].to(torch.float8_e4m3fn)},
        {key: tensors[key] / 0},
        {key: None, "more": tensors[key]},
    ):
        changed = {name: one for name, one in (tensors | change).items() if one is not None}
        save_file(changed, run_dir / "adapter" / WEIGHTS_FILE, metadata)
        assert export() == 2
        said = capsys.readouterr().err
        assert any(name in said for name in change), said
    (run_dir / "adapter" / WEIGHTS_FILE).unlink()
    os.mkfifo(run_dir / "adapter" / WEIGHTS_FILE)
    with ends_within(60):
        assert export() == 2 and "is a FIFO, not a file" in capsys.readouterr().err
    (run_dir / "adapter" / WEIGHTS_FILE).unlink()
    (run_dir / "adapter" / WEIGHTS_FILE).write_bytes(whole)
    assert export("--ema") == 2 and not (tmp_path / "merged").exists()
    for more, says in (("--fp8", "--fp8 is for whole models"), ("--dtype=float32", "--dtype float32 is for whole")):
        assert export("--adapter", more) == 2 and says in capsys.readouterr().err
    assert cli.main(["export", str(run_dir), "--out", str(source), "--overwrite"]) == 2
    assert "it is model.hf_path of the run" in capsys.readouterr().err and (source / "config.json").exists()
    save_config(replace(config, model=replace(model_config, hf_path="~/source")), run_dir)
    with mock.patch.dict(os.environ, HOME=str(tmp_path)):
        assert cli.main(["export", str(run_dir), "--out", str(source), "--overwrite"]) == 2
    assert "it is model.hf_path of the run" in capsys.readouterr().err and (source / "config.json").exists()
    save_config(config, run_dir)
    assert export() == 0
    to_hf(model, tmp_path / "expected")
    written, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected"))
    assert written.keys() == expected.keys() and all(torch.equal(written[key], expected[key]) for key in expected)
    # And asked, or written as an adapter once more.
    assert cli.main(["generate", str(run_dir), "--max-new-tokens", "2", "--text", "the"]) == 0
    assert cli.main(["export", str(run_dir), "--out", str(tmp_path / "again"), "--adapter"]) == 0
    first, second = (load_file(folder / WEIGHTS_FILE) for folder in (run_dir / "adapter", tmp_path / "again"))
    assert all(torch.equal(second[key], first[key]) for key in first)


def test_gate_and_up_without_down_leave_in_the_layout_that_peft_loads(tmp_path: Path) -> None:
    save_small_hf("mixtral", tmp_path / "source", other_sizes={"num_hidden_layers": 1})
    lora = LoraConfig(rank=2, targets=["experts.gate_up_proj"])
    model = trained(tmp_path / "source", lora)
    with pytest.raises(ConfigError, match="Use fused"):
        to_peft(model, tmp_path / "none", lora, layout="published")
    assert to_peft(model, tmp_path / "out", lora).endswith("(1 of experts)")
    model.config = replace(model.config, random_weights=True)
    with pytest.raises(ConfigError, match="model.hf_path=.*these began as random numbers"):
        to_peft(model, tmp_path / "random", lora)


def fill_adapters(parts: dict[int, Decoder]) -> None:
    """Every A and B of whole values that the parameter's name alone decides, this rank's part of them."""
    for part in parts.values():
        for name, parameter in part.named_parameters():
            if ".lora." in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                whole, local = torch.randn(parameter.shape, generator=generator) * 0.3, local_shard(parameter.data)
                first = global_offset(parameter)
                local.copy_(whole[tuple(slice(at, at + n) for at, n in zip(first, local.shape, strict=True))])


def adapted_on(source: Path, mesh: MeshConfig, lora: LoraConfig) -> dict[int, Decoder]:
    config = replace(config_for(source, mesh), lora=lora)
    parts = build_parts(config, build_meshes(resolve_mesh(mesh, None), torch.device("cpu")))
    allocate(parts, torch.device("cpu"))
    load_hf(parts, source)
    fill_adapters(parts)
    return parts


def export_both(source: Path, mesh: MeshConfig, out: Path) -> bool:
    """On a mesh: as an adapter, and then merged; whether the base is what it was in between, and torch is silent."""
    warned: list[logging.LogRecord] = []
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(lambda record: warned.append(record) is None)
    parts = adapted_on(source, mesh, LORA)
    before = [local_shard(p).clone() for part in parts.values() for p in part.parameters()]
    to_peft(parts, out / "adapter", LORA)
    same = all(map(torch.equal, before, [local_shard(p) for part in parts.values() for p in part.parameters()]))
    return same and to_hf(parts, out / "merged").checked and not warned


EXPORTED_FROM = ["tp2_dp2_ep2_etp2", "tp2", "ep2", "pp2", "dp4_etp2"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", EXPORTED_FROM)
def test_adapters_leave_a_mesh_as_they_leave_one_process(mesh: str, tmp_path: Path, ranks: RankPool) -> None:
    from peft import PeftModel  # which takes seconds

    source = tmp_path / "source"
    save_small_hf("dsv3", source)
    whole = trained(source)
    fill_adapters({0: whole})
    expected = logits(whole)
    assert all(ranks.run(export_both, world_size(MESHES[mesh]), source, MESHES[mesh], tmp_path))
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert off(logits(base.eval()), expected) > 1e-2
    assert off(logits(PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()), expected) < 1e-5
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert off(logits(merged), expected) < 1e-5


WIDE = LoraConfig(rank=3)  # no other dim is 3


def num_factors() -> int:
    return sum(type(thing) is torch.Tensor and 3 in thing.shape for thing in gc.get_objects())


def export_counting(source: Path, mesh: MeshConfig, out: Path) -> tuple[int, int, str]:
    """Most factors of adapters beside the model's own during an export; their number in all; what a wrong file gives."""
    parts = adapted_on(source, mesh, WIDE)
    before, most = num_factors(), 0
    for item in plan_export(parts, "keep", "plain", None):
        gather(item, dist.get_rank())
        most = max(most, num_factors())
    to_hf(parts, out)
    with (out / "model-00001-of-00002.safetensors").open("r+b") as file:  # one rank alone sees it
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")
    try:
        verify_hf(parts, out)
    except CheckpointError as error:
        return most - before, before, str(error)
    return most - before, before, ""


@pytest.mark.parametrize("mesh", ["ep_shard2", pytest.param("ep2", marks=pytest.mark.exhaustive)])
def test_an_export_gathers_the_adapters_of_a_weight_at_a_time(mesh: str, tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf("qwen3_moe", tmp_path / "source", other_sizes={"num_hidden_layers": 4})
    counts = ranks.run(export_counting, 2, tmp_path / "source", MESHES[mesh], tmp_path / "out")
    for most, whole, error in counts:
        assert most <= 8 < whole / 3  # of two weights, each beside what it is cut from
        assert "numbers differ" in error, "every rank says so, and none waits for the other's adapters"
