"""``transformers`` in float32 on the CPU against our model on the device, from one checkpoint directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from device_models import relative

from automoe.comm.tokens import IGNORE, MicroBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, MoEConfig
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.read import load_hf
from automoe.model.decoder import Decoder
from automoe.moe.router import recorded_choices
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import allocate, build_decoder, build_parts
from automoe.verify.trajectory import whole
from tests.support.hf_models import as_our_tensor, save_small_hf

# dtype -> relative error of logits and loss, of a gradient
TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (5e-2, 2.5e-1)}
NAMES = ["dsv3_groups_yarn", "qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe", "glm4_moe"]


def load(path: Path, device: torch.device, dtype: torch.dtype) -> Decoder:
    model = build_decoder(model_config_from_hf(path), MoEConfig(experts="grouped_mm"), dtype)
    model.to_empty(device=device)
    load_hf(model, path)
    return model.train()


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_transformers(device: torch.device, name: str, tmp_path: Path) -> None:
    """float32 at 1e-4; bfloat16, with the choices of float32 forced, stays near it."""
    hf = save_small_hf(name, tmp_path)
    hf.config._experts_implementation = "eager"
    tokens = torch.randint(hf.config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    labels = torch.cat((tokens[:, 1:], torch.full((3, 1), IGNORE)), dim=1)
    their_logits = hf(tokens).logits
    their_loss = F.cross_entropy(their_logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    their_loss.backward()
    theirs = {key: parameter.grad for key, parameter in hf.named_parameters()}
    tokens, labels = tokens.to(device), labels.to(device)

    choices = None
    for dtype, (tolerance, for_gradients) in TOLERANCES.items():
        model = load(tmp_path, device, dtype)
        with torch.no_grad(), recorded_choices(model) as recorded:
            assert relative(model(batch=MicroBatch(tokens, forced_ids=choices)), their_logits) < tolerance
        choices = recorded().to(device)
        loss = model(batch=MicroBatch(tokens, labels=labels, forced_ids=choices)).sum()
        loss.backward()
        assert abs(loss.item() - their_loss.item()) < tolerance * their_loss.item()
        for ours, parameter in model.named_parameters():
            wanted = as_our_tensor(ours, parameter.shape, theirs, model.config)
            assert relative(parameter.grad, wanted) < for_gradients, (dtype, ours)


@pytest.mark.parametrize("name", NAMES)
def test_sharded_load_equals_plain(device: torch.device, name: str, tmp_path: Path) -> None:
    """Into the parts that training uses (FSDP, float32 master weights of a bfloat16 run), from a bfloat16 file."""
    save_small_hf(name, tmp_path, dtype=torch.bfloat16)
    config = Config(mesh=MeshConfig(dp_shard=1), model=model_config_from_hf(tmp_path))
    config = replace(config, train=replace(config.train, dtype="bfloat16"))
    parts = build_parts(config, build_meshes(resolve_mesh(config.mesh, None), device))
    allocate(parts, device)
    load_hf(parts, tmp_path)
    plain = load(tmp_path, torch.device("cpu"), torch.float32).state_dict()
    sharded = parts[0].state_dict()
    assert sharded.keys() == plain.keys()
    for key, tensor in sharded.items():
        assert tensor.device.type == device.type
        assert tensor.dtype == plain[key].dtype
        assert torch.equal(whole(tensor), plain[key]), key
