"""Models by Hub id: through huggingface_hub, from its cache without a network, and from a server on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import _tree_cache
from safetensors.torch import save_file

from automoe.config.compose import Arguments, compose_config
from automoe.config.data_schema import ChatConfig
from automoe.config.frozen import dump_config, parse_config
from automoe.config.hub import id_and_commit, local_folder, pinned
from automoe.data.tokenizer import load_tokenizer, stored_template
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.identity import checkpoint_folder, checkpoint_identity, complete
from automoe.launch.prepare import prepare, settle
from tests.support.command import TINY, TrainCommand
from tests.support.hub import NAME, NOT_NEEDED, Hub, published

KEY = "model.hf_path"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("published")
    return [published(root / str(seed), seed) for seed in (0, 1)]


@pytest.fixture
def hub(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        server.publish(folders[0])
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        for name, value in (
            ("ENDPOINT", endpoint),
            ("HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"),
            ("HF_HUB_CACHE", str(tmp_path / "cache")),
            ("HF_HUB_OFFLINE", False),
            ("HF_HUB_DISABLE_XET", True),
        ):
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.chdir(tmp_path)
        yield server
        server.shutdown()


@pytest.mark.exhaustive
def test_an_id_gets_its_commit_and_weights_come_when_they_are_needed(
    hub: Hub, folders: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = pinned(KEY, NAME)
    assert spec == f"{NAME}@{hub.main}" and id_and_commit(spec) == (NAME, hub.main)
    assert not any(".safetensors " in f"{asked} " and "index" not in asked for asked in hub.asked)
    assert f"{KEY}={NAME}" in capsys.readouterr().err

    folder, index = checkpoint_folder(spec), json.loads((folders[0] / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    said = capsys.readouterr().err
    assert f"downloading {spec}: {len(files)} files, 0.0 GB" in said
    assert checkpoint_identity(spec) == checkpoint_identity(folder) == checkpoint_identity(folders[0])
    here = {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}
    assert here == {file.name for file in folders[0].iterdir() if file.is_file()} - set(NOT_NEEDED)

    before = len(hub.asked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert checkpoint_folder(spec) == folder and checkpoint_folder(NAME) == folder and len(hub.asked) == before


def test_a_run_stays_with_its_commit_when_the_hub_has_another(hub: Hub, folders: list[Path], tmp_path: Path) -> None:
    typed = [f"model.hf_path={NAME}", "data=stdlib", f"run_dir={tmp_path / 'run'}", "launch.device=cpu"]
    typed += ["train.seq_len=32", "data.document_mask=true", "moe.experts=loop"]
    config, _, _ = prepare(Arguments(overrides=typed))
    first = hub.main
    assert config.model.hf_path == f"{NAME}@{first}" and config.model.family == "qwen3_moe"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config))
    second = hub.publish(folders[1])
    config = settle(compose_config(overrides=typed), typed)
    assert config.model.hf_path == f"{NAME}@{first}" != f"{NAME}@{second}"
    complete(replace(config, model=replace(config.model, random_weights=True)))
    assert not any(".safetensors " in f"{asked} " and "index" not in asked for asked in hub.asked)
    complete(parse_config(dump_config(config)))
    assert checkpoint_identity(config.model.hf_path) == checkpoint_identity(folders[0])
    for other in ([f"model.hf_path={NAME}@main"], ["checkpoint.resume=never"]):
        assert settle(compose_config(overrides=typed + other), typed + other).model.hf_path == f"{NAME}@{second}"


def test_the_environment_names_a_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_MODEL", NAME)
    typed = ["model.hf_path=${oc.env:LAB_MODEL}", "data=stdlib", "run_dir=run"]
    config = settle(compose_config(overrides=typed), typed)
    assert config.model.hf_path == f"{NAME}@{hub.main}" and local_folder(config.model.hf_path).is_dir()
    text = dump_config(config)
    assert f"${{oc.env:LAB_MODEL}}@{hub.main}" in text and NAME not in text
    assert local_folder(parse_config(text).model.hf_path) == local_folder(config.model.hf_path)
    longer = parse_config(text, environment={"LAB_MODEL": f"{NAME}@v1"}).model.hf_path
    assert id_and_commit(longer) == (NAME, hub.main)


def test_a_cache_that_was_copied_here_is_enough(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        pinned(KEY, NAME)
    for needle in (f"{KEY}={NAME}", str(tmp_path / "cache"), "HF_HUB_OFFLINE", "HF_HOME", f"hf download {NAME}"):
        assert needle in str(caught.value), needle
    commit, place = "0123456789" * 4, tmp_path / "cache" / "models--lab--tiny"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "snapshots").mkdir()
    (place / "snapshots" / commit).symlink_to(folders[0])
    assert pinned(KEY, NAME) == f"{NAME}@{commit}"
    assert checkpoint_identity(checkpoint_folder(NAME)) == checkpoint_identity(folders[0])


def test_a_commit_of_which_another_program_cached_a_part_is_completed(
    hub: Hub, folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = f"{NAME}@{hub.main}"
    part = tmp_path / "cache" / "models--lab--tiny" / "snapshots" / hub.main
    part.mkdir(parents=True)
    shutil.copy(folders[0] / "config.json", part)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert pinned(KEY, spec) == spec and not (part / "tokenizer.json").exists()
    assert "is used as it is: the Hub did not say" in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert pinned(KEY, spec) == spec and (part / "tokenizer.json").is_file()
    assert (part / "generation_config.json").is_file()
    before = len(hub.asked)
    capsys.readouterr()
    assert pinned(KEY, spec) == spec and len(hub.asked) == before and capsys.readouterr().err == ""


def test_a_hub_that_is_silent_is_waited_for_no_longer_than_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("automoe.config.hub.SILENT_S", 0.2)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match="timed out"):
            pinned(KEY, NAME)


def test_what_a_cache_holds_in_place_of_files_is_named_at_once(
    hub: Hub, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO where the library would read a revision; a shard that is missing; links that lead to nothing."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "cache" / "models--lab--tiny"
    (place / "refs").mkdir(parents=True)
    os.mkfifo(place / "refs" / "main")
    with pytest.raises(ConfigError, match=r"refs/main is a FIFO, not a file"):
        pinned(KEY, f"{NAME}@main")
    folder = place / "snapshots" / hub.main
    shutil.copytree(folders[0], folder)
    (shard := sorted(folder.glob("*.safetensors"))[-1]).unlink()
    with pytest.raises(ConfigError, match=f"nor is {shard.name} of the Hub's"):
        checkpoint_folder(f"{NAME}@{hub.main}")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "gone")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises((ConfigError, CheckpointError), match=r"chat_template\.jinja"):
        stored_template(ChatConfig(), str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises((ConfigError, CheckpointError), match=r"tokenizer\.json"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00004.safetensors"])
def test_a_damaged_cache_is_completed_or_named_and_the_remedy_helps(
    name: str, hub: Hub, folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint_folder(NAME)
    blob = (folder / name).resolve()
    blob.unlink()  # a link that leads nowhere
    assert checkpoint_folder(NAME) == folder and blob.read_bytes() == (folders[0] / name).read_bytes()
    blob.write_bytes(blob.read_bytes()[:100])  # as a full disk or a copy that was stopped leaves it
    capsys.readouterr()
    with pytest.raises(ConfigError, match=f"{name}. Delete {blob}") as caught:
        checkpoint_folder(NAME)
    assert "is used as it is" not in capsys.readouterr().err and blob.is_file()
    Path(re.findall(r"Delete (\S+)", str(caught.value))[0].rstrip(".")).unlink()
    assert checkpoint_folder(NAME) == folder and blob.read_bytes() == (folders[0] / name).read_bytes()


@pytest.mark.parametrize(
    "content", ["[]", '{"files": null}', '{"files": {"config.json": {"size": "x"}}}', "[" * 100_000]
)
def test_a_damaged_list_in_the_cache_is_named_and_the_remedy_helps(
    content: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub keeps there which files a commit has, and would fail without the file's name."""
    place = tmp_path / "cache" / "models--lab--tiny"
    shutil.copytree(hub.commits[hub.main], place / "snapshots" / hub.main)
    (listing := place / "trees" / f"{hub.main}.json").parent.mkdir()
    listing.write_text(content)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"{listing} .*Delete it"):
        pinned(KEY, f"{NAME}@{hub.main}")
    listing.unlink()
    assert pinned(KEY, f"{NAME}@{hub.main}") == f"{NAME}@{hub.main}"


