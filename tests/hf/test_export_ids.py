"""What an export says of special tokens, where the tokenizer of the training is not the checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from automoe.config.data_schema import ChatConfig
from automoe.config.schema import Config, LoraConfig, MoEConfig
from automoe.data.chat_template import ChatTemplate
from automoe.hf.catalog import open_catalog
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.folder import write_settings
from automoe.hf.read import load_hf
from automoe.hf.write import to_hf
from automoe.model.lora import freeze_and_adapt
from automoe.parallel.parallelize import allocate, build_decoder
from tests.support.chat import save_tokenizer
from tests.support.class_models import save_class
from tests.support.configurations import quick_config
from tests.support.hf_models import save_small_hf
from tests.support.wrappers import save_wrapper

END, START, STOP, USER = range(4)  # ids of <|endoftext|>, <|im_start|>, <|im_end|>, <|user|>
SETTINGS = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "pad_token_id": END,
    "bos_token_id": START,
}
SETTINGS |= {"eos_token_id": [STOP, END], "suppress_tokens": [USER, 293], "bad_words_ids": [[USER, 9], [9]]}


def edited(folder: Path, change: dict[str, str], **settings: Any) -> Path:
    """The tokenizer of ``folder`` with a token more, other names of some tokens, and other settings."""
    content = json.loads((folder / "tokenizer.json").read_text())
    tokens = content["added_tokens"]
    for token in tokens:
        token["content"] = change.get(token["content"], token["content"])
    content["model"]["vocab"] = {change.get(text, text): n for text, n in content["model"]["vocab"].items()}
    tokens.append(tokens[0] | {"id": 294, "content": "<|more|>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    file = folder / "tokenizer_config.json"
    given = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    return folder


def source_of(kind: str, folder: Path) -> Path:
    """A checkpoint with a padded vocabulary, a tokenizer and settings of generation."""
    if kind == "wrapper":
        save_wrapper("qwen3_5_moe", folder, vocab_size=320)
    elif kind == "class":
        save_class("jetmoe", folder, vocab_size=320)
    else:
        save_small_hf(kind, folder, other_sizes={"vocab_size": 320})
    save_tokenizer(folder, "chatml")
    file = folder / "config.json"
    ids = {key: SETTINGS[key] for key in ("eos_token_id", "pad_token_id", "bos_token_id")}
    config = json.loads(file.read_text())
    config.get("text_config", config).update(ids)
    file.write_text(json.dumps(config | ids))
    (folder / "generation_config.json").write_text(json.dumps(SETTINGS))
    return folder


CASES = {
    "one more": ({}, {}, [STOP, END], [[USER, 9], [9]]),
    "no pad": ({}, {"pad_token": None}, [STOP, END], [[USER, 9], [9]]),
    "a bos": ({}, {"bos_token": "<|tool|>"}, [STOP, END], [[USER, 9], [9]]),
    "another end": ({}, {"eos_token": "<|more|>", "pad_token": "<|tool|>"}, [294, STOP, END], [[USER, 9], [9]]),
    "a stop renamed": ({"<|im_end|>": "<|over|>"}, {}, [END], [[USER, 9], [9]]),
    "another renamed": ({"<|user|>": "<|over|>"}, {"pad_token": None}, [STOP, END], [[9]]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["qwen3_moe", "class", "wrapper"])
def test_the_tokenizers_ids_and_the_checkpoints_generation(kind: str, case: str, tmp_path: Path) -> None:
    change, settings, stops, words = CASES[case]
    source = source_of(kind, tmp_path / "source")
    other = edited(save_tokenizer(tmp_path / "other", "chatml"), change, **settings)
    model = model_config_from_hf(source)
    out = tmp_path / "out"
    out.mkdir()
    write_settings(out, model, torch.float32, str(other), source=open_catalog(source, model))
    # AutoTokenizer takes Qwen3.5's own class, which pads with the end of text if the files name nothing.
    theirs = PreTrainedTokenizerFast.from_pretrained(out)
    whole = json.loads((out / "config.json").read_text())
    generation = GenerationConfig.from_pretrained(out)
    assert theirs.convert_ids_to_tokens(294) == "<|more|>"
    for found in (whole, generation.to_dict(), whole.get("text_config", whole)):
        assert found["pad_token_id"] == theirs.pad_token_id and found["bos_token_id"] == theirs.bos_token_id
        assert found["eos_token_id"] == stops
    assert generation.bad_words_ids == words and 293 in generation.suppress_tokens
    for key in ("do_sample", "temperature", "top_k", "top_p"):
        assert getattr(generation, key) == SETTINGS[key]


@pytest.mark.parametrize("tokenizer", ["byte", "none"])
def test_without_a_token_of_the_checkpoint_its_settings_stay_and_no_id(tokenizer: str, tmp_path: Path) -> None:
    source = source_of("qwen3_moe", tmp_path / "source")
    write_settings(tmp_path, model_config_from_hf(source), torch.float32, tokenizer)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    end, pad = (256, 257) if tokenizer == "byte" else (None, None)
    ids = {"eos_token_id": end, "pad_token_id": pad, "bos_token_id": None}
    assert found == SETTINGS | ids | {"suppress_tokens": None, "bad_words_ids": None}


def test_a_checkpoint_without_a_tokenizer_and_one_from_random_weights(tmp_path: Path) -> None:
    """The first knows no token, and the second has no settings: both exports have the tokenizer's own ids."""
    source = source_of("qwen3_moe", tmp_path / "source")
    (source / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    other = edited(save_tokenizer(tmp_path / "other", None), {}, pad_token=None, bos_token="<|im_start|>")
    for model, temperature in ((model_config_from_hf(source), 0.6), (quick_config("sft_small").model, None)):
        out = tmp_path / str(temperature)
        out.mkdir()
        write_settings(out, model, torch.float32, str(other))
        for name in ("config.json", "generation_config.json"):
            found = json.loads((out / name).read_text())
            assert [found[key] for key in ("bos_token_id", "pad_token_id")] == [START, None]
            assert found["eos_token_id"] in (END, [END])
        assert found.get("temperature") == temperature


def test_an_export_of_merged_adapters_and_its_conversion(tmp_path: Path) -> None:
    source = source_of("qwen3_moe", tmp_path / "source")
    other = edited(save_tokenizer(tmp_path / "other", "opens"), {}, pad_token=None)
    config = Config(model=model_config_from_hf(source), moe=MoEConfig(experts="loop"), lora=LoraConfig(rank=2))
    model = build_decoder(config.model, config.moe, torch.float32)
    freeze_and_adapt(model, config, torch.float32, torch.float32)
    allocate({0: model}, torch.device("cpu"))
    load_hf(model, source)
    chat = ChatTemplate(ChatConfig(), str(other))
    to_hf(model, tmp_path / "out", tokenizer=str(other), chat=chat, verify=False)
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found == SETTINGS | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": [USER, STOP, END]}
