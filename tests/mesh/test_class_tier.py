"""Classes of transformers without a native family: on meshes as in one process, and as transformers computes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import automoe
from automoe.classes.model import TransformersModel, _is_expert_table, longest_span
from automoe.comm.tokens import MicroBatch
from automoe.config.batch import plan_batch
from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.schema import Config, LoraConfig, MeshConfig, MoEConfig, OptimConfig, ParallelConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.hf.families.registry import FAMILIES, model_config_from_hf
from automoe.hf.read import Loaded, load_hf
from automoe.hf.write import to_hf
from automoe.model.causal_lm import CausalLM
from automoe.model.decoder import Decoder
from automoe.model.init import default_dtype
from automoe.model.params import count_params
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.passes.trace import training_pass
from automoe.planner.memory import plan_memory
from automoe.planner.reserve import not_modelled
from automoe.run.weights import load_or_initialize
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankError, RankPool
from automoe.verify.run import loader_rows, make_runnable, passes, verify_pass
from automoe.verify.trajectory import merge_trajectories, run_trajectory
from tests.support.class_models import (
    MORE,
    AllInFloat64,
    against_class,
    float64_of,
    hf_class_config,
    lacks,
    run_config,
    save_class,
    tier_config,
    trajectory_in_float64,
)
from tests.support.memory import measure_step

CPU = torch.device("cpu")
# Routers by softmax and by sigmoid, a tied head with a factor, delta nets, latents, shared experts, other names.
CLASSES = ["olmoe", "minimax_m2", "cohere2_moe", "qwen3_5_moe_text", "glm4_moe_lite", "granitemoe", "ernie4_5_moe"]
CLASSES += ["gemma4_text", "deepseek_v4"]  # a soft cap of logits; experts by token id
WIDE = {
    "gemma4_text",
    "llama4_text",
    "ernie4_5_moe",
    "minimax_m2",
    "glm4_moe_lite",
    "cohere2_moe",
    "qwen3_5_moe_text",
}  # compute parts in float32
MESHES = {
    "ep2_ep_shard2": MeshConfig(dp_shard=4, ep=2, ep_shard=2),
    "hsdp_ep2_ep_replicate2": MeshConfig(dp_replicate=2, dp_shard=2, ep=2, ep_replicate=2),
    "ep4": MeshConfig(dp_shard=4, ep=4),
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    class Saved(dict):
        def __missing__(self, model_type: str) -> Path:
            self[model_type] = tmp_path_factory.mktemp(model_type)
            save_class(model_type, self[model_type])
            return self[model_type]

    yield Saved()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("model_type", CLASSES, ids=str)
def test_loss_and_gradients_are_those_of_the_class(saved: dict[str, Path], model_type: str) -> None:
    with training_pass():
        ours, worst = against_class(tier_config(saved[model_type]))
    assert worst <= (1e-6 if model_type in WIDE else 1e-12)
    counts = torch.stack([layer.router.load.totals[:8] for _, layer in ours.moe_layers()])
    assert counts.sum() == 24 * 2 * len(counts)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"], ids=str)
def test_native_families_train_to_the_same_losses(saved: dict[str, Path], model_type: str) -> None:
    path = saved[model_type]
    model = model_config_from_hf(path)
    assert model.family == model_type
    with default_dtype(torch.float64):
        native: CausalLM = Decoder(model, MoEConfig(experts="loop"))
    load_hf(native, path)
    rows = torch.randint(300, (4, 2, 13), generator=torch.Generator().manual_seed(2))
    with AllInFloat64():
        ours, _ = float64_of(tier_config(path))
    losses = []
    for part in (native, ours):
        optimizer = build_optimizer([part], OptimConfig(lr=1e-2), 0, None)
        for tokens in rows:
            with AllInFloat64():
                loss = part(batch=MicroBatch(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-10)
    assert abs(losses[0] - losses[3]) > 1e-3


@pytest.mark.parametrize(
    ("model_type", "mesh"),
    [
        pytest.param(model_type, mesh, marks=() if i == j == 0 else pytest.mark.exhaustive)
        for i, model_type in enumerate(CLASSES[:4])
        for j, mesh in enumerate(MESHES)
    ],
)
def test_meshes_compute_the_step_of_one_process(
    ranks: RankPool, saved: dict[str, Path], model_type: str, mesh: str
) -> None:
    config = run_config(saved[model_type], MESHES[mesh])
    one = MeshConfig(dp_shard=1, ep_shard=1)
    alone = replace(config, mesh=one, train=replace(config.train, micro_batch_size=8))
    [expected] = ranks.run(run_trajectory, 1, alone, MeshShape.of(one), loader_rows, 1)
    found = merge_trajectories(ranks.run(run_trajectory, 4, config, resolve_mesh(config.mesh, 4), loader_rows, 1))
    tolerance = 1e-6 if model_type in WIDE else 1e-10
    assert not [one for one in compare_trajectories(found, expected) if not one.within(tolerance)]
    assert expected.expert_counts[0].sum() == 8 * 24 * 2 * config.model.num_moe_layers


def load_and_write(path: Path, mesh: MeshConfig, out: Path) -> tuple[Loaded, int, str]:
    config = replace(run_config(path, mesh, dtype="float32"), model=tier_config(path))
    parts = build_parts(config, build_meshes(resolve_mesh(mesh, None), torch.device("cpu")))
    for part in parts.values():
        part.to_empty(device="cpu")
        for parameter in part.parameters():
            torch.nn.init.constant_(parameter, float("nan"))  # nothing may be left unread
    loaded = load_hf(parts, path)
    written = to_hf(parts, out, tokenizer="byte")
    held = sum(one.to_local().numel() for one in parts[0].parameters())
    return loaded, held, str(written)


# What is written is read again by its model_type, in the native family if there is one.
STREAMED = ["flex_olmo", "solar_open", "inkling2_text", *(name for name in CLASSES if name not in FAMILIES)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", STREAMED, ids=str)
def test_published_files_stream_into_the_shards_and_back(
    ranks: RankPool, saved: dict[str, Path], model_type: str, tmp_path: Path
) -> None:
    """``to_hf`` compares every number and, through transformers, the logits of what it wrote."""
    path = saved[model_type]
    mesh = MESHES["ep2_ep_shard2"]
    found = ranks.run(load_and_write, 4, path, mesh, tmp_path / "out")

    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        with safe_open(folder / "model.safetensors", "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}

    written = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            written |= {key: opened.get_tensor(key) for key in opened.keys()}
    expected = tensors(path)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in expected)
    loaded, _, said = found[0]
    size = sum(tensor.nbytes for tensor in expected.values())
    # Each rank reads its shards, and not the layer; whole rows are read where columns cost little.
    assert size <= loaded.bytes_read < 1.6 * size
    assert max(held for _, held, _ in found) < 0.3 * size / 4
    assert "logits" in said


def test_the_function_of_the_package_gives_the_logits_of_the_class(saved: dict[str, Path]) -> None:
    _, theirs = float64_of(tier_config(saved["flex_olmo"]))
    tokens = torch.randint(300, (2, 13), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = automoe.from_hf(saved["flex_olmo"], dtype=torch.float64)(tokens)
        torch.testing.assert_close(found, theirs.eval()(tokens, use_cache=False).logits, rtol=0, atol=1e-12)


# llama4_text does not name the module of its layers
@pytest.mark.parametrize("model_type", ["dbrx", "qwen2", "llama4_text"])
def test_a_class_without_stacked_experts_is_computed_by_its_own_code(saved: dict[str, Path], model_type: str) -> None:
    """Whatever ``moe.experts`` says, by default too."""
    _, theirs = float64_of(tier_config(saved[model_type]))
    tokens = torch.randint(300, (2, 13), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = automoe.from_hf(saved[model_type], dtype=torch.float32)(tokens)
        torch.testing.assert_close(found.double(), theirs.eval()(tokens, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def test_a_table_of_experts_without_a_checkpoint_uses_all_alike(saved: dict[str, Path]) -> None:
    """Other buffers of zeros, such as BERT's token types, which no file holds, keep their values."""
    model = TransformersModel(tier_config(saved["deepseek_v4"]), MoEConfig(experts="loop"))
    tables = [module for module in model.modules() if hasattr(module, "tid2eid")]
    assert tables
    for module in tables:
        module.to_empty(device="cpu")
        module.reset_buffers()
        assert all(len(set(row)) == len(row) for row in module.tid2eid.tolist())
        counts = module.tid2eid.flatten().bincount(minlength=8)
        assert counts.max() - counts.min() <= 1
        assert _is_expert_table(model._class[0], module, "_buffers", "tid2eid")
        module.register_buffer("token_type_ids", torch.zeros_like(module.tid2eid), persistent=False)
        module.register_buffer("position_ids", torch.zeros(1, 8, dtype=torch.int64))
        for name in ("token_type_ids", "position_ids"):
            assert not _is_expert_table(model._class[0], module, "_buffers", name)


