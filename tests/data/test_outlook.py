"""What a run says before its first step: rate, steps and epochs, and tokens that frozen rows cannot learn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from automoe.config.data_schema import ChatConfig, DataConfig, SourceConfig
from automoe.config.rule_engine import check_rows
from automoe.config.schema import Config, LoraConfig, OptimConfig, TrainConfig
from automoe.config.train_schema import Phase
from automoe.config.validate import settings_rows
from automoe.data.loader import Loader
from automoe.data.prepare import with_steps
from automoe.errors import ConfigError
from automoe.hf.families.registry import model_config_from_hf
from tests.support.chat import messages, save_tokenizer, write_chat
from tests.support.class_models import save_class
from tests.support.hf_models import save_small_hf


def said(config: Config, cache: Path) -> str:
    return " ".join(Loader(config, 0, 1, cache_dir=cache).describe())


def with_a_token_more(folder: Path) -> Path:
    save_tokenizer(folder, "chatml")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 294, "content": "<|more|>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", ["qwen3_moe", "class"])
def test_a_new_token_whose_rows_are_frozen_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    if kind == "class":
        save_class("jetmoe", source, vocab_size=320)
    else:
        save_small_hf(kind, source, other_sizes={"vocab_size": 320})
    save_tokenizer(source, "chatml")
    other = str(with_a_token_more(tmp_path / "other"))
    asked = [messages("<|more|>?", "No."), messages("2+2?", "4")]
    answered = write_chat(tmp_path / "answered.jsonl", [*asked, messages("a?", "<|more|><|more|>")])
    path = write_chat(tmp_path / "asked.jsonl", asked)
    data = DataConfig(kind="chat", path=str(answered), tokenizer=other, on_long="error", val_fraction=0.0)
    train = TrainConfig(seq_len=64, val_every=0)
    config = Config(model=model_config_from_hf(source), data=data, train=train, lora=LoraConfig(rank=2))
    warning = "1 tokens are trained and cannot be learned"
    found = said(config, tmp_path)
    rows = found.partition("train.trainable=[")[2].partition("]")[0].split(",")
    assert warning in found and "frozen: <|more|>." in found and str(source) in found
    ends = ["embed_tokens"] if kind == "class" else ["embed_tokens", "lm_head"]  # Jet-MoE ties them
    assert [row.rpartition(".")[0].rpartition(".")[2] for row in rows] == ends
    without = LoraConfig()
    frozen = replace(train, freeze=["*embed_tokens*"])
    assert warning in said(replace(config, lora=without, train=frozen), tmp_path)
    text = DataConfig(kind="jsonl", path=str(tmp_path / "text.jsonl"), tokenizer=other, val_fraction=0.0)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "one <|more|> two"}) + "\n")
    for one in (
        replace(config, data=replace(data, path=str(path))),  # a question alone has it
        replace(config, lora=without),
        replace(config, train=replace(train, trainable=rows)),  # what the remedy says
        replace(config, data=replace(data, chat=ChatConfig(special_text="text"))),
        replace(config, data=replace(data, tokenizer=None)),
        replace(config, data=text),  # a document that quotes it has its characters
    ):
        assert warning not in said(one, tmp_path)


@pytest.mark.parametrize("beside", [True, False])
def test_tokens_of_rows_that_the_checkpoint_lacks_are_named(beside: bool, tmp_path: Path) -> None:
    """Whether its folder has the larger tokenizer itself, or none to compare with."""
    source, other = tmp_path / "source", with_a_token_more(tmp_path / "other")
    save_small_hf("qwen3_moe", source, other_sizes={"vocab_size": 294})
    if beside:
        with_a_token_more(source)
    path = write_chat(tmp_path / "chats.jsonl", [messages("a?", "<|more|>"), messages("2+2?", "4")])
    tokenizer = None if beside else str(other)
    data = DataConfig(kind="chat", path=str(path), tokenizer=tokenizer, on_long="error", val_fraction=0.0)
    data.chat.template = str(other / "chat_template.jinja")
    model = replace(model_config_from_hf(source), vocab_size=304)
    config = Config(model=model, data=data, train=TrainConfig(seq_len=64, val_every=0), lora=LoraConfig(rank=2))
    found = said(config, tmp_path)
    assert "1 tokens are trained and cannot be learned" in found and "frozen: <|more|>." in found
    rows = ["embed_tokens.weight", "lm_head.weight"]
    assert "cannot be learned" not in said(replace(config, train=replace(config.train, trainable=rows)), tmp_path)


def test_the_length_of_a_run_is_said_and_train_epochs_sets_it(tmp_path: Path) -> None:
    path = write_chat(tmp_path / "chats.jsonl", [messages(f"{n}?", f"{n}!") for n in range(40)])
    chat = ChatConfig(template="plain", pack=False)
    data = DataConfig(kind="chat", path=str(path), chat=chat, on_long="error", val_fraction=0.0)
    train = TrainConfig(steps=300, seq_len=64, global_batch_size=16, val_every=0)
    config = Config(data=data, train=train, optim=OptimConfig(lr=1e-5, weight_decay=0.0))
    found = said(config, tmp_path)
    assert "optim.lr=1e-05, weight decay 0, 300 steps: 120 epochs of 40 rows" in found and "warning" not in found
    assert with_steps(config) == config
    for epochs, ramp, steps in ((1, None, 3), (2, None, 5), (0.1, None, 1), (2.0, [8, 8, 24], 7)):
        asked = replace(config, train=replace(train, epochs=epochs, rampup_batch_size=ramp))
        frozen = with_steps(asked)
        assert frozen.train.steps == steps
        found = said(frozen, tmp_path)
        assert f", {steps} steps: " in found
        assert f"optim.warmup_steps=20, more than half of the {steps} steps" in found
    phases = OptimConfig(schedule="phases", warmup_steps=2, phases=[Phase(steps=3)])
    by_phases = replace(config, optim=phases, train=replace(train, epochs=2))
    check_rows(by_phases, settings_rows(by_phases))  # 298 steps are no setting of this run
    assert with_steps(by_phases).train.steps == 5
    for epochs in (1, 3):
        with pytest.raises(
            ConfigError,
            match=r"steps sum to 3 \(train\.epochs=0\.0\)\. Set train\.steps=5 train\.epochs=0, or other steps",
        ):
            with_steps(replace(by_phases, train=replace(train, epochs=epochs)))
    twice = replace(data, path=None, sources=[SourceConfig(path=str(path), name=name) for name in "ab"])
    mixed = replace(config, data=twice, train=replace(train, epochs=1))
    assert with_steps(mixed).train.steps == 5  # of 80 rows
