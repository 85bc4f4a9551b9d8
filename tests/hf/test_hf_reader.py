"""Checkpoint directories that are damaged or hold another model: what is wrong, where, what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_mesh_cases import empty_on_mesh
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM

from automoe.classes.model import TransformersModel
from automoe.config.compose import Arguments
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf import headers
from automoe.hf.api import from_hf
from automoe.hf.catalog import check_catalog
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.headers import read_headers
from automoe.hf.keys import INDEX_FILE
from automoe.hf.read import load_hf
from automoe.hf.write import convert_hf
from automoe.launch.prepare import prepare
from automoe.model.decoder import Decoder
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_decoder, build_parts
from automoe.verify.pool import RankPool
from tests.support.class_models import save_class, tier_config
from tests.support.hf_models import save_small_hf


def empty_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_decoder(config, MoEConfig(), dtype)
    return model.to_empty(device="cpu")


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_small_hf("qwen3_moe", tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_small_hf("qwen3_moe", tmp_path, max_shard_size="60KB")
    assert (tmp_path / INDEX_FILE).is_file()
    return tmp_path


def refused(folder: Path, config: ModelConfig | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_hf(empty_model(config or model_config_from_hf(folder)), folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_sharded_file_of_the_index_is_missing(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    message = refused(sharded)
    assert "1 of the" in message and victim.name in message


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file(sharded: Path, keep: int) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    data = victim.read_bytes()
    victim.write_bytes(data[:keep])
    message = refused(sharded)
    assert "truncated" in message and victim.name in message
    assert f"{len(data[:keep]):,} bytes" in message


def test_git_lfs_pointer(single: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (single / "model.safetensors").write_bytes(pointer)
    assert "Git LFS pointer" in (message := refused(single)) and "git lfs pull" in message


def test_git_lfs_pointer_for_an_index(sharded: Path) -> None:
    (sharded / INDEX_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    assert "Git LFS pointer" in refused(sharded)


def test_header_that_is_no_json(single: Path) -> None:
    (single / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"\x00" * 200)
    assert "not a safetensors file" in refused(single)


def test_directory_without_weights(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    assert "model.safetensors" in (message := refused(single)) and INDEX_FILE in message


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        read_headers(tmp_path / "nowhere")


def test_header_that_may_not_be_read(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(folder: Path, name: str) -> int:
        raise PermissionError(13, "Permission denied", str(folder / name))

    monkeypatch.setattr(headers, "_read_header", denied)
    assert "model.safetensors: Permission denied. Make it readable" in refused(single)


def test_index_of_other_files(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"]["model.layers.9.made_up"] = next(iter(index["weight_map"].values()))
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    assert "model.layers.9.made_up" in refused(sharded)


def test_missing_keys_are_listed_and_counted(single: Path) -> None:
    def drop_expert(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.2.mlp.experts.5." in name]:
            del tensors[name]

    edit(single, drop_expert)
    message = refused(single)
    assert "3 tensors are missing" in message
    assert "model.layers.2.mlp.experts.5.down_proj.weight" in message


def test_many_missing_keys_are_cut_short(single: Path) -> None:
    edit(single, lambda tensors: [tensors.pop(k) for k in list(tensors) if "layers.1.self_attn" in k])
    assert "6 tensors are missing" in (message := refused(single)) and "and 2 more" in message


def test_unexpected_keys_are_listed(single: Path) -> None:
    edit(single, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    assert "1 are not the model's: model.layers.0.self_attn.q_proj.bias" in refused(single)


def test_layers_of_another_count(single: Path) -> None:
    config = replace(model_config_from_hf(single), num_layers=5)
    assert "model.layers.4." in refused(single, config)


def test_wrong_shape(single: Path) -> None:
    config = replace(model_config_from_hf(single), moe_intermediate_size=24)
    message = refused(single, config)
    assert "96 tensors differ from the model's in shape" in message  # 4 layers, 8 experts, 3 projections
    assert "is [16, 32], not [24, 32]" in message


@pytest.mark.parametrize("fused", [False, True])
def test_another_number_of_experts(tmp_path: Path, fused: bool) -> None:
    save_small_hf("dsv3", tmp_path, save_original_format=not fused)
    config = replace(model_config_from_hf(tmp_path), num_experts=16)
    message = refused(tmp_path, config)
    assert ("tensors differ from the model's in shape" if fused else "tensors are missing") in message
    assert "mlp.experts." in message


def test_quantized_tensors_are_refused(single: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    edit(single, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert "quantized (F8_E4M3)" in (message := refused(single)) and name in message


def test_integers_are_read_only_where_the_model_has_them(single: Path, tmp_path: Path) -> None:
    """A table of experts by token id (DeepSeek-V4) is int64; a weight of int64 is nobody's."""
    name = "model.layers.0.self_attn.q_proj.weight"
    edit(single, lambda tensors: tensors.update({name: tensors[name].to(torch.int64)}))
    assert f"1 tensors are integers where the model has fractions, or the reverse: {name} is I64" in refused(single)
    save_class("deepseek_v4", tmp_path / "v4")
    config = tier_config(tmp_path / "v4")
    model = TransformersModel(config, MoEConfig(experts="loop")).to_empty(device="cpu")
    load_hf(model, tmp_path / "v4")
    (table, *_) = (buffer for buffer in model.buffers() if buffer.dtype == torch.int64 and buffer.dim() == 2)
    assert table[:3].tolist() == [[0, 1], [3, 4], [6, 7]]
    (key, *_) = (key for key in load_file(tmp_path / "v4" / "model.safetensors") if key.endswith("tid2eid"))
    edit(tmp_path / "v4", lambda tensors: tensors.update({key: tensors[key].float()}))
    assert f"or the reverse: {key} is F32" in refused(tmp_path / "v4", config)


