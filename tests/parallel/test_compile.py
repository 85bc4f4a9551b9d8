"""``train.compile``: the same numbers, whole graphs, one of each for all layers, none made again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from compile_cases import Compiled, compiled_by, run_compiled
from recompute_cases import SEQ_LEN, STEPS, batches, make_config, world_size
from torch._dynamo.utils import counters

from automoe.comm.tokens import MicroBatch
from automoe.config.schema import Config, ModelConfig, RouterConfig
from automoe.model.decoder import Decoder
from automoe.parallel.choices import build_backend
from automoe.parallel.parallelize import build_decoder
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.gpu import one_rank
from tests.support.toys import DEEPSEEK, QWEN3, VOCAB
from tests.support.trajectories import run_trajectory

# Inductor's graphs, operation by operation: what it would make kernels of, without the time that takes.
BACKEND = "aot_eager_decomp_partition"
# Operations in another order round otherwise: 4e-14 and 6e-6 at most were seen in gradients.
FLOAT64, FLOAT32 = 1e-10, 1e-5


def compiled(config: Config) -> Config:
    return replace(config, train=replace(config.train, compile=True))


def run(
    ranks: RankPool, config: Config, steps: int = STEPS, backend: str = BACKEND, forced=None
) -> tuple[Trajectory, list[Compiled]]:
    results = ranks.run(run_compiled, world_size(config), compiled(config), batches, steps, backend, forced=forced)
    return merge_trajectories([trajectory for trajectory, _ in results]), [facts for _, facts in results]


def check(got: Trajectory, expected: Trajectory, tolerance: float) -> None:
    different = [c for c in compare_trajectories(got, expected) if not c.within(tolerance)]
    assert not different, f"{len(different)} differ, first: {different[0]}"


# Graphs: attention with its norms, and again for layers of another kind; score, select, topk_probs and count of the
# router; dense and shared FFN, whose widths differ; the last norm; the loss.
EVERYTHING = ["core_attn", "mlp", "moe", "shared_experts"]
ONE_LAYER = replace(DEEPSEEK, num_layers=1, first_k_dense=0)
# The second layer alone sees whole rows.
WINDOWS = replace(
    QWEN3, num_layers=2, attention=replace(QWEN3.attention, sinks=True, full_attention_interval=2, sliding_window=5)
)
DELTA_NET = replace(
    QWEN3,
    num_layers=2,
    norm_eps=1e-2,
    attention=replace(
        QWEN3.attention,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=4,
    ),
)
# An all-reduce in the compiled part, in both passes.
OVER_HEADS = replace(QWEN3, num_layers=1, attention=replace(QWEN3.attention, qk_norm_over_heads=True, clip_qkv=0.8))
# Projections around the experts, and norms of what attention, experts and the feed-forward give.
LATENT = replace(QWEN3, num_layers=1, moe_latent_size=8, post_norm_eps=1e-2)
# A pair of layers, whose dense FFNs are alike; a third of the experts pass tokens on.
PAIR = replace(
    ONE_LAYER,
    num_layers=2,
    shared_intermediate_size=ONE_LAYER.intermediate_size,
    moe_shortcut=True,
    attention=replace(DEEPSEEK.attention, scale_latents=True),
    router=RouterConfig(norm_topk_prob=False, expert_bias=True, num_zero_experts=4),
)


def in_8_bits(config: Config) -> Config:
    return replace(config, moe=replace(config.moe, dispatch_dtype="fp8"))


CASES = {  # name: what is run, graphs
    "recompute": (make_config(replace(DEEPSEEK, num_layers=3), rows=2, recompute=EVERYTHING), 9),
    # attention of a module's own class, a loss that also counts hits, and rows that travel in 8 bits
    "modules": (in_8_bits(make_config(replace(DEEPSEEK, num_layers=2, num_mtp_layers=1), dict(tp=2, ep=2), 4)), 11),
    "tp2-ep2-windows-full": (make_config(WINDOWS, dict(tp=2, ep=2), 4, recompute="full"), 8),
    "cp2-ep2-recompute": (make_config(ONE_LAYER, dict(cp=2, ep=2), 4, recompute=EVERYTHING), 8),
    "cp2-ep2-ulysses": (make_config(ONE_LAYER, dict(cp=2, ep=2), 4, context="ulysses", recompute=EVERYTHING), 8),
    "delta-net-cp2": (make_config(DELTA_NET, dict(cp=2, ep=2), 4, context="ulysses"), 8),
    "delta-net": (make_config(DELTA_NET, rows=2), 8),
    "tp2-norms-over-heads": (make_config(OVER_HEADS, dict(tp=2, ep=2), 4), 7),
    "tp2-ep2-pair": (make_config(PAIR, dict(tp=2, ep=2), 4), 8),
    "tp2-ep2-latent": (make_config(LATENT, dict(tp=2, ep=2), 4), 7),
    "interleaved": (make_config(QWEN3, dict(pp=2), 2, schedule="Interleaved1F1B", stages_per_rank=2), None),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("config", "graphs"), CASES.values(), ids=CASES)
def test_compiled_layers_train_like_eager_ones(ranks: RankPool, config: Config, graphs: int | None) -> None:
    """Three steps with other numbers of tokens at every expert; the second and third compile nothing."""
    whole_batch = replace(make_config(config.model), data=config.data, moe=config.moe)
    [reference] = ranks.run(run_trajectory, 1, whole_batch, batches, STEPS)
    got, facts = run(ranks, config)
    check(got, reference, FLOAT64)
    counts = got.expert_counts
    assert not torch.equal(counts[0], counts[1]) and not torch.equal(counts[1], counts[2])
    assert [rank.breaks for rank in facts] == [0] * len(facts)
    if graphs is None:  # stages have some of them
        assert all(4 < rank.graphs <= 7 for rank in facts)
    else:
        assert [rank.graphs for rank in facts] == [graphs] * len(facts)


@pytest.mark.exhaustive
def test_inductor_in_float32(ranks: RankPool) -> None:
    """The first step of the backend that runs are compiled with, its routing that of the eager run."""
    model = replace(QWEN3, num_layers=1)

    def float32(config: Config) -> Config:
        moe = replace(config.moe, experts="grouped_mm")
        return replace(config, moe=moe, train=replace(config.train, dtype="float32"))

    reference = float32(make_config(model))
    [expected] = ranks.run(run_trajectory, 1, reference, batches, 1, record=True)
    got, facts = run(ranks, float32(make_config(model, rows=4)), 1, "inductor", expected.choices)
    compared = [c for c in compare_trajectories(got, expected) if c.kind != "updated parameter"]
    different = [c for c in compared if not c.within(FLOAT32)]  # Adam makes a step of any rounding near zero
    assert not different, f"{len(different)} of {len(compared)} differ, first: {different[0]}"
    assert all(rank.breaks == 0 for rank in facts)


@pytest.mark.exhaustive
def test_a_process_may_run_other_dtypes_too() -> None:
    """As a verification does. Two kinds of layers, of both some recomputed, take half of torch's limit for each dtype."""
    torch.compiler.reset()
    windows = replace(WINDOWS, num_layers=4)
    config = compiled(make_config(windows, recompute=["core_attn"], recompute_layers=[0, 1]))
    losses = []
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own: other tests may have raised it
        for dtype in ("float64", "float32", "bfloat16"):
            run_in = replace(config, train=replace(config.train, dtype=dtype))
            with one_rank("cpu"), compiled_by("eager"):
                losses += run_trajectory(run_in, batches, 1, keep_tensors=False).losses
    torch.compiler.reset()
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-2)


