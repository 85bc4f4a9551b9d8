"""QK-clip scales exactly the heads whose logits were too large, and so far that they are no longer."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from mesh_cases import MODELS

from automoe.comm.tokens import StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, MoEConfig, OptimConfig, TrainConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.model.attention import GroupedQueryAttention
from automoe.model.backend import BackendConfig
from automoe.optim import qk_clip
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training import step
from automoe.training.state import TrainState
from tests.support.configurations import quick_config
from tests.support.gpu import one_rank

GATED = replace(MODELS["mixtral"].attention, output_gate=True)
GATED = replace(MODELS["mixtral"], attention=GATED)  # rows of gates lie between those of queries
# Models, and a limit between the logits of the heads of their first layers.
CASES = {"deepseek": 3.3, "deepseek-direct": 5.5, "gpt-oss": 5.0, "llama": 4.5, "mixtral": 4.0, "mixtral-mha": 4.5}


def plain_largest(
    q_BSND: torch.Tensor, k_BRGD: torch.Tensor, mask: torch.Tensor | None, scale: float, valid: torch.Tensor
) -> list[float]:
    largest = [-math.inf] * q_BSND.shape[2]
    for row in range(q_BSND.shape[0]):
        for query in range(q_BSND.shape[1]):
            for key in range(k_BRGD.shape[1]):
                if valid[row, query] and (key <= query if mask is None else mask[row, 0, query, key]):
                    for head in range(len(largest)):
                        group = head * k_BRGD.shape[2] // len(largest)
                        logit = float(q_BSND[row, query, head] @ k_BRGD[row, key, group]) * scale
                        largest[head] = max(largest[head], logit)
    return largest


@pytest.mark.parametrize("masked", [False, True])
def test_the_largest_logit_of_each_head_in_any_chunks(masked: bool) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 7, 4, 3, dtype=torch.float64), torch.randn(2, 7, 2, 3, dtype=torch.float64)
    mask = (torch.rand(2, 1, 7, 7) < 0.5) | torch.eye(7, dtype=torch.bool) if masked else None
    valid = torch.arange(7) < torch.tensor([[7], [4]])
    q[~valid] *= 100
    expected = pytest.approx(plain_largest(q, k, mask, 0.3, valid), rel=1e-14)
    assert qk_clip.largest_logits(q, k, mask, 0.3, valid).tolist() == expected
    with mock.patch.object(qk_clip, "CHUNK", 3):
        assert qk_clip.largest_logits(q, k, mask, 0.3, valid).tolist() == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_a_step_scales_the_heads_over_the_limit_to_the_limit(name: str) -> None:
    model, limit = MODELS[name], CASES[name]
    optim = OptimConfig(lr=0.0, weight_decay=0.0, schedule="constant", warmup_steps=0, qk_clip=limit)
    train = TrainConfig(seq_len=16, global_batch_size=4, micro_batch_size=2, dtype="float64")
    moe = MoEConfig(experts="loop")
    config = Config(mesh=MeshConfig(dp_shard=1), model=model, moe=moe, train=train, optim=optim)
    tokens = torch.randint(0, model.vocab_size, (4, 16), generator=torch.Generator().manual_seed(1))
    places = torch.arange(16).expand(4, 16)
    batch = StepBatch(tokens, tokens, places, (places >= 9).long(), 0, 0)
    with one_rank("cpu") as device:
        meshes = build_meshes(resolve_mesh(config.mesh, 1), device)
        parts = build_parts(config, meshes)
        materialize(parts, config, device)
        state = TrainState(parts, build_optimizer(parts.values(), optim))
        runner = build_runner(parts, meshes, config, device)
        seen = []
        take = qk_clip.take_largest_logits
        with mock.patch.object(step, "take_largest_logits", lambda *given: seen.append(take(*given)) or seen[-1]):
            for _ in range(2):
                before = {name: p.detach().clone() for name, p in parts[0].named_parameters()}
                inputs, trained = step.prepare_inputs(batch, meshes, config, device)
                stats = step.forward_backward(state, runner, inputs, config)
                update = step.optimizer_step(state, stats, trained, meshes, config)
                assert update.over_ranks["max_attention_logit"] == float(seen[-1].by_head.max())
                if len(seen) == 1:
                    changed = {n for n, p in parts[0].named_parameters() if not torch.equal(p, before[n])}
    first, second = (one.by_head for one in seen)
    assert len(first) == model.num_layers and 0 < (first[0] > limit).sum() < len(first[0])
    # The first layer reads the same embeddings in both steps; deeper ones read what it has changed.
    kept = first[0] <= limit
    assert second[0].tolist() == pytest.approx(first[0].clamp_max(limit).tolist(), rel=1e-12)
    assert torch.equal(second[0][kept], first[0][kept])
    queries = "q_proj" if model.attention.q_lora_rank is None else "q_b_proj"
    own = {"kv_b_proj" if model.attention.kind == "mla" else "k_proj"}
    shared = model.attention.num_kv_heads < model.attention.num_heads
    assert {name.split(".")[-2] for name in changed} == {queries} | (set() if shared else own)


def test_rows_of_gates_stay() -> None:
    module = GroupedQueryAttention(GATED, 0, BackendConfig())
    torch.nn.init.normal_(module.q_proj.weight)
    before = module.q_proj.weight.detach().clone().unflatten(0, (-1, 2, module.head_dim))
    qk_clip.clip_logits(qk_clip.LargestLogits([module], torch.tensor([[4.0, 1.0]])), 2.0)
    after = module.q_proj.weight.detach().unflatten(0, before.shape[:3])
    assert torch.equal(after[0, 0], before[0, 0] * 0.5) and torch.equal(after[1], before[1])
    assert torch.equal(after[0, 1], before[0, 1])


@pytest.mark.parametrize(("biased", "limit"), [(False, 2.0), (True, 0.3)])
def test_queries_and_keys_of_heads_with_their_own_share_the_factor(biased: bool, limit: float) -> None:
    """W_q <- gamma^(1/2) W_q, W_k <- gamma^(1/2) W_k, head by head (arXiv 2507.20534, section 2.1)."""
    attention = replace(MODELS["mixtral"].attention, num_heads=3, num_kv_heads=3, qkv_bias=biased)
    module = GroupedQueryAttention(replace(MODELS["mixtral"], attention=attention), 0, BackendConfig()).double()
    largest = [4.0, 1.0, 0.5]
    before = {name: torch.nn.init.normal_(one).detach().clone() for name, one in module.named_parameters()}
    qk_clip.clip_logits(qk_clip.LargestLogits([module], torch.tensor([largest], dtype=torch.float64)), limit)
    for name, after in module.named_parameters():
        for head, logit in enumerate(largest):
            rows = slice(head * module.head_dim, (head + 1) * module.head_dim)
            factor = min(1.0, limit / logit) ** 0.5 if name.startswith(("q_", "k_")) else 1.0
            torch.testing.assert_close(after[rows], before[name][rows] * factor, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model=small_qwen3_moe"], "norms of queries and keys"),
        (["lora.rank=4", "model.hf_path=x"], "LoRA freezes"),
        (["train.compile=true"], "train.compile=false"),
        (["optim.master_weights=stochastic", "train.dtype=bfloat16"], "optim.master_weights=float32"),
        (["kernels.attention=flex"], " kernels.attention=sdpa"),
        (["train.freeze=['*.q_b_proj.*']"], "train.freeze may freeze"),
        (["parallel.context=ring", "mesh.cp=2", "data.document_mask=false"], " parallel.context=gather"),
    ],
)
def test_where_it_cannot_act_it_is_refused(overrides: list[str], said: str) -> None:
    given = ["model=small_dsv3", "optim.qk_clip=100", *overrides]
    with pytest.raises(ConfigError, match=said) as error:
        validate(quick_config(overrides=given), 4, "cuda")
    assert error.value.key == "optim.qk_clip"
