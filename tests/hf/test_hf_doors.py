"""Checkpoint folders that were made to do harm, or that a disk has spoilt: refused by name, soon, and read nowhere else."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

import automoe
from automoe import convert
from automoe.config.compose import Arguments
from automoe.errors import AutomoeError, CheckpointError, ConfigError
from automoe.generate import load_checkpoint
from automoe.hf import verify
from automoe.hf.catalog import check_catalog
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.folder import copied_files
from automoe.hf.headers import check_holds, read_headers
from automoe.hf.keys import INDEX_FILE
from automoe.hf.write import convert_hf
from automoe.launch.prepare import prepare
from automoe.storage.foreign import MAX_JSON_BYTES, parse_json
from tests.support.hf_models import save_small_hf
from tests.support.hostile import ends_within, refused

Header = dict[str, Any]
NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    with ends_within(60):
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    save_small_hf("dsv3", folder / "single")
    save_small_hf("dsv3", folder / "sharded", max_shard_size="60KB")
    return folder


@pytest.fixture
def single(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "single", tmp_path / "model"))


@pytest.fixture
def sharded(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "sharded", tmp_path / "model"))


def write(folder: Path, header: object, data: bytes = bytes(48), text: str | None = None) -> None:
    raw = (json.dumps(header) if text is None else text).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def three() -> Header:
    """Three float32 tensors of 4 numbers each."""
    places = zip(NAMES, range(0, 48, 16), strict=True)
    return {name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [at, at + 16]} for name, at in places}


def test_a_right_header_is_read(tmp_path: Path) -> None:
    write(tmp_path, three() | {"__metadata__": {"format": "pt"}})
    assert list(read_headers(tmp_path)) == list(NAMES)


def test_places_are_those_of_the_header(tmp_path: Path) -> None:
    rows = {  # in another order than the bytes; names may hold what separates JSON
        'b: "x", {': ("F32", [2, 2], 16, 32),
        "scalar": ("F64", [], 32, 40),
        "a": ("BF16", [8], 0, 16),
        "none": ("F16", [0, 3], 40, 40),
        "codes": ("F8_E4M3", [8], 40, 48),
    }
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for name, (dtype, shape, begin, end) in rows.items()
    }
    write(tmp_path, header | {"__metadata__": {"format": "pt", "a:b": "c:d"}})
    first = (tmp_path / "model.safetensors").stat().st_size - 48
    tensors = read_headers(tmp_path)
    assert list(tensors) == ["a", 'b: "x", {', "scalar", "none", "codes"]
    places = {
        name: (stored.dtype, list(stored.shape), stored.start - first, stored.start - first + stored.num_bytes)
        for name, stored in tensors.items()
    }
    assert places == rows
    assert pickle.loads(pickle.dumps(tensors)) == tensors


def test_a_repeated_name_is_refused_beside_names_with_colons(tmp_path: Path) -> None:
    first = json.dumps(three() | {"d:e": {"dtype": "F32", "shape": [0], "data_offsets": [48, 48]}})
    write(tmp_path, None, text=first[:-1] + ', "b": ' + json.dumps(three()["b"]) + "}")
    with pytest.raises(CheckpointError, match="the key 'b' occurs twice in it"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"data_offsets": [8, 24]}, "invalid offset for tensor `b`"),  # overlaps
        ({"data_offsets": [16, 28], "shape": [3]}, "invalid offset for tensor `c`"),  # leaves a hole
        ({"data_offsets": [16.0, 32.0]}, "floating point `16.0`"),
        ({"shape": [-2, -2]}, "integer `-2`"),
        ({"shape": [2, 3]}, "invalid shape"),
        ({"dtype": "F33"}, "unknown variant `F33`"),
        ({"shape": json.loads("[" * 900 + "]" * 900)}, "shape|recursion|nested|sequence"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_headers_that_contradict_themselves(change: Header, needle: str, tmp_path: Path) -> None:
    header = three()
    header["b"] |= change
    write(tmp_path, header)
    with pytest.raises(CheckpointError, match=needle) as caught:
        read_headers(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(caught.value) and "Copy it again" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "data", "needle"),
    [
        (json.dumps(three())[:-1] + ', "b": ' + json.dumps(three()["b"]) + "}", 48, "the key 'b' occurs twice in it"),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", 48, "recursion limit"),
        ("[1]", 48, "invalid type: sequence"),
        (json.dumps(three()), 47, "not fully covered"),
        (json.dumps(three()), 50, "not fully covered"),
        ('{"\udcff": 1}', 48, "truncated or not a safetensors file"),
        ('{"a": {"dtype": "F32", "shape": [' + "9" * 5000 + '], "data_offsets": [0, 48]}}', 48, "out of range"),
    ],
    ids=["twice", "deep", "list", "short", "long", "no-utf8", "digits"],
)
def test_headers_that_are_none(text: str, data: int, needle: str, tmp_path: Path) -> None:
    raw = text.encode(errors="surrogateescape")
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    with pytest.raises(CheckpointError, match=needle):
        read_headers(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 8])
def test_a_file_without_a_header(size: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match="model.safetensors: truncated or not a safetensors file"):
        read_headers(tmp_path)


def test_a_header_of_8_gb_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write((8 << 30).to_bytes(8, "little"))
        file.truncate(9 << 30)  # of which the disk holds nothing
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file.*too large"):
        read_headers(tmp_path)


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE])
def test_json_of_a_gigabyte_is_not_read(name: str, single: Path) -> None:
    with open(single / name, "ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match=f"{name} has 1,073,741,824 bytes, and at most {MAX_JSON_BYTES:,}"):
        model_config_from_hf(single)


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ('{"a": 1, "a": 1}', "the key 'a' occurs twice in it"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested deeper"),
    ],
    ids=["twice", "deep"],
)
@pytest.mark.parametrize("name", ["config.json", INDEX_FILE])
def test_json_with_a_key_twice_or_too_deep(name: str, text: str, needle: str, single: Path) -> None:
    (single / name).write_text(text)
    with pytest.raises(AutomoeError, match=needle):
        model_config_from_hf(single)


OBJECTS = st.recursive(
    st.sampled_from(["1", '":"', "[]", '{"a": 1, "a": 2}']),
    lambda inner: (
        st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3).map(
            lambda pairs: "{" + ", ".join(f'"{key}": {value}' for key, value in pairs) + "}"
        )
        | st.lists(inner, max_size=2).map(lambda items: "[" + ", ".join(items) + "]")
    ),
    max_leaves=8,
)


@settings(max_examples=300, derandomize=True)
@given(OBJECTS)
def test_a_key_that_is_in_an_object_twice_is_seen_wherever_it_is(text: str) -> None:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.append(len(dict(pairs)) == len(pairs))
        return dict(pairs)

    found: list[bool] = []
    value = json.loads(text, object_pairs_hook=once)
    if all(found):
        assert parse_json(text.encode()) == value
    else:
        with pytest.raises(ValueError, match="occurs twice in it"):
            parse_json(text.encode())


def with_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_one_tensor_in_two_files(sharded: Path) -> None:
    first, last = sorted(sharded.glob("*.safetensors"))[:: len(list(sharded.glob("*.safetensors"))) - 1]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: tensor + 1}, last)
    assert read_headers(sharded)[name].file == first.name  # the index says so
    for other, read in ((tensor, True), (tensor + 1, False), (tensor.double(), False), (tensor.flatten()[:1], False)):
        save_file(load_file(last) | {name: other}, last)
        if read:
            assert read_headers(sharded, last=True)[name].file == first.name
        else:
            refused(lambda: read_headers(sharded, last=True), f"'{name}' is in {first.name} and in {last.name}")
            refused(
                lambda: load_checkpoint(sharded), f"in {last.name}. Either nothing says which one counts, or transf"
            )
    save_file({name: tensor}, sharded / "model.safetensors")
    refused(
        lambda: read_headers(sharded), "model.safetensors is there, and model.safetensors.index.json names other files"
    )
    (sharded / "model.safetensors").unlink()
    with_index(sharded, lambda index: index.pop(name))
    with pytest.raises(CheckpointError, match=f"'{name}' is in {first.name} and in {last.name}"):
        read_headers(sharded)


def test_an_index_that_names_the_wrong_file(sharded: Path) -> None:
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    with_index(
        sharded, lambda index: index.update({"lm_head.weight": next(f for f in files if f != index["lm_head.weight"])})
    )
    with pytest.raises(CheckpointError, match=r"1 tensors are not in the file that .* names: lm_head.weight"):
        read_headers(sharded)


@pytest.mark.parametrize("file", ["../elsewhere/model.safetensors", "/etc/passwd", "a\0b", "\ud800", 5, ["a"]])
def test_an_index_that_names_no_file_of_the_folder(file: object, single: Path) -> None:
    shutil.copytree(single, single.parent / "elsewhere")
    names = load_file(single / "model.safetensors")
    (single / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    with pytest.raises(CheckpointError, match="leads out of|is not a file name|missing|no index in it"):
        read_headers(single)


# What lies there ----------------------------------------------------------------------------------


def put(folder: Path, name: str, kind: str) -> None:
    """In place of a file: something that is none, or a link to what is none of the folder's."""
    path = folder / name
    content = path.read_bytes() if path.exists() else b"{}"
    path.unlink(missing_ok=True)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a socket":
        before = Path.cwd()
        os.chdir(folder)  # a socket's path is at most 108 bytes long
        socket.socket(socket.AF_UNIX).bind(name)
        os.chdir(before)
    elif kind == "/dev/zero":
        path.symlink_to(kind)
    elif kind == "itself":
        path.symlink_to(name)
    elif kind == "elsewhere":
        (folder.parent / "elsewhere").write_bytes(content)
        path.symlink_to("../elsewhere")


