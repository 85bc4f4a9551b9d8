"""Checkpoints into and out of every kind of mesh: gradients as in ``transformers``, files as they were."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_mesh_cases import MESHES, ROWS, SEQ, config_for, load_on_mesh, stored, world_size

import automoe
from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.schema import MeshConfig
from automoe.errors import ConfigError
from automoe.hf.families.registry import family_of, model_config_from_hf
from automoe.hf.shards import Parts
from automoe.hf.write import to_hf
from automoe.launch.prepare import check
from automoe.parallel.pipeline import build_runner
from automoe.training.step import prepare_inputs
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import named_parameters, whole
from tests.support.hf_models import SMALL_MODELS, save_small_hf, text_parameters

TOLERANCE = 1e-5


def tokens_and_labels(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocab_size, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat((tokens[:, 1:], torch.full((ROWS, 1), IGNORE)), dim=1)


def train_step(path: Path, mesh: MeshConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """This rank's share of the loss, and the gradients of its stages."""
    loss, parts = forward_and_backward(path, mesh)
    return loss, {name: whole(parameter.grad) for name, parameter in named_parameters(parts).items()}


def forward_and_backward(path: Path, mesh: MeshConfig) -> tuple[float, Parts]:
    parts, meshes, config = load_on_mesh(path, mesh)
    tokens, labels = tokens_and_labels(config.model.vocab_size)
    mine = slice(meshes.dp_rank * ROWS // meshes.shape.dp, (meshes.dp_rank + 1) * ROWS // meshes.shape.dp)
    rows = tokens[mine].shape[0]
    batch = StepBatch(
        tokens=tokens[mine],
        labels=labels[mine],
        positions=torch.arange(SEQ).expand(rows, -1),
        doc_ids=torch.zeros(rows, SEQ, dtype=torch.int64),
        num_bytes=0,
        first_row=0,
    )
    inputs, _ = prepare_inputs(batch, meshes, config, torch.device("cpu"))
    loss = build_runner(parts, meshes, config, torch.device("cpu")).train(inputs)
    return float(loss), parts


def round_trip(path: Path, out: Path, mesh: MeshConfig, dtype: str) -> int:
    parts, _, _ = load_on_mesh(path, mesh)
    return to_hf(parts, out, dtype=dtype, max_shard_bytes=60_000, verify=False).num_files


def exhaustive(*case: str) -> Any:
    return pytest.param(*case, marks=pytest.mark.exhaustive)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        exhaustive("dsv3", "ep2"),
        ("dsv3_odd", "ep_shard2"),
        exhaustive("dsv3_groups_yarn", "pp2_ep2_ep_shard2"),
        ("qwen3_moe", "cp2_ep2"),
        exhaustive("qwen3_moe_yarn", "ep_shard2"),
        exhaustive("qwen3_moe", "pp2"),
        ("mixtral", "dp4_ep4"),
        exhaustive("mixtral", "pp2_dp2_ep2"),
        exhaustive("dsv3", "hsdp2x2_ep2"),
        exhaustive("dsv3", "tp2_dp2_ep2_etp2"),
        exhaustive("qwen3_moe", "tp2_dp2_ep2_ep_shard2"),
        ("gpt_oss", "tp2_dp2_ep2_etp2"),
        *(exhaustive("gpt_oss", mesh) for mesh in ("ep2", "ep_shard2", "pp2_ep2_ep_shard2", "cp2_ep2")),
        exhaustive("gpt_oss", "dp4_etp2"),
        exhaustive("gpt_oss_odd", "pp2"),
        exhaustive("gpt_oss_odd", "ep_shard2"),
        exhaustive("gpt_oss_full", "hsdp2x2_ep2"),
        exhaustive("mixtral_odd", "ep_shard2"),
        ("qwen3_next", "tp2_dp2_ep2_etp2"),
        *(exhaustive("qwen3_next", mesh) for mesh in ("ep2", "ep_shard2", "pp2_ep2_ep_shard2")),
        exhaustive("qwen3_next_odd", "pp2"),
        exhaustive("qwen3_next_odd", "ep_shard2"),
        exhaustive("qwen3_next_yarn", "hsdp2x2_ep2"),
        exhaustive("qwen3_5_moe", "tp2_dp2_ep2_etp2"),
        exhaustive("qwen3_5_moe_odd", "pp2"),
        exhaustive("glm4_moe_lite_odd", "dp4_ep2_ep_shard2"),
        exhaustive("minimax_m2", "tp2_dp2_ep2_etp2"),
        exhaustive("minimax_m2_odd", "pp2"),
        exhaustive("olmoe", "tp2_dp2_ep2_ep_shard2"),
        exhaustive("olmoe_odd", "ep_shard2"),
        ("granitemoeshared", "tp2_dp2_ep2_etp2"),
        exhaustive("granitemoeshared_odd", "pp2"),
        exhaustive("granitemoe_odd", "ep_shard2"),
        exhaustive("dsv2", "tp2_dp2_ep2_etp2"),
        exhaustive("dsv2_odd", "ep_shard2"),
        ("ernie4_5_moe", "tp2_dp2_ep2_etp2"),
        ("dsv4", "tp2_dp2_ep2_etp2"),
        exhaustive("dsv4_odd", "pp2"),
        exhaustive("dsv4_odd", "ep_shard2"),
        exhaustive("dsv4", "hsdp2x2_ep2"),
        ("muse", "tp2_dp2_ep2_ep_shard2"),
        exhaustive("muse_odd", "pp2"),
        exhaustive("muse", "hsdp2x2_ep2"),
        ("longcat", "tp2_dp2_ep2_etp2"),
        exhaustive("longcat_odd", "pp2"),
        exhaustive("longcat", "hsdp2x2_ep2"),
        exhaustive("ernie4_5_moe_odd", "pp2"),
        exhaustive("qwen2_moe", "tp2_dp2_ep2_etp2"),
        ("qwen2_moe_odd", "ep_shard2"),
        ("glm4_moe", "pp2_dp2_ep2"),
        exhaustive("glm4_moe_odd", "dp4_ep2_ep_shard2"),
        ("llama_odd", "pp2"),
        ("qwen3", "tp2"),
    ],
)
def test_gradients_equal_to_transformers(name: str, mesh: str, tmp_path: Path, ranks: RankPool) -> None:
    check_gradients(name, tmp_path, MESHES[mesh], ranks)


