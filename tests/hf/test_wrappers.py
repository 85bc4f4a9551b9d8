"""Checkpoints with vision beside the text model: text is trained, everything else comes out as it went in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lora_export import trained
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import automoe
from automoe.config.schema import LoraConfig, MeshConfig
from automoe.errors import AutomoeError, CheckpointError, ConfigError
from automoe.hf.adapter import from_peft
from automoe.hf.catalog import check_catalog
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.folder import write_settings
from automoe.hf.peft import WEIGHTS_FILE, to_peft
from automoe.hf.wrapper import is_of_layers, names_in, part_of
from automoe.hf.write import convert_hf, to_hf
from automoe.verify.pool import RankPool
from tests.support.class_models import save_class
from tests.support.hf_models import save_small_hf
from tests.support.wrappers import INDEX, PROCESSOR, rename, save_wrapper, stored

pytestmark = pytest.mark.filterwarnings("ignore:.*not trained, and copied bit for bit")
TYPES = ["qwen3_5_moe", "qwen3_vl_moe"]  # with a class for the text model alone, and without


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in TYPES}
    for kind, folder in folders.items():
        save_wrapper(
            kind, folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        )
    return folders


@pytest.fixture
def source(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    folder = tmp_path / "source"
    folder.mkdir()
    for file in saved["qwen3_5_moe"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def settings(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", TYPES)
def test_text_changes_and_all_else_is_copied(kind: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """``to_hf`` compares every number and byte, and the whole with the wrapper's class of transformers."""
    with pytest.warns(UserWarning, match=r"not trained, and copied bit for bit into an export: .*model\.visual\.\* \("):
        model = automoe.from_hf(saved[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    written = to_hf(model, tmp_path / "out", max_shard_bytes=90_000)
    assert written.logits_error is not None and written.num_copied > 20
    assert f"{written.num_copied} tensors of other parts copied bit for bit" in str(written)
    before, after = stored(saved[kind]), stored(tmp_path / "out")
    assert before.keys() == after.keys() == json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"].keys()
    beside = {key for key in before if key.startswith(("model.visual.", "mtp."))}
    assert {key for key in before if torch.equal(before[key], after[key])} == beside
    assert len(beside) == written.num_copied
    source, export = settings(saved[kind]), settings(tmp_path / "out")
    assert source.pop("transformers_version")
    assert export["text_config"].pop("dtype") == "float32"
    source["text_config"].pop("dtype", None)
    assert source == export
    for name in PROCESSOR:
        assert (tmp_path / "out" / name).read_bytes() == (saved[kind] / name).read_bytes()


@pytest.mark.one_in(3)
def test_a_parameter_beside_the_parts_is_copied(tmp_path: Path) -> None:
    """DeepSeek-OCR-2 has a separator between images as a parameter of the module that holds the parts."""
    save_class("deepseek_ocr2", tmp_path / "source")
    model = automoe.from_hf(tmp_path / "source")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    to_hf(model, tmp_path / "out")
    before, after = stored(tmp_path / "source"), stored(tmp_path / "out")
    (separator,) = (key for key in before if "view_sep" in key)
    assert before.keys() == after.keys() and torch.equal(before[separator], after[separator])
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_the_text_model_is_found_under_mistrals_names() -> None:
    text = ["layers.0.attention.wq_a.weight", "tok_embeddings.weight", "norm.weight", "output.weight"]
    names = names_in(Path(), {"text_config": {"model_type": "x"}}, [*text, "vision_encoder.conv.weight"])
    assert [names.plain(key) for key in text] == text
    assert names.plain("vision_encoder.conv.weight") is None


@pytest.mark.parametrize("fp8", [False, True])
def test_a_conversion_keeps_the_other_parts_as_they_are(fp8: bool, saved: dict[str, Path], tmp_path: Path) -> None:
    source = saved["qwen3_5_moe"]
    written = convert_hf(source, tmp_path / "out", dtype="bfloat16", encoding="fp8" if fp8 else "plain")
    before, after = stored(source), stored(tmp_path / "out")
    beside = [key for key in before if key.startswith(("model.visual.", "mtp."))]
    assert all(torch.equal(before[key], after[key]) for key in beside) and len(beside) == written.num_copied
    # As published: all experts of a layer in one tensor, but in FP8 one by one.
    expert = f"model.language_model.layers.0.mlp.experts.{'0.up_proj.weight' if fp8 else 'gate_up_proj'}"
    assert after[expert].dtype == (torch.float8_e4m3fn if fp8 else torch.bfloat16)
    stated = settings(tmp_path / "out").get("quantization_config")
    assert (stated is not None) == fp8
    if fp8:
        assert {"model.visual", "mtp", "lm_head"} <= set(stated["modules_to_not_convert"])
        assert "model.language_model.layers.0.mlp.gate" in stated["modules_to_not_convert"]
        check_catalog(tmp_path / "out", model_config_from_hf(tmp_path / "out"))


def test_the_wrapper_decides_whether_the_head_is_the_embedding(tmp_path: Path) -> None:
    save_wrapper("qwen3_5_moe", tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in stored(tmp_path / "tied")
    assert model_config_from_hf(tmp_path / "tied").tie_embeddings
    convert_hf(tmp_path / "tied", tmp_path / "out")
    assert stored(tmp_path / "tied").keys() == stored(tmp_path / "out").keys()
    hf = settings(tmp_path / "tied") | {"tie_word_embeddings": False}  # and its text_config says true
    (tmp_path / "tied" / "config.json").write_text(json.dumps(hf))
    config = model_config_from_hf(tmp_path / "tied")
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: lm_head\.weight"):
        check_catalog(tmp_path / "tied", config)


def test_a_wrapper_in_linked_files(source: Path, tmp_path: Path) -> None:
    """As in HuggingFace's cache; a link out of the repository is refused."""
    for place, works in (("models--a--b/snapshots/1234", True), ("elsewhere", False)):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        blobs = folder.parent.parent / "blobs"
        blobs.mkdir(exist_ok=True)
        for file in source.iterdir():
            (blobs / file.name).write_bytes(file.read_bytes())
            (folder / file.name).symlink_to(blobs / file.name)
        if works:
            assert convert_hf(folder, tmp_path / "out").num_copied == 23
            assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
        else:
            with pytest.raises(AutomoeError, match="leads out of the checkpoint's folder"):
                convert_hf(folder, tmp_path / "other")


def test_other_prefixes(source: Path, tmp_path: Path) -> None:
    """All of the text model in one module is known too; the export has the names of its source."""
    rename(source, lambda key: key.replace("model.language_model.", "language_model.model.", 1))
    rename(source, lambda key: key.replace("lm_head.", "language_model.lm_head."))
    catalog = check_catalog(source, model_config_from_hf(source))
    assert catalog.sources["lm_head.weight"].file and len(catalog.beside) == 23
    assert catalog.names.stored("model.layers.0.mlp.gate.weight") == "language_model.model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda hf: hf.pop("text_config"), "its config.json has no text_config"),
        (lambda hf: hf.update(text_config={}), "its config.json has no text_config"),
        (lambda hf: hf.update(text_config=[1]), "its config.json has no text_config"),
        (lambda hf: hf["text_config"].pop("num_experts_per_tok"), "equal"),
        (lambda hf: hf["text_config"].update(num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
        (lambda hf: hf["text_config"].update(vocab_size=10**9), "numbers, and its files hold"),
        (lambda hf: hf["text_config"].update(hidden_act="nothing"), "nothing"),
    ],
)
def test_a_damaged_config(damage: Callable[[dict], object], message: str, source: Path) -> None:
    hf = settings(source)
    damage(hf)
    (source / "config.json").write_text(json.dumps(hf))
    if message == "equal":  # an absent key has the default of the class
        assert model_config_from_hf(source).num_experts_per_token == 8
        return
    with pytest.raises(ConfigError, match=message):
        model_config_from_hf(source)


def test_speech_out_of_a_model_is_refused_by_name(tmp_path: Path) -> None:
    """The whole of Qwen3-Omni; its thinker in a folder of its own is a wrapper like others."""
    CONFIG_MAPPING["qwen3_omni_moe"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model_type=qwen3_omni_moe has no causal language model"):
        model_config_from_hf(tmp_path)


def test_files_without_the_text_model_are_refused_by_the_first_check(source: Path) -> None:
    rename(source, lambda key: None if "language_model" in key or "lm_head" in key else key)
    with pytest.raises(CheckpointError, match="lack the text model, the part that is trained: of 23 tensors"):
        model_config_from_hf(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda key: key.replace("language_model", "llm"), "lack the text model"),
        (lambda key: key.replace("layers.1.", "layers.7."), "tensors are missing.*are not the model's"),
        (lambda key: None if key.endswith("layers.1.mlp.gate.weight") else key, "1 tensors are missing"),
        (lambda key: key.replace("lm_head.", "head."), r"1 tensors are missing: lm_head\.weight"),
    ],
)
def test_wrong_names_are_refused(change: Callable[[str], str | None], message: str, source: Path) -> None:
    rename(source, change)
    with pytest.raises(CheckpointError, match=message):
        check_catalog(source, model_config_from_hf(source))


def test_missing_files_and_entries_are_refused(source: Path) -> None:
    index = json.loads((source / INDEX).read_text())
    vision = next(key for key in index["weight_map"] if "visual" in key)
    for key in (vision, "model.language_model.norm.weight"):
        changed = {"weight_map": {name: file for name, file in index["weight_map"].items() if name != key}}
        (source / INDEX).write_text(json.dumps(changed))
        catalog = check_catalog(source, model_config_from_hf(source))  # a file's header counts
        assert len(catalog.beside) == 23
    (source / INDEX).write_text(json.dumps(index))
    (source / index["weight_map"][vision]).unlink()
    with pytest.raises(CheckpointError, match="files that model.safetensors.index.json names are missing"):
        check_catalog(source, model_config_from_hf(source))


def test_other_parts_that_are_quantized(source: Path) -> None:
    """Codes would be misread in an export without them: vision is refused, unused modules stay out."""
    plain = check_catalog(source, model_config_from_hf(source))
    hf = settings(source)
    hf["text_config"]["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    hf["text_config"]["mtp_num_hidden_layers"] = 1
    (source / "config.json").write_text(json.dumps(hf))
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        if "mtp.fc.weight" in tensors:
            tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)
            save_file(tensors, file, {"format": "pt"})
    catalog = check_catalog(source, model_config_from_hf(source))
    assert catalog.notes[-1] == "not read, and not in an export, since it is quantized: mtp.*"
    assert len(catalog.beside) == 21
    for left, beside in ((0, catalog), (1, plain)):
        folder = source.with_name(f"settings-{left}")
        folder.mkdir()
        write_settings(folder, model_config_from_hf(source), torch.float32, "none", source=beside)
        assert settings(folder)["text_config"]["mtp_num_hidden_layers"] == left, "of modules that are there"
    file = source / catalog.beside["model.visual.pos_embed.weight"].file
    tensors = load_file(file)
    tensors["model.visual.pos_embed.weight"] = tensors["model.visual.pos_embed.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.visual\.pos_embed\.weight is quantized \(F8_E4M3\).*bfloat16"):
        check_catalog(source, model_config_from_hf(source))
    hf["quantization_config"] = {"quant_method": "compressed-tensors"}
    (source / "config.json").write_text(json.dumps(hf))
    with pytest.raises(CheckpointError, match=r"quantization_config of compressed-tensors has groups .* of \[\]"):
        check_catalog(source, model_config_from_hf(source))


def test_modules_for_later_tokens_are_known_by_every_familys_names() -> None:
    ours = [
        "mtp.fc.weight",
        "model.mtp_block.0.mlp.weight",
        "model.mtp_emb_norm.0.weight",
        "model.layers.61.eh_proj.weight",
    ]
    others = ["model.visual.patch_embed.weight", "audio_tower.conv.weight", "model.imtp_head.weight"]
    assert [is_of_layers(part_of(key)) for key in ours + others] == [True] * 4 + [False] * 3


def test_modules_behind_the_last_layer_are_copied(tmp_path: Path) -> None:
    """Those of DeepSeek-V3 in a checkpoint without a wrapper, and config.json says how many they are."""
    save_small_hf("dsv3", tmp_path / "source")
    [file] = (tmp_path / "source").glob("*.safetensors")
    extra = {"model.layers.4.eh_proj.weight": torch.randn(32, 64), "model.layers.4.hnorm.weight": torch.ones(32)}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    hf = settings(tmp_path / "source") | {"num_nextn_predict_layers": 1}
    (tmp_path / "source" / "config.json").write_text(json.dumps(hf))
    written = convert_hf(tmp_path / "source", tmp_path / "out", dtype="bfloat16")
    assert written.num_copied == 2
    assert settings(tmp_path / "out")["num_nextn_predict_layers"] == 1
    assert all(torch.equal(stored(tmp_path / "out")[key], one) for key, one in extra.items())


@pytest.mark.parametrize("kind", TYPES)
def test_an_adapter_has_the_names_of_the_wrappers_class(kind: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """peft applies it to the text model alone: vision has layers of the same last names."""
    from peft import PeftModel  # which takes seconds

    lora = LoraConfig(rank=4, alpha=6.0)
    model = trained(saved[kind], lora, seed=5)
    with pytest.raises(
        ConfigError, match="cannot load such an adapter of a checkpoint with vision or audio. Use fused"
    ):
        to_peft(model, tmp_path / "none", lora, layout="published")
    assert "of attention" in to_peft(model, tmp_path / "out", lora)
    assert all("language_model.layers." in key for key in load_file(tmp_path / "out" / WEIGHTS_FILE))
    base = AutoModelForImageTextToText.from_pretrained(saved[kind], dtype=torch.float32)
    tokens = torch.arange(48).view(2, 24)
    with torch.no_grad():
        expected = model(tokens)
        before = base.eval()(tokens).logits
        after = PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()(tokens).logits
    assert (after - expected).norm() < 1e-5 * expected.norm() < (before - expected).norm()
    again = trained(saved[kind], lora, seed=6)
    from_peft(again, tmp_path / "out", lora)
    assert all(torch.equal(one, model.get_parameter(name)) for name, one in again.named_parameters())


def load_and_write(path: Path, out: Path, mesh: MeshConfig) -> str:
    return str(to_hf(automoe.from_hf(path, mesh=mesh), out, max_shard_bytes=60_000))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", TYPES)
def test_from_a_mesh(kind: str, saved: dict[str, Path], tmp_path: Path, ranks: RankPool) -> None:
    mesh = MeshConfig(dp_shard=4, ep=2, ep_shard=2)
    texts = ranks.run(load_and_write, 4, saved[kind], tmp_path / "out", mesh)
    assert len(set(texts)) == 1 and "tensors of other parts copied bit for bit" in texts[0]
    before, after = stored(saved[kind]), stored(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