@pytest.mark.parametrize("read", [model_config_from_hf, tier_config], ids=["native", "class"])
@pytest.mark.parametrize("ids", [[3, 8], [-1, 3]])
def test_a_table_of_token_ids_names_experts_of_the_model(tmp_path: Path, read: Callable, ids: list[int]) -> None:
    save_class("deepseek_v4", tmp_path)
    (key, *_) = (key for key in load_file(tmp_path / "model.safetensors") if key.endswith("tid2eid"))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key][7] = torch.tensor(ids)

    edit(tmp_path, change)
    said = f"row 7 of {key} is {ids}, and experts are numbered from 0 to 7."
    assert said in refused(tmp_path, read(tmp_path))


def test_extra_tensors_that_are_known_are_passed_over_and_named(tmp_path: Path) -> None:
    save_small_hf("qwen3_moe_tied", tmp_path)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)

    edit(tmp_path, add)
    config = model_config_from_hf(tmp_path)
    assert config.tie_embeddings
    loaded = load_hf(empty_model(config), tmp_path)
    assert str(loaded).endswith(
        "; not read: *.rotary_emb.inv_freq (1), computed, not trained"
        "; not read: lm_head.weight (1), a copy of model.embed_tokens.weight"
    )


@pytest.mark.parametrize("change", ["one number", "another dtype"])
def test_a_tied_head_with_numbers_of_its_own_stays_apart_as_in_transformers(change: str, tmp_path: Path) -> None:
    save_small_hf("qwen3_moe_tied", tmp_path / "in")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1.0
        tensors["lm_head.weight"] = head.to(torch.bfloat16) if change == "another dtype" else head

    edit(tmp_path / "in", add)
    assert not model_config_from_hf(tmp_path / "in").tie_embeddings
    with pytest.warns(UserWarning, match="tie_word_embeddings=true.*lm_head.weight.*stay separate, as in transformers"):
        model = from_hf(tmp_path / "in")
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    written = convert_hf(tmp_path / "in", tmp_path / "out")
    assert any("stay separate" in note for note in written.notes)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("model_type", "embedding"), [("dots1", "model.embed_tokens"), ("nemotron_h", "backbone.embeddings")]
)
def test_a_class_that_ties_a_head_with_numbers_of_its_own_says_to_untie_it(
    model_type: str, embedding: str, tmp_path: Path
) -> None:
    """The head was taken for a copy where the class calls its embedding otherwise than most."""
    save_class(model_type, tmp_path, tie_word_embeddings=True)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[f"{embedding}.weight"] + 1}))
    with pytest.raises(CheckpointError, match="Set tie_word_embeddings to false there: transformers also") as caught:
        check_catalog(tmp_path, model_config_from_hf(tmp_path))
    assert "1 are not the model's: lm_head.weight" in str(caught.value)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"tie_word_embeddings": False}))
    assert "lm_head.weight" in check_catalog(tmp_path, model_config_from_hf(tmp_path)).sources


