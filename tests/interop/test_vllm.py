"""vLLM on a CPU beside a session: the same log-probabilities and greedy answers, and new weights in a running engine.

``make test-vllm`` makes its environment and names its Python in ``VLLM_PYTHON``.
"""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import pytest
import torch

from automoe.comm.local_shard import local_shard
from automoe.config.recipe_args import GRPOArgs
from automoe.errors import BackendError
from automoe.hf.engines import IGNORED
from automoe.rl import vllm_worker
from automoe.rl.engine import Answer, Sampling, TransformersEngine, gaps_of
from automoe.rl.vllm import LocalVLLM
from automoe.rl.weights import WeightStream
from automoe.session import Sample, Session, close, open_session
from tests.rl.test_grpo_kills import FOR_VLLM, TINY, kill_and_compare
from tests.support.grpo_vllm import LOOPS, MLA, faults_of, run_loop

SIZES = ["train.seq_len=64", "train.dtype=float32", "mesh=fsdp", "launch.device=cpu", "model.num_layers=3"]
# The families that vLLM serves in float32 on a CPU, and sizes that its kernels take.
FAMILIES: dict[str, list[str]] = {
    "qwen3_moe": [],
    "mixtral": [],
    "qwen2_moe": [],
    "glm4_moe": [],
    "gpt_oss": ["model.attention.sliding_window=8"],
    "olmoe": [],  # vLLM takes norm_eps=1e-5 for granted
    "dsv3": [*MLA],
    "moonlight": [*MLA, "model.attention.q_lora_rank=null"],  # DeepSeek-V3 without a query's latent
    "glm4_moe_lite": [*MLA],
}
PROMPTS = [[5, 17, 3, 88, 41], [9, 200, 31], [77]]
ANSWER = 24  # tokens

pytestmark = pytest.mark.vllm


def scored(session: Session, engine: LocalVLLM, temperature: float) -> tuple[list[Answer], list[list[float]]]:
    """Answers of the engine, and the session's log-probabilities of their tokens."""
    groups = engine.sample(PROMPTS, Sampling(2, ANSWER, temperature, seed=3))
    answers = [(prompt, answer) for prompt, group in zip(PROMPTS, groups, strict=True) for answer in group]
    assert all(len(answer.tokens) == ANSWER for _, answer in answers)
    ours = session.log_probs([Sample.of_answer(p, a.tokens) for p, a in answers], temperature).log_probs
    return [answer for _, answer in answers], [said[-ANSWER:].tolist() for said in ours]


def largest_gap(session: Session, engine: LocalVLLM, temperature: float) -> float:
    """Largest difference of log-probabilities of sampled tokens, in nats."""
    answers, ours = scored(session, engine, temperature)
    return gaps_of(answers, {"old_log_probs": ours}, math.inf)["engine_gap_max"]


def share_that_differs(session: Session, engine: LocalVLLM, shift: int) -> float:
    """Share of tokens whose routes, moved by ``shift`` tokens, are not those of our routers, prompts' tokens too."""
    groups = engine.sample(PROMPTS, Sampling(2, ANSWER, seed=4))
    batch = [
        Sample.of_answer(prompt, answer.tokens, routes=answer.routes.roll(shift, 0))
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for answer in group
    ]
    return (torch.cat(session.log_probs(batch).first_differing) >= 0).float().mean().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_computes_what_the_trainer_does(family: str, tmp_path: Path) -> None:
    preset = {"moonlight": "dsv3"}.get(family, family)
    session = open_session([f"model=small_{preset}", *SIZES, *FAMILIES[family], f"run_dir={tmp_path}"])
    engine = LocalVLLM(os.environ["VLLM_PYTHON"], session.config, tmp_path)
    try:
        reference = TransformersEngine(session.config, session.device)
        parts = session.state.model_parts
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):  # the second time into an engine that has answered
            for part in parts.values():
                for parameter in part.parameters():
                    with torch.no_grad():
                        shard = local_shard(parameter)
                        shard.add_(torch.randn(shard.shape, generator=generator).to(shard.dtype), alpha=0.02)
            engine.update(WeightStream(parts, **engine.options))
            assert largest_gap(session, engine, 1.0) < 2e-6
            assert largest_gap(session, engine, 0.7) < 2e-6
            assert share_that_differs(session, engine, 0) < 0.01 < 0.5 < share_that_differs(session, engine, 1)
        reference.update(WeightStream(parts, **reference.options))
        greedy = [answer.tokens for [answer] in engine.sample(PROMPTS, Sampling(1, ANSWER, 0.0))]
        for prompt, tokens in zip(PROMPTS, greedy, strict=True):
            theirs = reference._model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=ANSWER, min_new_tokens=ANSWER, pad_token_id=0
            )
            assert theirs[0, len(prompt) :].tolist() == tokens
    finally:
        engine.close()
        close()


