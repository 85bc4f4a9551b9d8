"""What a model says to prompts while it is trained: on every mesh what ``transformers`` generates from its export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ObserveConfig,
    TrainConfig,
)
from automoe.data.prompts import encoded_prompts
from automoe.data.tokenizer import load_tokenizer
from automoe.errors import ConfigError
from automoe.hf.write import to_hf
from automoe.launch.prepare import check
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.run.samples import Sampler, stop_tokens
from automoe.verify.pool import RankPool
from tests.support.chat import save_tokenizer
from tests.support.gpu import one_rank

PROMPTS = ["def main():", "It was", "x = [n for n in range(3)]", "?", "import os, sys"]
MESHES = [{}, {"pp": 2, "dp_shard": 2, "ep": 2}, {"cp": 2, "tp": 2, "ep": 4}]
CONFIG = Config(
    model=ModelConfig(
        vocab_size=264,
        hidden_size=32,
        num_layers=2,
        num_experts=4,
        moe_intermediate_size=16,
        initializer_range=0.2,
        attention=AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True),
        family="qwen3_moe",
    ),
    moe=MoEConfig(experts="loop"),
    train=TrainConfig(seq_len=64, global_batch_size=4, micro_batch_size=1, dtype="float64"),
    observe=ObserveConfig(samples=PROMPTS, sample_tokens=10),
)


def said(config: Config, export: Path | None) -> list[str]:
    meshes = build_meshes(resolve_mesh(config.mesh, None), torch.device("cpu"))
    parts = build_parts(config, meshes)
    materialize(parts, config, torch.device("cpu"))
    runner = build_runner(parts, meshes, config, torch.device("cpu"))
    sampler = Sampler(config, runner, load_tokenizer("byte"), meshes, torch.device("cpu"))
    first = sampler.generate()
    assert not any(layer.router.load.totals.any() for part in parts.values() for _, layer in part.moe_layers())
    if export is not None:
        to_hf(parts, export, tokenizer="byte", verify=False)
    assert [pair["prompt"] for pair in first] == PROMPTS
    return [pair["text"] for pair in first]


def generated(folder: Path) -> list[str]:
    """What ``transformers`` generates, greedily, with the tokens that end an answer left out."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        texts.append(load_tokenizer("byte").decode(answer[0, ids.shape[1] :].tolist()))
    return texts


@pytest.mark.exhaustive
def test_every_mesh_says_what_transformers_generates(ranks: RankPool, tmp_path: Path) -> None:
    for mesh in MESHES:
        config = replace(CONFIG, mesh=MeshConfig(**({"dp_shard": 1} | mesh)))
        export = tmp_path / "hf" if not mesh else None
        for texts in ranks.run(said, resolve_mesh(config.mesh, None).world_size, config, export):
            if export is not None:
                expected = generated(export)
                assert len(set(expected)) == len(PROMPTS) and all(len(text) > 3 for text in expected)
            assert texts == expected, mesh


@pytest.mark.parametrize(
    ("samples", "length", "says"),
    [
        (["x" * 45], 20, "45 tokens, not 1 to train.seq_len - observe.sample_tokens = 44"),
        (["fine", ""], 20, "0 tokens, not 1 to"),
        ("nowhere.txt", 20, "a text file with one on each line; it cannot be read"),
        (["fine"], 64, "a prompt and its answer share a row of train.seq_len=64 tokens"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused_before_ranks_start(
    samples: list[str] | str, length: int, says: str
) -> None:
    config = replace(CONFIG, mesh=MeshConfig(dp_shard=2), observe=ObserveConfig(samples=samples, sample_tokens=length))
    with pytest.raises(ConfigError, match=says):
        check(config, 2, "cpu")


def test_ids_that_are_no_text_answer_no_prompt() -> None:
    data, observe = DataConfig(kind="benchmark"), ObserveConfig(samples=["Who?"], sample_tokens=4)
    with pytest.raises(ConfigError, match="stand for no text"):
        check(replace(CONFIG, data=data, observe=observe), 1, "cpu")


def test_a_prompt_of_a_chat_model_is_a_users_message_and_its_answer_ends_as_in_an_export(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder, prompts = save_tokenizer(tmp_path / "tokenizer", "chatml"), tmp_path / "prompts.txt"
    prompts.write_text("\ufeffWho?\n\nAnd\u2028why?\n", encoding="utf-8")
    config = replace(CONFIG, model=replace(CONFIG.model, vocab_size=304))
    config = replace(config, data=DataConfig(kind="stdlib_chat", tokenizer=str(folder)))
    config.observe = ObserveConfig(samples=str(prompts), sample_tokens=8)
    texts, ids = encoded_prompts(config, load_tokenizer(str(folder)))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert texts == ["Who?", "And\u2028why?"]
    for text, prompt in zip(texts, ids, strict=True):
        question = [{"role": "user", "content": text}]
        assert prompt == theirs.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert set(stop_tokens(config)) == set(theirs.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    prompts.write_text("\n \n")
    with pytest.raises(ConfigError, match="no line has text"):
        encoded_prompts(config, load_tokenizer(str(folder)))


def test_a_model_whose_logits_are_nan_says_no_more() -> None:
    config = replace(CONFIG, observe=ObserveConfig(samples=["Who?", "Why?"], sample_tokens=4))
    with one_rank("cpu"):
        meshes = build_meshes(resolve_mesh(config.mesh, 1), torch.device("cpu"))
        parts = build_parts(config, meshes)
        materialize(parts, config, torch.device("cpu"))
        runner = build_runner(parts, meshes, config, torch.device("cpu"))
        sampler = Sampler(config, runner, load_tokenizer("byte"), meshes, torch.device("cpu"))
        with torch.no_grad():
            parts[0].norm.weight.fill_(torch.nan)
        assert [one["text"] for one in sampler.generate()] == ["[NaN: no next token]"] * 2
