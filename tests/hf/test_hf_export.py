"""Exports: proven or not there, whatever goes wrong on the way."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, __version__

import automoe
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, tokenizer_of
from automoe.data.tokenizer import load_tokenizer
from automoe.errors import CheckpointError, ConfigError
from automoe.hf import verify
from automoe.hf.catalog import check_catalog
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.keys import INDEX_FILE, KeyMap
from automoe.hf.read import load_hf
from automoe.hf.verify import verify_hf
from automoe.hf.write import convert_hf, to_hf
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import allocate, build_parts, materialize
from automoe.verify.pool import RankPool
from tests.support.hf_models import save_small_hf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_small_hf("dsv3", tmp_path / "source")
    return tmp_path / "source"


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    "name",
    ["dsv3_groups_yarn", "qwen3_moe_tied", "mixtral_odd", "gpt_oss", "qwen2_moe_odd", "glm4_moe_odd"]
    + ["granitemoeshared_odd", "dsv2_odd", "ernie4_5_moe_odd"]
    + [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama_odd", "qwen3", "qwen3_next_odd")],
)
def test_what_is_exported_reloads_with_equal_logits(name: str, tmp_path: Path) -> None:
    save_small_hf(name, tmp_path / "source")
    model = automoe.from_hf(tmp_path / "source")
    with torch.no_grad():  # as after training: other numbers than the source's
        for parameter in model.parameters():
            parameter.mul_(1.01)
    written = automoe.to_hf(model, tmp_path / "out")
    assert written.checked and written.logits_error is not None and written.logits_error < 1e-5
    assert str(tmp_path / "out") in str(written)
    tokens = torch.arange(30)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_experts_leave_as_they_are_published_however_they_came(tmp_path: Path) -> None:
    """Qwen3.5's lie in one tensor a layer, and transformers saves them one by one."""
    save_small_hf("qwen3_5_moe", tmp_path / "published")
    save_small_hf("qwen3_5_moe", tmp_path / "saved", save_original_format=True)
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() > {"model.layers.0.mlp.experts.7.up_proj.weight"}
    automoe.to_hf(automoe.from_hf(tmp_path / "saved"), tmp_path / "out")
    published, out = (load_file(tmp_path / name / "model.safetensors") for name in ("published", "out"))
    assert published.keys() == out.keys()
    assert all(torch.equal(published[key], out[key]) for key in published)


