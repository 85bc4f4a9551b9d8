"""Synthetic ids in the place of text, and the large models that ask for one or the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, tokenizer_of
from automoe.config.validate import validate
from automoe.data.loader import Loader
from automoe.data.prepare import synthetic_corpus
from automoe.errors import ConfigError
from automoe.hf.folder import write_settings
from automoe.launch.prepare import check_data
from automoe.observe.summary import describe_run
from tests.support.configurations import quick_config

SMALL = ["data=benchmark", "model.vocab_size=5000", "train.seq_len=64", "mesh.pp=1", "mesh.ep=1", "launch.num_ranks=1"]


def small(*overrides: str) -> Config:
    return quick_config("config", [*SMALL, *overrides])


def test_a_row_is_a_document_of_ids_from_the_whole_vocabulary() -> None:
    batch = Loader(small(), 0, 1).next_step()
    assert (batch.doc_ids == 0).all() and (batch.positions == torch.arange(64)).all()
    assert (batch.labels[:, :-1] == batch.tokens[:, 1:]).all() and (batch.labels[:, -1] < 0).all()
    assert batch.num_bytes == 0
    corpus = synthetic_corpus(5000, 64)
    counts = np.bincount(corpus.tokens, minlength=5000)
    assert len(counts) == 5000 and counts.min() > 0 and (corpus.tokens == synthetic_corpus(5000, 64).tokens).all()
    assert corpus.where(4) == "synthetic:5"
    assert len(synthetic_corpus(5000, 1 << 17).lengths) == 64, "long rows do not fill the memory"


def test_ranks_share_rows_out_and_a_resume_goes_on_where_it_was() -> None:
    whole, halves = Loader(small(), 0, 1), [Loader(small(), rank, 2) for rank in (0, 1)]
    for _ in range(2):
        step = whole.next_step()
        assert (step.tokens == torch.cat([half.next_step().tokens for half in halves])).all()
    again = Loader(small("train.global_batch_size=8", "train.micro_batch_size=1"), 0, 1)
    again.load_state_dict(whole.state_dict())
    assert (again.next_step().tokens == whole.next_step().tokens[:8]).all()
    trained = {tuple(row) for row in step.tokens.tolist()}
    held_out = {tuple(row) for batch in whole.batches("validation", 1) for row in batch.tokens.tolist()}
    assert held_out and not held_out & trained


def test_it_is_labelled_wherever_it_could_be_taken_for_training_on_text(tmp_path: Path) -> None:
    config = small()
    assert tokenizer_of(config) == "none"
    assert "SYNTHETIC" in dict(describe_run(config, resolve_mesh(config.mesh, 1)))["data"]
    write_settings(tmp_path, config.model, torch.float32, tokenizer_of(config))
    assert "synthetic" in (tmp_path / "README.md").read_text()
    assert not list(tmp_path.glob("tokenizer*"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.tokenizer=byte"], r"data.tokenizer=byte: data.kind=benchmark has no text"),
        (["data.path=README.md"], r"data.path=README.md: data.path is set and data.kind=benchmark does not read it"),
        (["data.sources=[{kind: benchmark, name: a}]"], r"data.sources=.*a: kind=benchmark is synthetic"),
        (["lora.rank=4", "lora.export=adapter"], r"lora.export=adapter: data.kind=benchmark trains nothing"),
    ],
)
def test_what_makes_no_sense_without_text_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(small(*overrides), 1)


def test_large_models_ask_for_text_and_a_tokenizer_and_small_ones_do_not(tmp_path: Path) -> None:
    def missing(name: str, *overrides: str) -> str:
        try:
            check_data(quick_config(name, list(overrides)))
        except ConfigError as error:
            return str(error)
        return ""

    text, tokenizer = ["data=text", f"data.path={tmp_path}"], f"data.tokenizer={tmp_path}"
    assert missing("qwen3_30b_a3b").startswith(
        "data.kind=stdlib: the demonstration corpus, 10 MB of Python, is too small"
    )
    assert "for a model of 30.5 B parameters" in missing("qwen3_30b_a3b", tokenizer)
    assert missing("qwen3_30b_a3b", *text).startswith("data.tokenizer=byte: bytes are 258 of 151,936 ids, too few")
    assert "Set data=chat data.path=FILE" in missing("qwen3_30b_a3b_sft")
    for enough in ([*text, tokenizer], ["data=benchmark"], [f"model.hf_path={tmp_path}"]):
        assert not missing("qwen3_30b_a3b", *enough)
    assert not missing("config") and not missing("config", "model=qwen3_0_6b")
    assert missing("config", "model=llama32_1b"), "1.24 B"