KINDS = ("a FIFO", "a folder", "a socket", "/dev/zero", "elsewhere", "itself")
LOOP = "Too many levels of symbolic links"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", INDEX_FILE, "model.safetensors"])
def test_what_is_no_file_of_the_folder_is_not_read(name: str, kind: str, single: Path) -> None:
    config = model_config_from_hf(single)
    put(single, name, kind)
    needle = f"leads out of .* to .*{kind}" if kind in ("/dev/zero", "elsewhere") else f"{kind}, not a file|{LOOP}"
    for read in (lambda: check_catalog(single, config), lambda: model_config_from_hf(single)):
        with pytest.raises(AutomoeError, match=needle) as caught:
            read()
        assert str(single) in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"]
)
def test_what_is_no_file_of_the_folder_is_not_copied(name: str, kind: str, single: Path) -> None:
    """Found before a checkpoint is read, and before a run starts."""
    put(single, name, kind)
    with pytest.raises(CheckpointError, match=f"{name}(: {LOOP}| leads out of| is {kind}, not a file)"):
        copied_files(model_config_from_hf(single), None)
    with pytest.raises(CheckpointError, match=name):
        convert_hf(single, single.parent / "out")
    assert not (single.parent / "out").exists()


def test_a_run_that_could_not_be_exported_does_not_start(single: Path, tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(words / "tokenizer.json"))
    (words / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    mesh = ["mesh.pp=1", "mesh.dp_shard=1", "mesh.ep=1", "mesh.ep_shard=1"]
    arguments = Arguments(overrides=["data=stdlib", f"model.hf_path={single}", f"data.tokenizer={words}", *mesh])
    prepare(arguments)
    sound = (words / "tokenizer_config.json").read_text()
    (words / "tokenizer_config.json").write_text('["<s>"]')
    with pytest.raises(AutomoeError, match="tokenizer_config"):
        prepare(arguments)
    (words / "tokenizer_config.json").write_text(sound)
    put(words, "tokenizer_config.json", "elsewhere")
    with pytest.raises(CheckpointError, match=r"words/tokenizer_config\.json leads out of"):
        prepare(arguments)


def as_in_the_cache(folder: Path) -> Path:
    """``folder`` as HuggingFace's cache holds it: a folder of links."""
    repository = folder.parent / "models--made--small"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def test_links_of_huggingfaces_cache_are_followed(sharded: Path, tmp_path: Path) -> None:
    (sharded / "tokenizer.json").write_text('{"mine": 1}')
    model = automoe.from_hf(as_in_the_cache(sharded))
    automoe.to_hf(model, tmp_path / "out", verify=False)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"mine": 1}'
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_links_within_the_folder_and_to_the_folder_are_followed(single: Path, tmp_path: Path) -> None:
    (single / "model.safetensors").rename(single / "weights")
    (single / "model.safetensors").symlink_to("weights")
    (tmp_path / "named").symlink_to(single)
    assert read_headers(tmp_path / "named")