def test_one_weight_changed_after_the_export_is_found(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    to_hf(model, tmp_path / "out", verify=False)
    assert verify_hf(model, tmp_path / "out") < 1e-5
    with torch.no_grad():
        model.layers["2"].mlp.experts.down_proj[5, 3, 7] += 1e-3
    with pytest.raises(CheckpointError, match=r"experts\.5\.down_proj.*layers\.2\.mlp\.experts\.down_proj: 1 of"):
        verify_hf(model, tmp_path / "out")


def test_selection_bias_changed_after_the_export_is_found(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    to_hf(model, tmp_path / "out", verify=False)
    model.layers["1"].mlp.router.expert_bias[0] += 1e-4
    with pytest.raises(CheckpointError, match="e_score_correction_bias"):
        verify_hf(model, tmp_path / "out")


def test_a_mistake_that_reader_and_writer_share_is_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits alone would not see it: the logits of transformers do."""
    pieces = KeyMap.pieces

    def swapped(keys, name, *args):
        names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        for old, new in names.items():
            if f"layers.3.mlp.shared_experts.{old}" in name:
                return pieces(keys, name.replace(old, new), *args)
        return pieces(keys, name, *args)

    model = automoe.from_hf(source)
    monkeypatch.setattr(KeyMap, "pieces", swapped)
    with pytest.raises(CheckpointError, match="transformers computes other logits"):
        to_hf(model, tmp_path / "out")
    assert entries(tmp_path) == ["source"]


def test_other_experts_in_transformers_are_found(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the choices of one forced on the other, logits alone would agree."""
    real = verify._run_transformers

    def other_experts(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        logits, choices = real(*given)
        return logits, (choices + 1) % 8

    monkeypatch.setattr(verify, "_run_transformers", other_experts)
    with pytest.raises(CheckpointError, match="transformers sends .* of tokens to other experts"):
        to_hf(automoe.from_hf(source), tmp_path / "out")
    assert entries(tmp_path) == ["source"]


def test_weights_that_are_not_numbers_are_not_exported(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"1 numbers of model\.norm\.weight are NaN or infinite"):
        to_hf(model, tmp_path / "out")
    assert entries(tmp_path) == ["source"]


def test_finite_weights_whose_products_are_not_are_told_as_such(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    with torch.no_grad():
        model.norm.weight.fill_(3e38)
    with pytest.raises(
        CheckpointError, match=r": [\d,]+ of [\d,]+ logits of transformers are NaN or infinite: its weig"
    ):
        to_hf(model, tmp_path / "out")


def test_failed_export_leaves_the_older_one(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    to_hf(model, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.norm.weight[0] = float("inf")
    with pytest.raises(CheckpointError):
        to_hf(model, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert entries(tmp_path) == ["out", "source"]


def test_large_models_get_a_census_instead_of_logits(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "MAX_COMPARED_BYTES", 1000)
    model = automoe.from_hf(source)
    assert to_hf(model, tmp_path / "out").logits_error is None
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"vocab_size": 95}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \[96, 32\], not \[95, 32\]"):
        verify_hf(model, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"transformers builds another model.*lm_head\.weight.*embed_tokens"):
        verify._compare_census(model.config, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 1.0}))
    with pytest.raises(CheckpointError, match=r"model\.router\.routed_scaling_factor=1\.0"):
        verify_hf(model, tmp_path / "out")


def test_a_family_that_an_older_transformers_lacks_leaves_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As muse_spark with 5.19: tensors and config.json are checked, and the warning names what was not."""
    save_small_hf("mixtral", tmp_path / "mixtral")
    expected = load_file(tmp_path / "mixtral" / "model.safetensors")
    monkeypatch.delitem(CONFIG_MAPPING._mapping, "mixtral")
    with pytest.raises(ValueError, match="does not recognize this architecture"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral")
    model = automoe.from_hf(tmp_path / "mixtral", dtype=torch.float32)
    with pytest.warns(
        UserWarning, match=f"not compared with transformers, whose release {__version__} has no .*=mixtral"
    ):
        written = to_hf(model, tmp_path / "out")
    assert written.checked and written.logits_error is None and "transformers" not in str(written)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], x) for key, x in expected.items())


def test_a_delta_net_of_equal_shapes_and_other_heads_is_found(tmp_path: Path) -> None:
    """Half as many heads of twice the width: every tensor keeps its shape, and the numbers mean something else."""
    save_small_hf("qwen3_next", tmp_path)
    config = model_config_from_hf(tmp_path)
    heads, dim = config.attention.linear_num_key_heads, config.attention.linear_key_head_dim
    hf = json.loads((tmp_path / "config.json").read_text())
    changed = hf | {"linear_num_key_heads": heads // 2, "linear_key_head_dim": dim * 2}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=rf"model\.attention\.linear_num_key_heads={heads // 2}, and the model"):
        verify.verify_with_transformers(config, check_catalog(tmp_path, config))


def test_existing_directories_are_not_overwritten_unasked(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("...")
    with pytest.raises(CheckpointError, match="exists"):
        automoe.to_hf(model, source)
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        automoe.to_hf(model, tmp_path / "thesis", overwrite=True)
    assert entries(tmp_path / "thesis") == ["chapter1.tex"]


def test_left_over_of_a_killed_export_is_cleared_away(source: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "model-00001-of-00009.safetensors").write_bytes(b"half")
    automoe.to_hf(automoe.from_hf(source), tmp_path / "out")
    assert entries(tmp_path) == ["out", "source"]
    assert "model.safetensors" in entries(tmp_path / "out")


@pytest.mark.parametrize("at_the_end", [False, True], ids=["write", "close"])
def test_disk_full_is_an_error_that_names_the_file(
    at_the_end: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stream still holds when it is closed may be what does not fit."""
    import builtins

    class Full:
        def write(self, data: object) -> None:
            if not at_the_end:
                raise OSError(28, "No space left on device")

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            if at_the_end:
                raise OSError(28, "No space left on device")

    real = builtins.open

    def full(file, mode="r", *args, **options):
        return Full() if str(file).endswith(".safetensors") and mode == "wb" else real(file, mode, *args, **options)

    model = automoe.from_hf(source)
    monkeypatch.setattr(builtins, "open", full)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: No space left on device"):
        to_hf(model, tmp_path / "out", verify=False)
    monkeypatch.undo()
    assert entries(tmp_path) == ["source"]


def test_directory_that_cannot_be_made(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        to_hf(automoe.from_hf(source), tmp_path / "file" / "out", verify=False)


def test_settings_and_tokenizer_of_the_source_go_along(source: Path, tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "eos_token_id": [7, 8]}
    (source / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, 8], "bos_token_id": 5}))
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "tiktoken.model").write_text("IQ== 0")
    (source / "tokenization_kimi.py").write_text("class TikTokenTokenizer: ...")
    to_hf(automoe.from_hf(source), tmp_path / "out", dtype="bfloat16", verify=False)
    out = tmp_path / "out"
    assert json.loads((out / "generation_config.json").read_text()) == generation
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "tiktoken.model").is_file() and (out / "tokenization_kimi.py").is_file()
    written = json.loads((out / "config.json").read_text())
    assert (written["eos_token_id"], written["bos_token_id"]) == ([7, 8], 5)
    assert written["dtype"] == "bfloat16"


