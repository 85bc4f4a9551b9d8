"""Modules for multi-token prediction in HuggingFace folders: the published names, copies of embedding and head, meshes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_mesh_cases import MESHES, config_for, stored
from safetensors.torch import load_file, save_file

from automoe.config.compose import parse_arguments
from automoe.config.layout import with_layout
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import LoraConfig, MeshConfig, ModelConfig, MoEConfig, ParallelConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.peft import to_peft
from automoe.hf.read import load_hf
from automoe.hf.write import to_hf
from automoe.launch.prepare import compose
from automoe.model.causal_lm import CausalLM
from automoe.model.init import initialize, reset_buffers
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_decoder, build_parts
from automoe.verify.pool import RankPool
from tests.support.hf_models import save_small_hf
from tests.support.releases import HALVES, needs
from tests.support.wrappers import save_wrapper

DEPTHS = 2


def with_modules(folder: Path, depths: int = DEPTHS) -> CausalLM:
    """The model in ``folder`` with random modules behind it."""
    found = replace(model_config_from_hf(folder), random_weights=True, num_mtp_layers=depths)
    model = build_decoder(found, MoEConfig(experts="loop"), torch.float32)
    model.to_empty(device="cpu")
    reset_buffers(model)
    initialize(model, 0.05, seed=4)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the published layout: two modules behind four layers."""
    root = tmp_path_factory.mktemp("mtp")
    save_small_hf("dsv3", root / "plain")
    model = with_modules(root / "plain")
    written = to_hf(model, root / "modules")  # checked against transformers, and bit for bit
    assert written.checked and written.logits_error is not None
    return root / "modules"