# Every family with even and with odd sizes, on the meshes whose axes differ most.
SWEEP = list(
    product(
        [name for name in SMALL_MODELS if not name.endswith("_yarn")],
        ["tp2", "dp4_ep4", "pp2_ep2_ep_shard2", "tp2_dp2_ep2_ep_shard2"],
    )
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "mesh"), SWEEP)
def test_every_family_is_equal_on_a_mesh_or_refused(name: str, mesh: str, tmp_path: Path, ranks: RankPool) -> None:
    """What does not fit is refused before a rank starts, with the numbers; all else has transformers' gradients."""
    save_small_hf(name, tmp_path / "in")
    refusal = refusal_of(tmp_path / "in", MESHES[mesh])
    if refusal:
        assert re.search(r"\d+ % \d+ = [1-9]|layers \[\d+\] begin a pipeline stage", refusal), refusal
        return
    check_gradients(name, tmp_path / "in", MESHES[mesh], ranks)
    check_round_trip(tmp_path / "in", tmp_path / "out", MESHES[mesh], ranks)


@pytest.mark.parametrize(
    ("name", "mesh", "numbers"),
    [
        ("qwen2_moe_yarn", MeshConfig(dp_shard=8, ep=8), "4 % 8 = 4"),  # more ranks than experts
        ("qwen2_moe_odd", MeshConfig(dp_shard=2, ep=2), "5 % 2 = 1"),
        ("qwen2_moe_odd", MeshConfig(dp_shard=8, ep_shard=8), "12 % 8 = 4"),  # rows of the experts
        ("glm4_moe_odd", MeshConfig(dp_shard=8, etp=4, ep_shard=2), "20 % 8 = 4"),
        ("glm4_moe_odd", MeshConfig(dp_shard=1, tp=2), "303 % 2 = 1"),
        ("llama_odd", MeshConfig(dp_shard=1, tp=2), "291 % 2 = 1"),
        ("kimi", MeshConfig(dp_shard=1, tp=4), "2 % 4 = 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    name: str, mesh: MeshConfig, numbers: str, tmp_path: Path
) -> None:
    save_small_hf(name, tmp_path)
    assert numbers in refusal_of(tmp_path, mesh)


def refusal_of(path: Path, mesh: MeshConfig) -> str:
    """What a run from this checkpoint on ``mesh`` is told before it starts; empty where it may start."""
    config = config_for(path, mesh)
    # Bytes need more ids than small models have: three times as many, which are as odd.
    model = replace(config.model, vocab_size=3 * config.model.vocab_size)
    try:
        check(replace(config, model=model, run_dir=str(path / "run")), None, "cpu")
    except ConfigError as error:
        return str(error)
    return ""


def check_gradients(name: str, tmp_path: Path, mesh: MeshConfig, ranks: RankPool) -> None:
    hf = save_small_hf(name, tmp_path)
    tokens, labels = tokens_and_labels(hf.config.get_text_config().vocab_size)
    logits = hf(tokens).logits
    their_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    their_loss.backward()
    theirs = {key: parameter.grad for key, parameter in text_parameters(hf).items() if parameter.requires_grad}

    results = ranks.run(train_step, world_size(mesh), tmp_path, mesh)
    loss = sum(share for share, _ in results)
    assert abs(loss - their_loss.item()) < TOLERANCE * their_loss.item()
    gradients = {key: gradient for _, mine in results for key, gradient in mine.items()}
    compared = set()
    keys = family_of(model_config_from_hf(tmp_path)).keys.in_memory
    for key, gradient in gradients.items():
        for piece in keys.pieces(key, tuple(gradient.shape)):
            if theirs[piece.key] is None:  # transformers runs indexers without gradient
                assert ".indexer." in piece.key
                compared.add(piece.key)
                continue
            wanted = piece.within(theirs[piece.key])
            # a factor of all streams of all tokens: the terms of its gradient cancel
            most = 10 * TOLERANCE if key.endswith(("_residual.scale", "hc_head.hc_scale")) else TOLERANCE
            assert (gradient[piece.box] - wanted).norm() < most * wanted.norm(), piece.key
            compared.add(piece.key)
    assert compared == set(theirs)


@pytest.mark.one_in(10)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("dsv3", "one"),
        ("dsv3", "hsdp2x2_ep2"),
        ("qwen3_moe_tied", "pp2_ep2_ep_shard2"),
        ("mixtral", "cp2_ep2"),
        *(exhaustive("dsv3", mesh) for mesh in ("pp2_ep2_ep_shard2", "cp2_ep2")),
        *(exhaustive("qwen3_moe_tied", mesh) for mesh in ("one", "hsdp2x2_ep2", "cp2_ep2")),
        *(exhaustive("mixtral", mesh) for mesh in ("one", "pp2_ep2_ep_shard2", "hsdp2x2_ep2")),
        ("qwen3_moe_yarn", "tp2"),  # one key/value head, which tp leaves whole on every rank
        # FSDP inside tp and etp.
        ("dsv3", "tp2_dp2_ep2_etp2"),
        ("qwen3_moe", "dp4_etp2"),
        ("qwen3_moe", "ep_replicate2_tp2"),
        *(exhaustive("dsv3", mesh) for mesh in ("dp4_etp2", "ep_replicate2_tp2")),
        exhaustive("qwen3_moe", "tp2_dp2_ep2_etp2"),
        ("dsv3_odd", "dp4_ep2_ep_shard2"),  # six router rows over four ranks: one of them has none
        exhaustive("qwen2_moe", "tp2_dp2_ep2_etp2"),
        ("qwen2_moe_odd", "pp2"),  # tied
        exhaustive("glm4_moe_odd", "dp4_ep2_ep_shard2"),
        ("llama_odd", "pp2_dp2_ep2"),  # tied
        exhaustive("qwen3_odd", "hsdp2x2_ep2"),
        ("gpt_oss", "dp4_etp2"),  # gates and ups in turn, cut by etp and by FSDP
        *(exhaustive("gpt_oss", mesh) for mesh in ("one", "tp2_dp2_ep2_etp2", "pp2_ep2_ep_shard2")),
        exhaustive("gpt_oss_odd", "pp2"),
        exhaustive("gpt_oss_odd", "ep_shard2"),
        exhaustive("gpt_oss_full", "hsdp2x2_ep2"),
        *(exhaustive("qwen3_next", mesh) for mesh in ("one", "tp2_dp2_ep2_etp2", "pp2_ep2_ep_shard2")),
        exhaustive("qwen3_next_odd", "pp2"),
        exhaustive("qwen3_next_odd", "ep_shard2"),
        exhaustive("qwen3_next_yarn", "hsdp2x2_ep2"),
        exhaustive("qwen3_5_moe", "tp2_dp2_ep2_etp2"),
        exhaustive("qwen3_5_moe_odd", "ep_shard2"),
        ("dsv4", "pp2_ep2_ep_shard2"),
        exhaustive("dsv4_odd", "ep_shard2"),
    ],
)
def test_round_trip_keeps_every_bit(name: str, mesh: str, tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf(name, tmp_path / "in")
    check_round_trip(tmp_path / "in", tmp_path / "out", MESHES[mesh], ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "mesh"), [("dsv3", "tp2_dp2_ep2_etp2"), exhaustive("qwen3_moe_tied", "pp2_ep2_ep_shard2")]
)
def test_fused_experts_are_cut_as_those_one_by_one(name: str, mesh: str, tmp_path: Path, ranks: RankPool) -> None:
    """Their gates and ups lie in one tensor; what leaves is the published layout."""
    save_small_hf(name, tmp_path / "fused", save_original_format=False)
    save_small_hf(name, tmp_path / "published")
    assert not any(".experts.0." in key for key in stored(tmp_path / "fused"))
    ranks.run(round_trip, world_size(MESHES[mesh]), tmp_path / "fused", tmp_path / "out", MESHES[mesh], "keep")
    before, after = stored(tmp_path / "published"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor), key