def test_dtypes_of_an_export(source: Path, tmp_path: Path) -> None:
    model = automoe.from_hf(source)
    automoe.to_hf(model, tmp_path / "out", dtype=torch.bfloat16)
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype=float16: an export has one of keep, bfloat16, float32"):
        automoe.to_hf(model, tmp_path / "half", dtype="float16")
    assert entries(tmp_path) == ["out", "source"]


@pytest.mark.parametrize("wide", ["model.norm.weight", "model.embed_tokens.weight"])
def test_an_export_keeps_the_dtypes_of_the_checkpoint(wide: str, source: Path, tmp_path: Path) -> None:
    """Parameters are float32 while they are trained; the one that the checkpoint has in float32 stays that too."""
    convert_hf(source, tmp_path / "half", dtype="bfloat16")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    stored[wide] = stored[wide].float()
    save_file(stored, tmp_path / "half" / "model.safetensors", {"format": "pt"})
    model = automoe.from_hf(tmp_path / "half")
    assert model.lm_head.weight.dtype == torch.float32
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    said = str(automoe.to_hf(model, tmp_path / "out"))
    assert "equal bit for bit to the weights in the files' dtypes, logits" in said
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert {key: tensor.dtype for key, tensor in out.items()} == {key: tensor.dtype for key, tensor in stored.items()}
    dtype = "float32" if "embed" in wide else "bfloat16"  # that of the first parameter
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert {out[key].dtype for key in (wide, "lm_head.weight")} == {torch.float32, torch.bfloat16}
    automoe.to_hf(model, tmp_path / "wide", dtype="float32")
    assert load_file(tmp_path / "wide" / "model.safetensors")["lm_head.weight"].dtype == torch.float32


def test_an_export_keeps_the_tokenizer_that_trained_it(source: Path, tmp_path: Path) -> None:
    """Bytes, another directory's, the source's own: its files, and its end of text where text is made."""
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 7}))
    words = {"a": 0, "</s>": 1}
    other = tmp_path / "other"
    for folder, eos in ((source, "a"), (other, "</s>")):
        folder.mkdir(exist_ok=True)
        Tokenizer(models.WordLevel(words, unk_token="a")).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    model = automoe.from_hf(source)
    for tokenizer, eos in (("byte", 256), (str(other), 1), (f"{source}/", 7), (None, 7)):
        out = tmp_path / "out"
        to_hf(model, out, tokenizer=tokenizer, overwrite=True, verify=False)
        assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == eos
        assert load_tokenizer(str(out)).digest == load_tokenizer(tokenizer or str(source)).digest