def test_an_engine_with_stale_experts_is_found(tmp_path: Path) -> None:
    """The trainer moves on and the engine does not: the gap is far above rounding."""
    session = open_session(["model=small_qwen3_moe", *SIZES, f"run_dir={tmp_path}"])
    engine = LocalVLLM(os.environ["VLLM_PYTHON"], session.config, tmp_path)
    try:
        parts = session.state.model_parts
        engine.update(WeightStream(parts, **engine.options))
        assert largest_gap(session, engine, 1.0) < 2e-6
        for part in parts.values():
            for name, parameter in part.named_parameters():
                if "experts" in name:
                    with torch.no_grad():
                        local_shard(parameter).mul_(1.5)
        assert largest_gap(session, engine, 1.0) > 1e-3
    finally:
        engine.close()
        close()


def test_experts_that_a_kernel_has_packed_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that keeps the kernels of older weights: these read experts in another layout than the new ones have."""
    source = Path(vllm_worker.__file__).read_text()
    assert source.count(".moe_kernel = None") == 1
    (tmp_path / "worker.py").write_text(source.replace(".moe_kernel = None", ".moe_kernel"))
    monkeypatch.setattr(vllm_worker, "__file__", str(tmp_path / "worker.py"))
    session = open_session(["model=small_qwen3_moe", "model.initializer_range=0.3", *SIZES, f"run_dir={tmp_path}"])
    engine = LocalVLLM(os.environ["VLLM_PYTHON"], session.config, tmp_path)
    try:
        engine.update(WeightStream(session.state.model_parts, **engine.options))
        answers, ours = scored(session, engine, 1.0)
        with pytest.raises(BackendError, match="nats from the trainer's on average"):
            gaps_of(answers, {"old_log_probs": ours}, GRPOArgs().max_gap)
    finally:
        engine.close()
        close()


def test_a_run_that_is_killed_with_its_engine_ends_in_the_same_bits(tmp_path: Path) -> None:
    settings = (*TINY, *FOR_VLLM, f"recipe_args.engine={os.environ['VLLM_PYTHON']}")
    moments = kill_and_compare(tmp_path, 2, random.randrange(1 << 30), 20, settings)
    assert moments[-1]["recorded_steps"] < 20


def test_the_table_of_ignored_keys_is_true(tmp_path: Path) -> None:
    """vLLM takes OLMoE's epsilon for granted; a row of ``automoe.hf.engines`` that is stale is red here."""
    [row] = [families for engine, families in IGNORED.items() if engine.startswith("vLLM")]
    assert row == {"olmoe": {"norm_eps": 1e-5}}
    session = open_session(["model=small_olmoe", "model.norm_eps=1e-2", *SIZES, f"run_dir={tmp_path}"])
    engine = LocalVLLM(os.environ["VLLM_PYTHON"], session.config, tmp_path)
    try:
        engine.update(WeightStream(session.state.model_parts, **engine.options))
        [[answer]] = engine.sample(PROMPTS[:1], Sampling(1, ANSWER, seed=3))
        [ours] = session.log_probs([Sample.of_answer(PROMPTS[0], answer.tokens)]).log_probs
        assert (torch.tensor(answer.log_probs) - ours[-ANSWER:]).abs().max() > 1e-4
    finally:
        engine.close()
        close()


@pytest.mark.parametrize("name", LOOPS)
def test_rewards_rise_and_the_engine_stays_with_the_trainer(name: str, tmp_path: Path) -> None:
    """The routes of the engine are replayed, and its weights are new in each of thirty steps."""
    assert faults_of(name, run_loop(name, os.environ["VLLM_PYTHON"], tmp_path / "run")) == []