def check_round_trip(path: Path, out: Path, mesh: MeshConfig, ranks: RankPool) -> None:
    if family_of(model_config_from_hf(path)).keys.renames:  # transformers saves other names than the released ones
        automoe.to_hf(automoe.from_hf(path, dtype=torch.float32), path := out.with_name("released"), verify=False)
    results = ranks.run(round_trip, world_size(mesh), path, out, mesh, "keep")
    assert results[0] >= world_size(mesh)  # every rank wrote something
    before, after = stored(path), stored(out)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], tensor), key
    model = replace(model_config_from_hf(path), hf_path=str(out))
    if model.attention.kind == "mla":  # it has a key head for each head, whatever the source says
        model.attention.num_kv_heads = model.attention.num_heads
    assert model_config_from_hf(out) == model


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    ["dsv3_odd", "qwen2_moe"]
    + [exhaustive(name) for name in ("qwen3_moe", "mixtral_odd", "gpt_oss_odd", "glm4_moe", "minimax_m2", "llama")],
)
def test_bfloat16_survives_float32_master_weights(name: str, tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf(name, tmp_path / "in", dtype=torch.bfloat16)
    ranks.run(round_trip, 2, tmp_path / "in", tmp_path / "out", MESHES["ep_shard2"], "bfloat16")
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        # The selection bias is float32 here, and what this transformers' class keeps so stays so.
        assert after[key].dtype == (torch.float32 if key.endswith("correction_bias") else tensor.dtype)
        assert torch.equal(after[key].to(tensor.dtype), tensor), key
