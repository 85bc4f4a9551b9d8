"""Recomputed layers train like kept ones: the same numbers on every mesh, nothing counted twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import recompute_cases as cases
import torch
from recompute_cases import STEPS, batches, make_config, run_with_fault, world_size
from torch.utils.checkpoint import CheckpointError

from automoe.comm.tokens import MicroBatch
from automoe.config.recompute import DISCARDED_OUTPUTS, MODULES
from automoe.config.schema import Config, ModelConfig
from automoe.model.backend import BackendConfig
from automoe.parallel.choices import build_backend, layer_calls
from automoe.parallel.parallelize import build_decoder
from automoe.passes.activation_checkpoint import Recomputed
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankError, RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.toys import DEEPSEEK, QWEN3
from tests.support.trajectories import differences, run_trajectory

TOLERANCE = 1e-10
INTERLEAVED = dict(schedule="Interleaved1F1B", stages_per_rank=2)
PER_MICRO_BATCH = dict(reshard="micro_batch", grad_sync="micro_batch")
DROPPING = dict(capacity_factor=1.0, drop_scope="sequence")

EVERYTHING = [name for name in MODULES if name != "moe_act"]  # which grouped_mm and triton always do
DISCARDED = list(DISCARDED_OUTPUTS)
CASES = [
    # one rank: each region, accumulation, some of the layers
    *(make_config(DEEPSEEK, rows=2, recompute=[name]) for name in EVERYTHING),
    make_config(DEEPSEEK, rows=2, recompute="full"),
    make_config(DEEPSEEK, rows=2, recompute=EVERYTHING, recompute_layers="every 2"),
    make_config(DEEPSEEK, rows=2, recompute="full", recompute_layers=[0, 3]),
    # experts elsewhere, weights freed after each micro-batch or kept for the step
    *(
        make_config(DEEPSEEK, dict(dp_shard=2, ep=2), 2, recompute=names, **policy)
        for names in (["moe"], EVERYTHING, "full")
        for policy in (dict(), PER_MICRO_BATCH)
    ),
    make_config(QWEN3, dict(dp_shard=2, ep=2), 2, dict(dispatcher="allgather"), recompute=["moe"]),
    make_config(QWEN3, dict(dp_shard=2, ep=2), 2, dict(dispatcher="allgather"), recompute="full"),
    make_config(QWEN3, dict(dp_replicate=2, dp_shard=2, ep_shard=4), 1, recompute="full", **PER_MICRO_BATCH),
    # several micro-batches in flight
    make_config(DEEPSEEK, dict(pp=2), 2, recompute=EVERYTHING),
    make_config(DEEPSEEK, dict(pp=2), 2, recompute="full"),
    make_config(QWEN3, dict(pp=2), 2, recompute="full", schedule="GPipe"),
    make_config(QWEN3, dict(pp=2, dp_shard=2, ep=2), 1, recompute=["core_attn", "moe"], **INTERLEAVED),
    make_config(QWEN3, dict(pp=2, dp_shard=2, ep=2), 1, recompute="full", **INTERLEAVED),
    make_config(DEEPSEEK, dict(pp=2, dp_shard=2, ep=2), 2, recompute=DISCARDED),
    make_config(DEEPSEEK, dict(pp=2, dp_shard=2, ep=2), 1, recompute=DISCARDED, **INTERLEAVED),
    make_config(DEEPSEEK, dict(dp_shard=2), 2, recompute=DISCARDED, **PER_MICRO_BATCH),
    # collectives inside the regions
    make_config(DEEPSEEK, dict(cp=2), 4, recompute=EVERYTHING),
    make_config(QWEN3, dict(cp=2, ep=2), 4, recompute="full"),
    make_config(DEEPSEEK, dict(tp=2, ep=2), 4, recompute=EVERYTHING),
    make_config(DEEPSEEK, dict(tp=2, ep=2), 4, recompute="full"),
    make_config(QWEN3, dict(tp=2, etp=2), 4, recompute=["core_attn", "moe"]),
    make_config(QWEN3, dict(tp=2, ep=2), 4, recompute=["layernorm"]),
    make_config(DEEPSEEK, dict(tp=2, cp=2, ep=2), 4, recompute=DISCARDED),
    make_config(QWEN3, dict(dp_shard=2, tp=2, ep=2, etp=2), 4, recompute="full"),
    # choices dropped, experts padded
    make_config(DEEPSEEK, dict(cp=2, ep=2), 4, DROPPING, recompute="full"),
    make_config(DEEPSEEK, dict(dp_shard=2, ep=2), 2, DROPPING | dict(pad_to_capacity=True), recompute=["moe"]),
]


def name_of(config: Config) -> str:
    mesh = {axis: size for axis, size in vars(config.mesh).items() if size not in (1, -1)}
    parallel = {key: value for key, value in vars(config.parallel).items() if value != vars(Config().parallel)[key]}
    moe = {key: value for key, value in vars(config.moe).items() if key in (*DROPPING, "pad_to_capacity") and value}
    words = [config.model.family, *(f"{k}{v}" for k, v in mesh.items()), config.moe.dispatcher, *moe]
    words += [str(value).replace("'", "").replace(" ", "") for value in parallel.values()]
    return "-".join(words)


def run(pool: RankPool, config: Config, steps: int = STEPS) -> Trajectory:
    return merge_trajectories(pool.run(run_trajectory, world_size(config), config, batches, steps))


@pytest.fixture(scope="module")
def reference(ranks: RankPool) -> Callable[[Config], Trajectory]:
    """The same model on one rank, the batch at once, nothing recomputed."""
    runs: dict[str, Trajectory] = {}

    def get(config: Config) -> Trajectory:
        dropping = {key: vars(config.moe)[key] for key in DROPPING} if config.moe.capacity_factor else {}
        key = f"{config.model.family} {dropping}"
        if key not in runs:
            runs[key] = run(ranks, make_config(config.model, moe=dropping))
        return runs[key]

    return get


@pytest.mark.one_in(36)
@pytest.mark.parametrize("config", CASES, ids=name_of)
def test_recomputed_layers_train_like_kept_ones(ranks: RankPool, reference, config: Config) -> None:
    got, expected = run(ranks, config), reference(config)
    different = differences(got, expected, TOLERANCE)
    assert not different, f"{len(different)} differ, first: {different[0]}"
    for counts, theirs in zip(got.expert_counts, expected.expert_counts, strict=True):
        assert torch.equal(counts, theirs)
    assert got.biases.keys() == expected.biases.keys()
    assert all(torch.equal(bias, expected.biases[name]) for name, bias in got.biases.items())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recompute", "mesh"),
    list(product([EVERYTHING, "full"], [dict(pp=2), {}, dict(dp_shard=2, ep=2)])),
    ids=map(str, list(product([EVERYTHING, "full"], [dict(pp=2), {}, dict(dp_shard=2, ep=2)]))),
)
def test_bfloat16_is_equal_to_the_bit(ranks: RankPool, recompute: list[str] | str, mesh: dict[str, int]) -> None:
    """Rounding is the same the second time, and no top-k flips: the router's unit and its weight are wide."""
    config = make_config(DEEPSEEK, mesh, 2)
    config = replace(
        config, moe=replace(config.moe, experts="grouped_mm"), train=replace(config.train, dtype="bfloat16")
    )
    again = replace(config, parallel=replace(config.parallel, recompute=recompute))
    kept, recomputed = run(ranks, config), run(ranks, again)
    assert len(kept.gradients[0]) == len(kept.parameters) > 40
    different = [c for c in compare_trajectories(recomputed, kept) if c.error != 0]
    assert not different, str(different[0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", [{}, dict(pp=2, dp_shard=2)], ids=str)
def test_outputs_made_otherwise_the_second_time_are_seen(ranks: RankPool, reference, mesh: dict[str, int]) -> None:
    config = make_config(DEEPSEEK, mesh, 2, recompute=DISCARDED)
    size = world_size(config)
    broken = ranks.run(run_with_fault, size, config, batches, STEPS, cases.made_otherwise_again)
    found = differences(merge_trajectories(broken), reference(config), TOLERANCE)
    wrong = {c.name for c in found if c.kind == "gradient" and c.step == 0}
    for part in ("self_attn.kv_a_proj_with_mqa", "self_attn.o_proj", "mlp.router", "mlp.experts.gate_up_proj"):
        assert any(part in name for name in wrong), f"{part}: {sorted(wrong)}"
    assert not any(c.kind == "loss" and c.step == 0 for c in found), "the forward pass was right"


FULL = make_config(DEEPSEEK, rows=2, recompute="full")
STAGES = make_config(DEEPSEEK, dict(pp=2), 2, recompute="full")


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [FULL, STAGES], ids=name_of)
def test_tokens_counted_again_are_seen(ranks: RankPool, reference, config: Config) -> None:
    broken = ranks.run(run_with_fault, world_size(config), config, batches, STEPS, cases.counted_again)
    found = differences(merge_trajectories(broken), reference(config), TOLERANCE)
    assert found and (found[0].step, found[0].kind) == (0, "seq_balance_loss"), str(found[:1])
    assert any(c.kind == "expert counts" and c.step == 0 for c in found)
    assert not differences(run(ranks, config), reference(config), TOLERANCE), "the mistake was left in"


def test_tokens_routed_otherwise_are_seen(ranks: RankPool) -> None:
    """Experts get other numbers of rows than they saved for, which torch compares."""
    with pytest.raises(RankError) as raised:
        ranks.run(run_with_fault, 1, FULL, batches, 1, cases.routed_otherwise)
    assert raised.value.kind == "CheckpointError"


def test_a_cache_that_micro_batches_share_is_seen() -> None:
    """One layer, two micro-batches in flight: the second one's choices answer for the first."""
    config = replace(FULL, model=replace(DEEPSEEK, num_layers=1, first_k_dense=0))
    tokens = torch.randint(0, cases.VOCAB, (2, 2, cases.SEQ_LEN))
    with cases.results_shared_by_all_micro_batches():
        model = decoder(config)
        losses = [model(batch=MicroBatch(rows, labels=rows)).sum() for rows in tokens]
        with pytest.raises(CheckpointError):
            losses[1].backward()


def decoder(config: Config) -> torch.nn.Module:
    backend = BackendConfig(calls=partial(layer_calls, config))
    model = build_decoder(config.model, config.moe, torch.float64, backend=backend).to_empty(device="cpu")
    for _, layer in model.moe_layers():
        layer.router.reset_buffers()
        layer.router.load.reset_buffers()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def test_micro_batches_may_come_back_in_any_order() -> None:
    """Three in flight, the backward pass of the second one first."""
    rows = [torch.randint(0, cases.VOCAB, (2, cases.SEQ_LEN + 1)) for _ in range(3)]
    gradients = []
    for config, order in ((make_config(DEEPSEEK), (0, 1, 2)), (FULL, (1, 0, 2))):
        model = decoder(config)
        losses = [model(batch=MicroBatch(tokens[:, :-1], labels=tokens[:, 1:])).sum() for tokens in rows]
        for i in order:
            losses[i].backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, kept in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], kept, rtol=1e-10, atol=1e-12, msg=name)


