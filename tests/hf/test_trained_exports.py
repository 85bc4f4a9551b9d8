"""What was fine-tuned on a mesh leaves it whole, as an adapter and merged, and ``transformers`` computes the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_mesh_cases import ROWS, SEQ, config_for, stored
from transformers import AutoConfig

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import LoraConfig, MeshConfig
from automoe.hf.families.registry import FAMILIES, model_config_from_hf
from automoe.hf.peft import to_peft
from automoe.hf.read import load_hf
from automoe.hf.transformers_models import loading_class
from automoe.hf.write import to_hf
from automoe.model.params import LORA_GROUPS, model_params
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import allocate, build_parts
from automoe.parallel.pipeline import build_runner
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from automoe.verify.pool import RankPool
from tests.support.hf_models import SMALL_MODELS, save_small_hf
from tests.support.wrappers import save_wrapper

pytestmark = pytest.mark.exhaustive

ALL_AXES = MeshConfig(pp=2, dp_shard=1, tp=2, ep=2)
OF_A_CLASS = MeshConfig(dp_shard=4, ep=2, ep_shard=2)
# The first small model of each native family; all of them, so that a new family has to be there.
NATIVE = {SMALL_MODELS[name][0]: name for name in reversed(SMALL_MODELS)}
WRAPPERS = {"qwen3_5_moe": ALL_AXES, "kimi_k25": ALL_AXES, "qwen3_vl_moe": OF_A_CLASS, "glm4v_moe": OF_A_CLASS}
WRAPPERS["qwen3_omni_moe_thinker"] = OF_A_CLASS  # sound beside vision
STEPS = 2  # B of an adapter is zero before the first


def answers(config: Any, step: int, rank: int, ranks: int) -> StepBatch:
    """Rows of two conversations, of which the answers alone have labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.model.vocab_size, (ROWS, SEQ + 1), generator=generator)
    doc_ids = (torch.arange(SEQ) >= SEQ // 2).long().expand(ROWS, -1)
    labels = tokens[:, 1:].masked_fill(torch.arange(SEQ) % (SEQ // 2) < 3, IGNORE)
    labels[:, SEQ // 2 - 1] = IGNORE
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    positions = (torch.arange(SEQ) % (SEQ // 2)).expand(ROWS, -1)
    return StepBatch(tokens[mine, :-1], labels[mine], positions[mine], doc_ids[mine], num_bytes=0, first_row=mine.start)


def fine_tune(source: Path, mesh: MeshConfig, out: Path, lora: LoraConfig) -> list[float]:
    """On a rank: train, and write an adapter, if there is one, and the model."""
    config = config_for(source, mesh)
    # A class of transformers may not keep documents apart; nor does a run from such a class pack them.
    config = replace(config, lora=lora, data=replace(config.data, document_mask=mesh is not OF_A_CLASS))
    config = replace(config, optim=replace(config.optim, lr=1e-2, warmup_steps=0))
    device = torch.device("cpu")
    meshes = build_meshes(resolve_mesh(mesh, None), device)
    parts = build_parts(config, meshes)
    allocate(parts, device)
    load_hf(parts, source)
    state = TrainState(parts, build_optimizer(list(parts.values()), config.optim, 0, meshes.stage_group()))
    runner = build_runner(parts, meshes, config, device)
    losses = []
    for step in range(STEPS):
        inputs, trained = prepare_inputs(answers(config, step, meshes.dp_rank, meshes.shape.dp), meshes, config, device)
        stats = forward_backward(state, runner, inputs, config)
        optimizer_step(state, stats, trained, meshes, config)
        losses.append(stats.loss)
    if lora.rank:
        assert "as peft loads it" in to_peft(parts, out / "adapter", lora)
    written = to_hf(parts, out / "model", max_shard_bytes=60_000)
    assert written.checked and written.logits_error is not None and written.logits_error < 1e-5
    return losses


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(torch.arange(48).view(2, 24), use_cache=False).logits


def loaded(folder: Path) -> Any:
    kind = loading_class(AutoConfig.from_pretrained(folder), whole=True)
    return kind.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def test_every_native_family_is_here() -> None:
    assert NATIVE.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", [*NATIVE, *WRAPPERS])
def test_what_was_fine_tuned_is_what_transformers_and_peft_load(kind: str, tmp_path: Path, ranks: RankPool) -> None:
    from peft import PeftModel  # which takes seconds

    source, mesh = tmp_path / "source", WRAPPERS.get(kind, ALL_AXES)
    if kind in WRAPPERS:
        more = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
        save_wrapper(kind, source, **(more if "qwen" in kind else {}))
    else:
        save_small_hf(NATIVE[kind], source)
    params = model_params(model_config_from_hf(source))
    targets = sorted({param.spec.group for param in params if param.spec.lora} & set(LORA_GROUPS))
    lora = LoraConfig(rank=4, alpha=6.0, targets=targets)
    for name, how in (("sft", LoraConfig()), ("lora", lora)):
        losses = ranks.run(fine_tune, 4, source, mesh, tmp_path / name, how)
        assert losses == [losses[0]] * 4 and len(set(losses[0])) == STEPS
    base = loaded(source)
    before, merged = logits(base), logits(loaded(tmp_path / "lora" / "model"))
    assert off(merged, before) > 1e-3, "the adapter has to matter"
    assert off(logits(PeftModel.from_pretrained(base, str(tmp_path / "lora" / "adapter"))), merged) < 1e-5
    files = {name: stored(tmp_path / name / "model") for name in ("sft", "lora")} | {"source": stored(source)}
    assert files["source"].keys() == files["sft"].keys() == files["lora"].keys()
    changed = {
        name: {key for key, one in files["source"].items() if not torch.equal(files[name][key], one)}
        for name in ("sft", "lora")
    }
    beside = set()
    if kind in (*WRAPPERS, "muse_spark_text"):  # which transformers has in a wrapper alone
        text = re.compile(r"(?:model\.)?language_model\.|model\.(?:layers|embed_tokens|norm)\.|lm_head\.")
        beside = {key for key in files["source"] if not text.match(key)}
        assert any("vis" in key for key in beside) and any("audio" in key for key in beside) == (
            "omni" in kind or "muse" in kind
        )
    assert files["source"].keys() - changed["sft"] == beside | {
        key for key in files["source"] if key.endswith("correction_bias") and key not in changed["sft"]
    }
    assert changed["lora"] < changed["sft"] and not any("norm" in key or "embed" in key for key in changed["lora"])