def export_loaded(path: Path, out: Path, mesh: MeshConfig) -> None:
    config = Config(mesh=mesh, model=model_config_from_hf(path))
    parts = build_parts(config, build_meshes(resolve_mesh(mesh, None), torch.device("cpu")))
    allocate(parts, torch.device("cpu"))
    load_hf(parts, path)
    to_hf(parts, out)


@pytest.mark.exhaustive
def test_a_tied_embedding_of_two_stages_keeps_its_dtype(tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf("qwen3_moe_tied", tmp_path / "source")
    convert_hf(tmp_path / "source", tmp_path / "half", dtype="bfloat16")
    ranks.run(export_loaded, 2, tmp_path / "half", tmp_path / "out", MeshConfig(pp=2, dp_shard=1))
    tensors = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert {tensor.dtype for one in tensors for tensor in one.values()} == {torch.bfloat16}


def test_a_tokenizer_that_is_not_there(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: .* this directory does not exist"):
        to_hf(automoe.from_hf(source), tmp_path / "out", tokenizer=str(tmp_path / "nowhere"), verify=False)
    assert entries(tmp_path) == ["source"]


def test_index_sizes_and_largest_file(source: Path, tmp_path: Path) -> None:
    written = to_hf(automoe.from_hf(source), tmp_path / "out", max_shard_bytes=40_000, verify=False)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert len(files) == written.num_files > 5
    assert index["metadata"]["total_size"] == written.num_bytes
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 40_000
        assert {key for key, name in index["weight_map"].items() if name == file.name} == tensors.keys()


# On meshes ----------------------------------------------------------------------------------------


def export_fresh(out: Path, mesh: MeshConfig, family: str, break_it: bool = False) -> tuple[float | None, str]:
    """A model that was never on a single process, exported from a mesh."""
    config = _small_config(family, mesh)
    meshes = build_meshes(resolve_mesh(mesh, None), torch.device("cpu"))
    parts = build_parts(config, meshes)
    materialize(parts, config, torch.device("cpu"))
    if break_it and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        for part in parts.values():
            part.layers[str(config.model.num_layers - 1)].mlp.experts.down_proj.detach().to_local()[0, 0, 0] = float(
                "nan"
            )
    try:
        written = to_hf(parts, out, tokenizer=tokenizer_of(config))
    except CheckpointError as error:
        return None, str(error)
    return written.logits_error, ""


def _small_config(family: str, mesh: MeshConfig) -> Config:
    from tests.support.configurations import quick_model

    model = quick_model(f"small_{family}")
    if family == "olmoe":  # its query heads are together as wide as the hidden size
        model = replace(model, attention=replace(model.attention, head_dim=96 // model.attention.num_heads))
    return Config(mesh=mesh, model=replace(model, hidden_size=96, moe_intermediate_size=32, intermediate_size=64))


OTHERS = (
    "qwen3_moe",
    "mixtral",
    "qwen2_moe",
    "glm4_moe",
    "llama",
    "qwen3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe",
    "glm4_moe_lite",
    "minimax_m2",
    "olmoe",
    "granite",
    "dsv2",
    "ernie45",
    "dsv32",
    "glm_moe_dsa",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["dsv3", *OTHERS])
def test_export_from_a_mesh(family: str, tmp_path: Path, ranks: RankPool) -> None:
    mesh = MeshConfig(pp=2, dp_shard=2, ep=2)
    results = ranks.run(export_fresh, 4, tmp_path / "out", mesh, family)
    assert results[0][1] == ""
    assert results[0][0] is not None and results[0][0] < 1e-5
    assert results == [results[0]] * 4  # every rank hears what the first one found
    assert entries(tmp_path) == ["out"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (256, 257)  # the byte tokenizer's


@pytest.mark.exhaustive
def test_a_failure_on_one_rank_fails_all(tmp_path: Path, ranks: RankPool) -> None:
    results = ranks.run(export_fresh, 4, tmp_path / "out", MeshConfig(pp=2, dp_shard=2, ep=2), "dsv3", break_it=True)
    messages = {message for _, message in results}
    assert len(messages) == 1
    assert "model.layers.3.mlp.experts." in messages.pop()
    assert entries(tmp_path) == []