def test_names_are_those_of_published_files(source: Path) -> None:
    tensors = stored(source)
    for layer in (4, 5):
        ours = {key.removeprefix(f"model.layers.{layer}.") for key in tensors if f"layers.{layer}." in key}
        like = {key.removeprefix("model.layers.3.") for key in tensors if "layers.3." in key}
        extra = "enorm.weight hnorm.weight eh_proj.weight shared_head.norm.weight shared_head.head.weight"
        assert ours == like | {*extra.split(), "embed_tokens.weight"}
        assert torch.equal(tensors[f"model.layers.{layer}.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
        assert torch.equal(tensors[f"model.layers.{layer}.shared_head.head.weight"], tensors["lm_head.weight"])
        hidden = tensors["lm_head.weight"].shape[1]
        assert tensors[f"model.layers.{layer}.eh_proj.weight"].shape == (hidden, 2 * hidden)
    assert json.loads((source / "config.json").read_text())["num_nextn_predict_layers"] == DEPTHS
    assert model_config_from_hf(source).num_mtp_layers == 0
    assert model_config_from_hf(source, mtp=True).num_mtp_layers == DEPTHS


def test_modules_are_left_out_unless_they_are_asked_for(source: Path) -> None:
    for depths, left in ((0, 2), (1, 1)):
        model = build_decoder(
            replace(model_config_from_hf(source), num_mtp_layers=depths), MoEConfig(experts="loop"), torch.float32
        )
        model.to_empty(device="cpu")
        notes = load_hf(model, source).notes
        [note] = notes
        assert "copied bit for bit into an export" in note and note.count("model.layers.") == left


def changed(source: Path, folder: Path, change) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, folder / file.name, {"format": "pt"})
    return folder


def test_copies_may_be_missing_but_not_differ(source: Path, tmp_path: Path) -> None:
    copies = [
        f"model.layers.{layer}.{name}.weight" for layer in (4, 5) for name in ("embed_tokens", "shared_head.head")
    ]

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for key in copies:
            del tensors[key]

    def differ(tensors: dict[str, torch.Tensor]) -> None:
        tensors[copies[1]][3, 1] += 1

    model, expected = with_modules(source), stored(source)
    load_hf(model, changed(source, tmp_path / "dropped", drop))
    assert torch.equal(model.get_parameter("layers.5.eh_proj.weight"), expected["model.layers.5.eh_proj.weight"])
    with pytest.raises(CheckpointError, match=rf"{copies[1]} differs from the model's own tensor.*num_mtp_layers=0"):
        load_hf(model, changed(source, tmp_path / "other", differ))


def test_eight_bits_spare_what_published_files_spare(source: Path, tmp_path: Path) -> None:
    model = with_modules(source)
    load_hf(model, source)
    to_hf(model, tmp_path / "fp8", encoding="fp8")
    scaled = {key for key in stored(tmp_path / "fp8") if key.endswith("_scale_inv")}
    assert "model.layers.4.self_attn.o_proj.weight_scale_inv" in scaled
    kept = ("eh_proj", "embed_tokens", "shared_head")
    assert not any(name in key for key in scaled for name in kept)
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {f"model.layers.5.{name}" for name in ("eh_proj", "embed_tokens", "shared_head.head", "mlp.gate")} <= {*said}
    again = with_modules(tmp_path / "fp8")
    load_hf(again, tmp_path / "fp8")
    pair = (part.get_parameter("layers.4.eh_proj.weight") for part in (model, again))
    assert torch.equal(*pair)


def round_trip(source: Path, mesh: MeshConfig, out: Path, **parallel: str) -> int:
    """Load on a mesh, write again; the tensors that this rank's stages have."""
    config = config_for(source, mesh)
    model: ModelConfig = replace(config.model, num_mtp_layers=DEPTHS)
    meshes = build_meshes(resolve_mesh(mesh, None), torch.device("cpu"))
    parts = build_parts(with_layout(replace(config, model=model, parallel=ParallelConfig(**parallel))), meshes)
    for part in parts.values():
        part.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.fill_(float("nan"))  # nothing may be left unread
    load_hf(parts, source)
    to_hf(parts, out)
    return sum(1 for part in parts.values() for _ in part.parameters())


IN_TURN = dict(schedule="Interleaved1F1B")
# With copies of the embedding on one stage, on two stages of one rank, and on both ranks.
MAPPINGS: list = [(name, {}) for name in MESHES if name != "one"]
MAPPINGS += [
    ("pp2", IN_TURN | dict(layout="Ettttmm|||L")),
    ("pp2", IN_TURN | dict(layout="Et|ttt|mm|L")),
    ("pp2_dp2_ep2", IN_TURN | dict(layout="Ett|tt|m|mL")),
    pytest.param("pp2_ep2_ep_shard2", dict(schedule="ZBVZeroBubble", layout="Ett|ttm||mL"), marks=needs(HALVES)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "parallel"), MAPPINGS)
def test_a_mesh_reads_and_writes_them(
    ranks: RankPool, source: Path, tmp_path: Path, name: str, parallel: dict[str, str]
) -> None:
    mesh = MESHES[name]
    ranks.run(round_trip, resolve_mesh(mesh, None).world_size, source, mesh, tmp_path / "out", **parallel)
    expected, found = stored(source), stored(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_modules_that_are_copied_and_not_trained_are_refused(kind: str, tmp_path: Path) -> None:
    """A native family and a class, with tensors ``mtp.*`` that config.json does not count."""
    save_wrapper(kind, tmp_path)
    with pytest.raises(ConfigError, match="holds 0 modules that automoe trains") as error:
        compose(parse_arguments([f"model.hf_path={tmp_path}", "data=stdlib", "model.num_mtp_layers=1"]))
    assert error.value.remedy == "Set model.num_mtp_layers=0"


def test_more_modules_than_a_checkpoint_has_are_refused_before_ranks_start(source: Path) -> None:
    settings = ["model.hf_path=" + str(source), "data=stdlib"]
    assert compose(parse_arguments([*settings, "model.num_mtp_layers=2"])).model.num_mtp_layers == 2
    assert compose(parse_arguments(settings)).model.num_mtp_layers == 0
    with pytest.raises(ConfigError, match="holds 2 modules") as error:
        compose(parse_arguments([*settings, "model.num_mtp_layers=3"]))
    assert error.value.key == "model.num_mtp_layers" and error.value.value == 3


def test_an_adapter_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no modules for multi-token prediction"):
        to_peft(with_modules(source), tmp_path / "adapter", LoraConfig(rank=4))