@contextmanager
def compiled_decoder(model: ModelConfig, backend: str) -> Iterator[Decoder]:
    """Layers of ``model``, compiled, from an empty cache."""
    torch.compiler.reset()
    counters.clear()
    config = compiled(make_config(model))
    with compiled_by(backend):
        runtime = build_backend(config)
        made = build_decoder(config.model, config.moe, torch.float64, backend=runtime).to_empty(device="cpu")
    for _, layer in made.moe_layers():
        layer.router.reset_buffers()
        layer.router.load.reset_buffers()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch._dynamo.config.patch(error_on_recompile=False):
        yield made
    torch.compiler.reset()


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    with compiled_decoder(replace(QWEN3, num_layers=2), BACKEND) as made:
        yield made


@pytest.mark.parametrize("model", [ONE_LAYER, replace(QWEN3, num_layers=1)], ids=["latents", "heads"])
def test_every_release_of_torch_traces_attention_whole(model: ModelConfig) -> None:
    """``make smoke-floor`` and ``make smoke-latest`` run it too; that nothing breaks is all that it shows."""
    tokens = torch.randint(0, VOCAB, (1, SEQ_LEN))
    with compiled_decoder(model, "eager") as decoder:
        decoder(batch=MicroBatch(tokens, labels=tokens, doc_ids=torch.zeros_like(tokens))).sum().backward()
        assert counters["stats"]["unique_graphs"] > 0


def test_training_and_evaluation_are_compiled_once_each(decoder) -> None:
    tokens = torch.randint(0, VOCAB, (2, SEQ_LEN))
    one_document, two = torch.zeros_like(tokens), (torch.arange(SEQ_LEN) > 5).long().repeat(2, 1)

    def train_and_evaluate(doc_ids: torch.Tensor) -> None:
        decoder.train()(batch=MicroBatch(tokens, labels=tokens, doc_ids=doc_ids)).sum().backward()
        with torch.no_grad():
            decoder.eval()(batch=MicroBatch(tokens, labels=tokens, doc_ids=doc_ids))

    train_and_evaluate(two)
    made = counters["stats"]["unique_graphs"]
    # Every graph is needed with and without gradients, but evaluation counts no load.
    assert made == 2 * 7 - 1
    torch._dynamo.config.error_on_recompile = True
    for doc_ids in (one_document, two):  # of one document a row attention would need no mask
        train_and_evaluate(doc_ids)
    assert counters["stats"]["unique_graphs"] == made
    with pytest.raises(torch._dynamo.exc.RecompileError):  # other shapes would be seen
        decoder(batch=MicroBatch(tokens[:, :-2], labels=tokens[:, :-2]))


def test_a_graph_break_is_an_error(decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    monkeypatch.setattr("automoe.model.norm.RMSNorm.forward", broken)
    tokens = torch.randint(0, VOCAB, (2, SEQ_LEN))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        decoder(batch=MicroBatch(tokens, labels=tokens))