@pytest.mark.parametrize("outside", ["absolute", "above", "a link"])
def test_a_list_in_the_cache_deletes_no_file_elsewhere(outside: str, hub: Hub, tmp_path: Path) -> None:
    pinned(KEY, NAME)
    [listing] = tmp_path.glob("cache/models--*/trees/*.json")
    (precious := tmp_path / "precious.txt").write_text("mine")
    (listing.parents[1] / "snapshots" / hub.main / "link.txt").symlink_to(precious)
    name = {"absolute": str(precious), "above": "../../../../precious.txt", "a link": "link.txt"}[outside]
    whole = json.loads(listing.read_text())
    listing.write_text(json.dumps(whole | {"files": whole["files"] | {name: {"size": 1, "blob_id": "x"}}}))
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    with pytest.raises(ConfigError, match="the Hub lists other sizes for"):
        pinned(KEY, f"{NAME}@main")
    assert precious.read_text() == "mine"
    assert pinned(KEY, f"{NAME}@main") == f"{NAME}@{hub.main}"  # the list was what was wrong


def test_what_is_no_id_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    for path in (NAME, "./lab/tiny", "/lab/tiny", "~/tiny", "tiny", "a/b/c", "byte"):
        assert pinned(KEY, path) == path
    assert hub.asked == []
    assert pinned(KEY, f"{NAME}@main") == f"{NAME}@{hub.main}"  # a folder lab is here, and the revision says: the Hub
    (tmp_path / NAME).mkdir()
    assert pinned(KEY, NAME) == NAME
    with pytest.raises(ConfigError, match="Correct the name"):
        pinned(KEY, "nobody/nothing")