def test_a_backward_pass_may_be_repeated() -> None:
    model = decoder(FULL)
    tokens = torch.randint(0, cases.VOCAB, (2, cases.SEQ_LEN))
    loss = model(batch=MicroBatch(tokens, labels=tokens)).sum()
    loss.backward(retain_graph=True)
    first = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * first[name], rtol=1e-12, atol=0, msg=name)


def test_nothing_of_a_micro_batch_outlives_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref] = []

    def watched():
        contexts = cases.recompute_contexts()
        made.append(weakref.ref(contexts[1]))
        return contexts

    monkeypatch.setattr("automoe.passes.activation_checkpoint.recompute_contexts", watched)
    model = decoder(FULL)
    tokens = torch.randint(0, cases.VOCAB, (2, cases.SEQ_LEN))
    loss = model(batch=MicroBatch(tokens, labels=tokens)).sum()
    gc.collect()
    assert len(made) == DEEPSEEK.num_layers and all(ref() is not None for ref in made)
    loss.backward()
    del loss
    gc.collect()
    assert not any(ref() for ref in made)


def test_evaluation_keeps_and_counts_nothing() -> None:
    model = decoder(FULL)
    tokens = torch.randint(0, cases.VOCAB, (2, cases.SEQ_LEN))
    with torch.no_grad():
        logits = model.eval()(tokens)
    assert not logits.requires_grad
    torch.testing.assert_close(logits, decoder(make_config(DEEPSEEK)).eval()(tokens), rtol=0, atol=0)
    assert all(not layer.router.load.totals.any() for _, layer in model.moe_layers())