def test_the_table_of_parameters_is_the_class(saved: dict[str, Path]) -> None:
    path = saved["qwen3_5_moe_text"]
    _, theirs = float64_of(tier_config(path))
    counted = count_params(tier_config(path))
    experts = sum(p.numel() for name, p in theirs.named_parameters() if ".experts." in name)
    assert counted.total == sum(p.numel() for p in theirs.parameters())
    assert counted.by_part["routed_experts"] == experts
    assert counted.active == counted.total - experts * 6 // 8


@pytest.mark.exhaustive
def test_verification_compares_a_class_in_float64_alone(ranks: RankPool, saved: dict[str, Path]) -> None:
    config = run_config(saved["olmoe"], MESHES["ep4"], dtype="bfloat16")
    here, shape, cuts = make_runnable(config)
    assert cuts == []
    [exact] = passes(here)
    result = verify_pass(exact, shape, ranks)
    assert exact.train.dtype == "float64" and result.different == []
    assert result.tolerance == 1e-6  # its router has a softmax in float32
    assert sum(one.kind == "gradient" for one in result.compared) > 30


def test_a_class_too_large_to_verify_is_refused(saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automoe.verify.run.MAX_PARAMETERS", 1000)
    with pytest.raises(ConfigError, match=r"OlmoeForCausalLM has 140,\d+ parameters, .* holds up to 1,000"):
        make_runnable(run_config(saved["olmoe"], MESHES["ep4"]))


PLANNED = ["flex_olmo", "granitemoe", "dots1", "ernie4_5_moe", "phimoe", "nemotron_h", "olmoe", "minimax_m2"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [MeshConfig(dp_shard=1), MeshConfig(dp_shard=2, ep=2)], ids=["one", "ep2"])
@pytest.mark.parametrize("recompute", [[], "full"])
@pytest.mark.parametrize("model_type", PLANNED)
def test_the_plan_of_a_class_is_within_a_tenth(
    ranks: RankPool, allocator: Path, tmp_path: Path, model_type: str, recompute: list[str] | str, mesh: MeshConfig
) -> None:
    wide = dict(hidden_size=256, moe_intermediate_size=128, intermediate_size=256, vocab_size=1024, head_dim=64)
    hf_class_config(model_type, num_hidden_layers=4, **wide).save_pretrained(tmp_path / "model")
    config = run_config(
        tmp_path / "model", mesh, dtype="float32", seq_len=256, micro_batch_size=2, global_batch_size=16
    )
    config = replace(
        config, parallel=ParallelConfig(recompute=recompute), moe=replace(config.moe, experts="grouped_mm")
    )
    shape = validate(config, None)
    [planned] = plan_memory(config, shape, plan_batch(config, shape))
    assert not list(not_modelled(config, shape, plan_batch(config, shape)))
    for rank in ranks.run(measure_step, shape.world_size, config, allocator):
        assert planned.peak == pytest.approx(rank["step"], rel=0.1)


@pytest.mark.exhaustive
def test_the_plan_says_which_class_it_cannot_count(tmp_path: Path) -> None:
    hf_class_config("glm5_next").save_pretrained(tmp_path)
    config = run_config(tmp_path, MeshConfig(dp_shard=1))
    shape = validate(config, None)
    [said] = not_modelled(config, shape, plan_batch(config, shape))
    assert "counted as native layers this wide, because its code needs numbers" in said


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda x: x[x > 0], "because its code needs numbers"),
        (lambda x: torch.repeat_interleave(x, x.long().flatten()), "because its code needs numbers"),
        (lambda x: x.bogus, "because its code failed without numbers: AttributeError("),
        (lambda x: x.view(-1, 7), "because its code failed without numbers: RuntimeError("),
        (lambda x: {}["width"], "because its code failed without numbers: KeyError('width')"),
    ],
)
def test_the_plan_tells_a_class_that_needs_numbers_from_one_that_fails(
    fault: Callable[[torch.Tensor], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    whole = OlmoeSparseMoeBlock.forward

    def forward(self: OlmoeSparseMoeBlock, hidden_states: torch.Tensor) -> object:
        fault(hidden_states)
        return whole(self, hidden_states)

    monkeypatch.setattr(OlmoeSparseMoeBlock, "forward", forward)
    hf_class_config("olmoe").save_pretrained(tmp_path)
    config = run_config(tmp_path, MeshConfig(dp_shard=1))
    shape = validate(config, None)
    assert said in "".join(not_modelled(config, shape, plan_batch(config, shape)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["flex_olmo", "qwen3_5_moe_text", "zaya"])
def test_swiglu_experts_run_on_our_backend(saved: dict[str, Path], model_type: str) -> None:
    with AllInFloat64():
        ours, worst = against_class(tier_config(saved[model_type]), "grouped_mm")
    assert worst <= 1e-10 and ours.experts_by == "experts by automoe's grouped_mm"


def test_experts_of_another_kind_run_by_the_code_of_transformers(saved: dict[str, Path]) -> None:
    config = tier_config(saved["nemotron_h"])  # one matrix and relu squared
    made = TransformersModel(config, MoEConfig(experts="grouped_mm"))
    assert made.experts_by == "experts by transformers' own grouped_mm"
    with pytest.raises(ConfigError, match="NemotronHExperts is not SwiGLU of two stacks"):
        TransformersModel(config, MoEConfig(experts="triton"))
    with default_dtype(torch.float64), pytest.raises(ConfigError, match="has no float64"):
        TransformersModel(config, MoEConfig(experts="grouped_mm"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "lora"])
def test_our_experts_compute_on_a_mesh_what_one_process_computes(
    ranks: RankPool, saved: dict[str, Path], rank: int
) -> None:
    config = run_config(saved["flex_olmo"], MESHES["ep2_ep_shard2"])
    config = replace(config, moe=MoEConfig(experts="grouped_mm"))
    if rank:
        config = replace(config, lora=LoraConfig(rank=rank, targets=["experts"]))
    one = MeshConfig(dp_shard=1, ep_shard=1)
    alone = replace(config, mesh=one, train=replace(config.train, micro_batch_size=8))
    alone = replace(alone, moe=MoEConfig(experts="loop"))
    [expected] = ranks.run(trajectory_in_float64, 1, alone, MeshShape.of(one), loader_rows, 1)
    found = merge_trajectories(
        ranks.run(trajectory_in_float64, 4, config, resolve_mesh(config.mesh, 4), loader_rows, 1)
    )
    assert not [one for one in compare_trajectories(found, expected) if not one.within(1e-10)]


M3 = "minimax_m3_vl_text"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("model_type", "more", "row", "apart"),
    [
        ("olmoe", {}, 0, True),
        ("qwen3_5_moe_text", {}, 0, False),
        ("cohere2_moe", {}, 0, True),
        ("cohere2_moe", {"sliding_window": 40}, 0, True),
        ("minimax", {"block_size": 48}, 0, False),
        (M3, {"index_block_size": 32}, 0, False),  # blocks longer than a short probe hide in its first one
        (M3, {"index_block_size": 32}, 190, False),
        (M3, {"index_block_size": 20, "index_topk_blocks": 3}, 50, False),
        (M3, {"layer_types": ["full_attention"] * 3}, 0, True),
    ],
)
def test_documents_are_isolated_or_refused(
    tmp_path: Path, model_type: str, more: dict[str, object], row: int, apart: bool
) -> None:
    save_class(model_type, tmp_path, **more)
    for dtype in (torch.float64, torch.bfloat16):
        with default_dtype(dtype):
            ours = TransformersModel(tier_config(tmp_path), MoEConfig(experts="loop")).to_empty(device="cpu")
        load_hf(ours, str(tmp_path))
        ours.train()
        if apart:
            ours.check_isolation(row)
        else:
            with pytest.raises(ConfigError, match=r"ForCausalLM does not keep the documents .* apart"):
                ours.check_isolation(row)
        assert ours.training


def test_a_probe_is_longer_than_all_blocks_that_are_chosen() -> None:
    """Shorter rows choose all their blocks, or all compressed keys, so nothing is left out."""
    assert longest_span({"index_block_size": 8, "index_topk_blocks": 24, "sliding_window": 100}) == 192
    assert longest_span({"text": {"compress_rates": {"compressed": 4, "heavy": 32}, "index_topk": 16}}) == 512
    assert longest_span({"index_topk": 50, "linear_conv_kernel_dim": 4}) == 50


@pytest.mark.parametrize(("window", "said"), [(4096, ["2,048 positions", "4,096"]), (16, [])])
def test_a_structure_that_no_probe_holds_is_said(tmp_path: Path, window: int, said: list[str]) -> None:
    save_class("olmoe", tmp_path, other_window=window, max_position_embeddings=4096)
    ours = TransformersModel(tier_config(tmp_path), MoEConfig(experts="loop")).to_empty(device="cpu")
    load_hf(ours, str(tmp_path))
    ours.check_isolation()
    [notes] = [" ".join(ours.notes[1:])]
    assert bool(notes) == bool(said) and all(one in notes for one in said)


def test_a_run_tries_the_rows_that_it_trains(ranks: RankPool, tmp_path: Path) -> None:
    save_class(M3, tmp_path, index_block_size=300, max_position_embeddings=4096)
    config = run_config(tmp_path, MeshConfig(dp_shard=1), seq_len=2100, global_batch_size=1)
    config = replace(config, data=replace(config.data, document_mask=True))
    with pytest.raises(RankError, match="does not keep the documents .*in a row of 2100,"):
        ranks.run(first_weights_of, 1, config)


def first_weights_of(config: Config) -> None:
    load_or_initialize(build_parts(config, build_meshes(resolve_mesh(config.mesh, 1), CPU)), config, CPU)


EVERY_KIND = (
    "jamba step3p7 minimax_m3_vl_text afmoe cohere2_moe exaone_moe inkling_text qwen3_next gpt_oss minimax".split()
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model_type", EVERY_KIND)
def test_a_small_model_has_every_kind_of_layer(model_type: str) -> None:
    """Of the class's own default configuration, and blocks and windows within its rows."""
    from transformers import CONFIG_MAPPING

    if model_type in CONFIG_MAPPING:
        assert lacks(model_type) == []


@pytest.mark.parametrize(
    ("model_type", "more", "lacking"),
    [
        ("jamba", dict(num_hidden_layers=3, attn_layer_period=8, attn_layer_offset=4), "a layer with JambaAttention"),
        ("cohere2_moe", dict(sliding_window=12), "sliding_window=12 within a row of 12"),
        ("exaone_moe", dict(mlp_layer_types=["dense"] * 3), "a layer with ExaoneMoeExperts"),
    ],
)
def test_what_a_small_model_lacks_is_said(
    model_type: str, more: dict[str, object], lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MORE, model_type, MORE[model_type] | more)
    assert any(one.startswith(lacking) for one in lacks(model_type))


@pytest.mark.parametrize(
    ("key", "section", "value"),
    [(f"mesh.{axis}", "mesh", {axis: 2, "dp_shard": -1}) for axis in ("tp", "cp", "pp", "etp")]
    + [("train.fp8", "train", {"fp8": "tensorwise"}), ("lora.base", "lora", {"rank": 4, "base": "nf4"})]
    + [("optim.algorithm", "optim", {"algorithm": "muon"})],
)
def test_what_only_native_families_have_is_refused_before_ranks_start(
    saved: dict[str, Path], key: str, section: str, value: dict[str, object]
) -> None:
    config = run_config(saved["olmoe"], MeshConfig(), dtype="float32")
    config = replace(config, **{section: replace(getattr(config, section), **value)})
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}=.*OlmoeForCausalLM has no native family"):
        validate(config, 4, "cpu")


@pytest.mark.parametrize(
    ("model_type", "more", "why"),
    [
        ("flex_olmo", {"attention_dropout": 0.1}, "attention_dropout=0.1 draws random numbers"),
        ("granitemoe_swa", {"attention_dropout": 1}, "attention_dropout=1 draws random numbers"),
        ("dbrx", {"attn_config": {"kv_n_heads": 2, "attn_pdrop": 0.1}}, "attn_pdrop=0.1 draws random numbers"),
        ("flex_olmo", {"num_experts_per_tok": 9}, "a token chooses 9 experts of 8"),
        (
            "flex_olmo",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000, and a model has at least 1 and at most 10000",
        ),
        ("phimoe", {"lm_head_bias": True}, "no multiple of hidden states times the head"),
    ],
)
def test_a_class_that_does_not_serve_is_refused_by_its_part(
    tmp_path: Path, model_type: str, more: dict[str, object], why: str
) -> None:
    hf_class_config(model_type).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    with pytest.raises(ConfigError, match=re.escape(why)):
        TransformersModel(model_config_from_hf(tmp_path), MoEConfig(experts="loop"))


@pytest.mark.exhaustive
def test_balance_losses_take_the_router_logits_of_the_class(saved: dict[str, Path], ranks: RankPool) -> None:
    """The lagged loss is a multiple of transformers' own at the first step; on a mesh it is the same."""
    config = run_config(saved["olmoe"], MESHES["ep2_ep_shard2"])
    config = replace(config, moe=MoEConfig(experts="loop", seq_balance_coef=0.1, z_loss_coef=0.01))
    one = MeshConfig(dp_shard=1, ep_shard=1)
    alone = replace(config, mesh=one, train=replace(config.train, micro_batch_size=8))
    [expected] = ranks.run(run_trajectory, 1, alone, MeshShape.of(one), loader_rows, 1)
    found = merge_trajectories(ranks.run(run_trajectory, 4, config, resolve_mesh(config.mesh, 4), loader_rows, 1))
    assert not [one for one in compare_trajectories(found, expected) if not one.within(1e-10)]
    assert 0.1 < expected.seq_balance_loss[0] / config.model.num_moe_layers < 0.3  # 0.1 if all experts are alike
    assert expected.z_loss[0] > 0