@pytest.mark.faults
def test_ranks_share_one_download_and_a_resume_needs_none(hub: Hub, tmp_path: Path) -> None:
    environment = {
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": "hf_this_is_a_secret",
        "XDG_CACHE_HOME": str(tmp_path / "text"),
    }
    kept = [text for text in TINY if not text.startswith("model.")]
    command = TrainCommand(
        tmp_path / "run",
        [*kept, f"model.hf_path={NAME}", "data=stdlib", "mesh.dp_shard=2", "mesh.ep=2", "mesh.pp=1", "lora.rank=4",
         "checkpoint.every=1", "lora.export=adapter", "checkpoint.export_hf=true"],
        environment,
    )  # fmt: skip
    status, _, said = command.run("train.steps=1")
    assert status == 0, said
    fetched = [asked for asked in hub.asked if asked.startswith("GET") and asked.endswith(".safetensors")]
    assert fetched and len(fetched) == len(set(fetched))
    adapter = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, hub.main)
    command.env["HF_HUB_OFFLINE"] = "1"
    before = len(hub.asked)
    status, _, said = command.run("train.steps=2")
    assert status == 0 and len(hub.asked) == before, said
    assert f"{NAME}@{hub.main}" in (tmp_path / "run" / "config.yaml").read_text()
    assert "Bearer hf_this_is_a_secret" in hub.tokens
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or b"hf_this_is_a_secret" not in file.read_bytes(), file


def test_another_number_anywhere_is_another_checkpoint_and_files_are_none(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(4096.0), "b": torch.ones(3, 5, dtype=torch.bfloat16), "c": torch.zeros(0)}

    def identity(name: str, **parts: dict[str, torch.Tensor]) -> str:
        (tmp_path / name).mkdir()
        files = {f"{part}.safetensors": held for part, held in parts.items()}
        for file, held in files.items():
            save_file(held, tmp_path / name / file)
        index = {"metadata": {}, "weight_map": {key: file for file, held in files.items() for key in held}}
        (tmp_path / name / "model.safetensors.index.json").write_text(json.dumps(index))
        return checkpoint_identity(tmp_path / name)

    known = identity("one", all=tensors)
    assert identity("two", some={"b": tensors["b"]}, rest={key: tensors[key] for key in "ac"}) == known
    tensors["a"][4000] = 0.5
    assert identity("three", all=tensors) != known