def test_blobs_that_lie_elsewhere_are_not_the_caches(single: Path) -> None:
    snapshot = as_in_the_cache(single)
    repository = snapshot.parents[1]
    (repository / "blobs").rename(single.parent / "private")
    (repository / "blobs").symlink_to(single.parent / "private")
    with pytest.raises(CheckpointError, match=r"config\.json leads out of the checkpoint's folder, to .*private"):
        model_config_from_hf(snapshot)


# Sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "n_routed_experts", "vocab_size", "intermediate_size", "moe_intermediate_size"]
    + ["num_attention_heads", "n_shared_experts", "kv_lora_rank", "v_head_dim"],
)
def test_sizes_of_a_billion_are_refused_by_arithmetic(key: str, single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | {key: 10**9}))
    with pytest.raises(AutomoeError) as caught:
        check_catalog(single, model_config_from_hf(single))
    assert str(single) in str(caught.value)
    assert "config.json" in str(caught.value)


def test_what_the_arithmetic_says(single: Path) -> None:
    config = model_config_from_hf(single)
    for change, needle in [
        ({"num_layers": 10**9}, "1,000,000,000 layers or experts, and at most 10,000"),
        ({"num_experts": 10**9}, "1,000,000,000 layers or experts, and at most 10,000"),
        ({"hidden_size": 10**9}, r"a model of [\d,]+ numbers, and its files hold [\d,]+"),
    ]:
        wrong = model_config_from_hf(single)
        for key, value in change.items():
            setattr(wrong, key, value)
        with pytest.raises(ConfigError, match=needle):
            check_holds(single, wrong, read_headers(single, partial_ok=True))
    (single / "model.safetensors").unlink()  # nothing there yet: a plan of it can be made
    check_holds(single, config, read_headers(single, partial_ok=True))
    config.num_layers = 10**9
    with pytest.raises(ConfigError, match="layers"):
        check_holds(single, config, read_headers(single, partial_ok=True))


