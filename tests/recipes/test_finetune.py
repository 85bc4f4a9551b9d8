"""Fine-tuning learns conversations by heart: the same losses on every mesh, and answers that ``transformers`` repeats."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, MoEConfig, ObserveConfig, OptimConfig, TrainConfig
from automoe.hf.families.registry import model_config_from_hf
from automoe.training.context import RunContext
from automoe.verify.pool import RankPool
from recipes import pretrain
from tests.support.chat import messages, save_tokenizer, write_chat
from tests.support.hf_models import save_small_hf

MESHES = {
    "one": {},
    "ep2": {"dp_shard": 2, "ep": 2},
    "cp2_ep2": {"cp": 2, "ep": 2},
    "pp2_dp2_ep2": {"pp": 2, "dp_shard": 2, "ep": 2},
}
STEPS = 180


def conversations() -> list[list[dict[str, Any]]]:
    """64 of them, every fourth with a second question; answers are letters that nothing but memory gives."""
    generator = torch.Generator().manual_seed(0)
    letters = ["".join(chr(97 + int(i)) for i in torch.randint(26, (3,), generator=generator)) for _ in range(128)]
    return [
        messages(f"{n}?", letters[n]) + (messages("and?", letters[64 + n]) if n % 4 == 0 else []) for n in range(64)
    ]


def config_of(folder: Path, name: str) -> Config:
    checkpoint = folder / "base"
    if not checkpoint.exists():
        sizes = {"vocab_size": 304, "hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32}
        save_small_hf("qwen3_moe", checkpoint, other_sizes=sizes)
        save_tokenizer(checkpoint, "thinks")
        write_chat(folder / "chats.jsonl", conversations())
    model = model_config_from_hf(checkpoint)
    data = DataConfig(kind="chat", path=str(folder / "chats.jsonl"), on_long="error", val_fraction=0.0)
    return Config(
        run_dir=str(folder / name),
        recipe="finetune",
        mesh=MeshConfig(**({"dp_shard": 1} | MESHES[name])),
        model=model,
        moe=MoEConfig(experts="loop"),
        train=TrainConfig(
            steps=STEPS,
            seq_len=64,
            global_batch_size=8,
            micro_batch_size=2 if "pp" in name else 4,
            dtype="float64",
            val_every=0,
        ),
        optim=OptimConfig(lr=1e-2, warmup_steps=10, weight_decay=0.0),
        data=data,
        observe=ObserveConfig(report=False),
    )


def run_rank(config: Config) -> None:
    run_dir, rank = Path(config.run_dir), dist.get_rank()
    context = RunContext(rank, dist.get_world_size(), rank, torch.device("cpu"), run_dir)
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(run_dir.parent / "cache")),
        (run_dir / f"said{rank}").open("w") as file,
        contextlib.redirect_stdout(file),
    ):
        pretrain.main(config, resolve_mesh(config.mesh, None), context)


def train(ranks: RankPool, folder: Path, name: str) -> list[float]:
    """Losses of a run on the mesh ``name``."""
    config = config_of(folder, name)
    Path(config.run_dir).mkdir()
    ranks.run(run_rank, resolve_mesh(config.mesh, None).world_size, config)
    return [json.loads(line)["loss"] for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]


def repeated(exported: Path) -> tuple[int, list[str]]:
    """How many answers there are, and those that ``generate`` does not repeat, greedily and to the stop token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    by_length: dict[int, list[tuple[list[int], str]]] = defaultdict(list)
    for turns in conversations():
        for n in range(1, len(turns), 2):
            prompt = tokenizer.apply_chat_template(turns[:n], add_generation_prompt=True, return_dict=False)
            by_length[len(prompt)].append((prompt, f"<think>\n\n</think>\n\n{turns[n]['content']}<|im_end|>"))
    wrong, options = [], {"max_new_tokens": 16, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for length, pairs in by_length.items():
        prompts = torch.tensor([prompt for prompt, _ in pairs])
        answers = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        for ids, (_, expected) in zip(answers[:, length:], pairs, strict=True):
            found = tokenizer.decode(ids[ids != tokenizer.pad_token_id])
            wrong += [f"{found!r} and not {expected!r}"] if found != expected else []
    return sum(map(len, by_length.values())), wrong


@pytest.mark.faults
def test_conversations_are_learned_by_heart_on_every_mesh(ranks: RankPool, tmp_path: Path) -> None:
    losses = {name: train(ranks, tmp_path, name) for name in MESHES}
    for name in MESHES:
        assert losses[name] == pytest.approx(losses["one"], rel=1e-10, abs=1e-10), name
        answers, wrong = repeated(tmp_path / name / "hf")
        assert answers == 80 and not wrong, f"{name}: {len(wrong)} of {answers}: {wrong[:3]}"
    assert len(losses["one"]) == STEPS and losses["one"][-1] < 0.1 < losses["one"][0]
    said = (tmp_path / "one" / "said0").read_text()
    assert "64 conversations, 80 answers" in said and "80 samples with 1.2" in " ".join(said.split())
    assert "from random weights" not in said and "trained > | <think>" in said
    shown = [line for line in said.splitlines() if str(tmp_path) not in line]
    assert max(map(len, shown)) <= 80