def regions(model: ModelConfig, **parallel: object) -> dict[str, list[str]]:
    """{layer: where its regions are}."""
    found: dict[str, list[str]] = {}
    for layer, block in decoder(make_config(model, **parallel)).layers.items():
        found[layer] = [
            f"{name}.{key}".strip(".")
            for name, module in block.named_modules()
            for key, value in vars(module).items()
            if isinstance(getattr(value, "__func__", value), Recomputed)
        ]
    return found


def test_regions_are_where_the_configuration_says() -> None:
    dense = ["call_mlp", "self_attn.core_attention"]
    routed = ["self_attn.core_attention", "mlp.wrapped_run_experts", "mlp.call_shared_experts"]
    assert regions(DEEPSEEK) == {"0": [], "1": [], "2": [], "3": []}
    assert regions(DEEPSEEK, recompute=EVERYTHING) == {"0": dense, "1": routed, "2": routed, "3": routed}
    assert regions(DEEPSEEK, recompute="full", recompute_layers="every 2") == {
        "0": ["wrapped_run"],
        "1": [],
        "2": ["wrapped_run"],
        "3": [],
    }
    assert regions(DEEPSEEK, recompute=["mlp", "shared_experts"], recompute_layers=[0, 1]) == {
        "0": ["call_mlp"],
        "1": ["mlp.call_shared_experts"],
        "2": [],
        "3": [],
    }


def test_a_whole_layer_keeps_its_shared_experts_on_its_own_stream() -> None:
    config = make_config(DEEPSEEK, recompute="full", recompute_layers=[2])
    layers = build_decoder(config.model, config.moe, torch.float32, backend=build_backend(config)).moe_layers()
    assert [layer.side_stream for _, layer in layers] == [True, False, True]
    assert config.moe.overlap_shared_experts