# Numbers that are none ----------------------------------------------------------------------------

SPOILT = "model.layers.1.mlp.experts.3.up_proj.weight"


def spoil(folder: Path, *values: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[SPOILT].view(-1)[: len(values)] = torch.tensor(values)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_weights_that_are_no_numbers_are_said_on_load(single: Path) -> None:
    spoil(single, float("nan"), 1.0, float("inf"), -float("inf"))
    with pytest.warns(UserWarning, match=rf"WARNING: 3 of its numbers are NaN or infinite: {SPOILT} \(3\)"):
        automoe.from_hf(single)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_exported_nor_converted(
    value: float, single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too large a model to be run twice: nobody's logits would show it."""
    monkeypatch.setattr(verify, "MAX_COMPARED_BYTES", 1)
    spoil(single, value)
    with pytest.warns(UserWarning):
        model = automoe.from_hf(single)
    for encoding, option in (("plain", []), ("fp8", ["--fp8"])):  # which has NaN for all of a block
        with pytest.raises(CheckpointError, match=f": 1 numbers of {SPOILT} are NaN or infinite"):
            automoe.to_hf(model, tmp_path / "out", encoding=encoding)
        assert convert.main([str(single), "--out", str(tmp_path / "out"), *option]) == 2
        assert f": 1 numbers of {SPOILT} are NaN or infinite" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["model"]


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"do_sample": tr', "Expecting value"),
        (b"[]", "it is not a JSON object"),
        (b'\xef\xbb\xbf{"top_p": 0.9}', "BOM"),
        ('{"note": "für"}'.encode("latin1"), "can't decode byte 0xfc"),
        (b"[" * 100_000, "nested deeper"),
        (b"", "Expecting value"),
    ],
    ids=["cut", "list", "bom", "latin1", "deep", "empty"],
)
def test_a_damaged_file_that_the_export_copies_is_found_before_the_first_step(
    name: str, content: bytes, reason: str, single: Path
) -> None:
    (single / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{single}/{name}: .*{reason}.*Copy it again"):
        copied_files(model_config_from_hf(single), None)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "video_processor_config.json"])
def test_files_that_are_copied_of_two_folders_are_each_read_where_they_are(
    name: str, single: Path, tmp_path: Path
) -> None:
    """A processor's settings are the checkpoint's, whatever tokenizer a run has."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer_config.json").write_text("{}")
    (single / name).write_text('{"size": 3}')
    config = model_config_from_hf(single)
    wanted = [(single, "generation_config.json"), (single, name), (tmp_path / "other", "tokenizer_config.json")]
    assert copied_files(config, str(tmp_path / "other")) == wanted
    (tmp_path / "other" / name).write_text('{"size": 3}')
    (single / name).write_text('{"size": ')
    with pytest.raises(CheckpointError, match=rf"{single}/{name}: Expecting value.*Copy it again"):
        copied_files(config, str(tmp_path / "other"))


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_a_cut_tokenizer_is_no_part_of_a_conversion(
    name: str, single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no run reads the tokenizer, its file would be copied as it is."""
    (single / name).write_text('{"vocab": {"bos_token": 0, "do_sample": 1}, "model": "not checked here"}')
    copied_files(model_config_from_hf(single), None)
    (single / name).write_text('{"vocab": {"bos_token": 0, "do_sam')
    assert convert.main([str(single), "--out", str(tmp_path / "out")]) == 2
    assert re.search(rf"{single}/{name}: Unterminated .*Copy it again", capsys.readouterr().err)
    assert sorted(os.listdir(tmp_path)) == ["model"]