def test_of_a_tensor_in_two_files_the_one_that_the_index_names_counts(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    name, home = next(iter(index.items()))
    other = next(file for file in index.values() if file != home)
    held = load_file(sharded / other)
    right = load_file(sharded / home)[name]
    save_file(held | {name: right + 1}, sharded / other, {"format": "pt"})
    catalog = check_catalog(sharded, model_config_from_hf(sharded))
    assert catalog.sources[name].file == home
    del index[name]
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    assert "nothing says which one counts" in refused(sharded)


@pytest.mark.parametrize("name", ["dsv3", "glm4_moe"])
def test_modules_for_multi_token_prediction_are_passed_over(name: str, tmp_path: Path) -> None:
    """As published: one more layer with experts of its own, two norms and the projection that joins its inputs."""
    save_small_hf(name, tmp_path)

    def module(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        last = {key: value for key, value in tensors.items() if key.startswith("model.layers.3.")}
        behind = {key.replace("layers.3.", "layers.4."): torch.zeros_like(value) for key, value in last.items()}
        names = {"eh_proj": (32, 64), "enorm": (32,), "hnorm": (32,), "shared_head.head": (96, 32)}
        return behind | {f"model.layers.4.{key}.weight": torch.zeros(size) for key, size in names.items()}

    edit(tmp_path, lambda tensors: tensors.update(module(tensors)))
    load_hf(empty_model(model_config_from_hf(tmp_path)), tmp_path)
    # Without that projection it is a layer of a larger model.
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.4.eh_proj.weight"))
    assert "are not the model's: model.layers.4." in refused(tmp_path)


def test_buffers_come_too(tmp_path: Path) -> None:
    hf = save_small_hf("dsv3", tmp_path)
    model = empty_model(model_config_from_hf(tmp_path))
    for buffer in model.buffers():  # fresh memory may happen to be zero
        buffer.fill_(7)
    load_hf(model, tmp_path)
    for layer, moe in model.moe_layers():
        theirs = hf.model.layers[layer].mlp.gate.e_score_correction_bias
        assert theirs.abs().sum() > 0
        assert torch.equal(moe.router.expert_bias, theirs)
        # Not in a checkpoint: as at the start of training.
        assert torch.equal(moe.router.load_fractions, torch.full((8,), 1 / 8, dtype=torch.float64))
        assert not moe.router.load.totals.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_converts_to_the_parameters_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    hf = save_small_hf("mixtral", tmp_path)
    model = empty_model(model_config_from_hf(tmp_path), dtype)
    load_hf(model, tmp_path)
    assert torch.equal(model.lm_head.weight, hf.lm_head.weight.to(dtype))


def failure(path: Path, mesh: MeshConfig) -> str:
    config = Config(mesh=mesh, model=replace(model_config_from_hf(path), num_experts=4))
    config.moe.experts = "loop"
    parts = build_parts(config, build_meshes(resolve_mesh(mesh, None), torch.device("cpu")))
    for part in parts.values():
        part.to_empty(device="cpu")
    with pytest.raises(CheckpointError) as caught:
        load_hf(parts, path)
    return str(caught.value)


def test_all_ranks_raise_the_same_error(single: Path, ranks: RankPool) -> None:
    messages = ranks.run(failure, 2, single, MeshConfig(dp_shard=2, ep=2))
    assert messages[0] == messages[1]
    assert "are not the model's" in messages[0]


def lose_a_file(path: Path, mesh: MeshConfig) -> str:
    """The last rank finds that a file is gone which was there when rank 0 read its header."""
    parts, _, _ = empty_on_mesh(path, mesh)

    def gone(*args: object) -> int:
        raise FileNotFoundError(2, "No such file or directory")

    real = os.preadv
    if torch.distributed.get_rank() == 1:
        os.preadv = gone
    try:
        with pytest.raises(CheckpointError) as caught:
            load_hf(parts, path)
    finally:
        os.preadv = real
    return str(caught.value)


@pytest.mark.parametrize("mesh", [MeshConfig(dp_shard=2, ep=2), MeshConfig(dp_replicate=2, dp_shard=1)])
def test_what_one_rank_cannot_read_stops_all(mesh: MeshConfig, single: Path, ranks: RankPool) -> None:
    messages = ranks.run(lose_a_file, 2, single, mesh)
    assert messages[0] == messages[1]
    assert "model.safetensors" in messages[0] and "cannot be read" in messages[0]


def test_a_tokenizer_larger_than_the_checkpoints_embedding(single: Path, tmp_path: Path) -> None:
    """Found before a rank starts; the checkpoint's own tokenizer fits, and so does a larger embedding."""
    words = tmp_path / "words"
    words.mkdir()
    vocabulary = {f"word{i}": i for i in range(97)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="word0")).save(str(words / "tokenizer.json"))
    (words / "tokenizer_config.json").write_text(json.dumps({"eos_token": "word1"}))
    mesh = ["mesh.pp=1", "mesh.dp_shard=1", "mesh.ep=1", "mesh.ep_shard=1"]
    arguments = Arguments(overrides=[f"model.hf_path={single}", "data=stdlib", f"data.tokenizer={words}", *mesh])
    with pytest.raises(ConfigError) as caught:
        prepare(arguments)
    assert "makes ids up to 96, and the embedding ends at 95" in caught.value.rule
    assert caught.value.remedy.startswith("Nearest valid choice: model.vocab_size=104 (")
    assert caught.value.remedy.endswith(f", or Set data.tokenizer={single}")
