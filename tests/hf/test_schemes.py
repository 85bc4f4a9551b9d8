"""Formats of compressed-tensors 0.19 and 0.20: files written by hand are read as their layout says, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_mesh_cases import load_on_mesh, stored
from safetensors.torch import load_file, save_file

import automoe
from automoe.config.schema import MeshConfig
from automoe.errors import CheckpointError
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.write import to_hf
from automoe.verify.pool import RankPool
from tests.support.hf_models import save_small_hf

Tensors = dict[str, torch.Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = {"hidden_size": 64, "moe_intermediate_size": 96, "head_dim": 32}


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of a row in 32-bit words: the first in the lowest bits, each with half of the range added."""
    per = 32 // bits
    padded = torch.nn.functional.pad(numbers.long() + 2 ** (bits - 1), (0, -numbers.shape[1] % per))
    return (padded.unflatten(1, (-1, per)) << bits * torch.arange(per)).sum(-1).to(torch.uint32).view(torch.int32)


def spread(scales: torch.Tensor, rows: int, cols: int, block: tuple[int, int]) -> torch.Tensor:
    """Scales of blocks for every number of a matrix."""
    tall = scales.float().repeat_interleave(min(block[0], rows), 0)
    return tall.repeat_interleave(min(block[1], cols), 1)[:rows, :cols]


def scales_of(rows: int, cols: int, block: tuple[int, int]) -> torch.Tensor:
    return (torch.rand(-(-rows // block[0]), -(-cols // block[1])) * 0.1 + 0.01).bfloat16()


WHOLE = 1 << 20
Made = tuple[Tensors, torch.Tensor]


def integers(bits: int, block: tuple[int, int], symmetric: bool = True, packed: bool = True) -> Callable[..., Made]:
    def make(rows: int, cols: int) -> Made:
        half = 2 ** (bits - 1)
        codes, scales = torch.randint(-half, half, (rows, cols)), scales_of(rows, cols, block)
        zeros = torch.zeros_like(scales).long() if symmetric else torch.randint(-half, half, scales.shape)
        made = {"_packed": words(codes, bits), "_shape": torch.tensor([rows, cols])} if packed else {"": codes.char()}
        made["_scale"] = scales if scales.numel() > 1 else scales.view(1)
        if not symmetric:  # packed by columns, if there is more than one
            one = scales.numel() == 1 or not packed
            made["_zero_point"] = (
                zeros.char().view(made["_scale"].shape) if one else words(zeros.T, bits).T.contiguous()
            )
        return made, (codes - spread(zeros, rows, cols, block)) * spread(scales, rows, cols, block)

    return make


def float8(block: tuple[int, int], e8m0: bool = False) -> Callable[..., Made]:
    def make(rows: int, cols: int) -> Made:
        codes, scales = torch.randn(rows, cols).to(torch.float8_e4m3fn), scales_of(rows, cols, block)
        if e8m0:
            scales = torch.randint(120, 130, scales.shape, dtype=torch.uint8)
        numbers = torch.exp2(scales.float() - 127) if e8m0 else scales
        kept = scales if scales.numel() > 1 else scales.view(1)
        return {"": codes, "_scale": kept}, codes.float() * spread(numbers, rows, cols, block)

    return make


def float4(group: int) -> Callable[..., Made]:
    def make(rows: int, cols: int) -> Made:
        codes = torch.randint(0, 16, (rows, cols), dtype=torch.uint8)
        made = {"_packed": codes[:, ::2] | codes[:, 1::2] << 4}
        if group == 32:
            made["_scale"] = torch.randint(120, 130, (rows, cols // group), dtype=torch.uint8)
            scales = torch.exp2(made["_scale"].float() - 127)
        else:
            made["_scale"] = (torch.rand(rows, cols // group) * 200 + 1).to(torch.float8_e4m3fn)
            made["_global_scale"] = torch.rand(1) * 100 + 500
            made["input_global_scale"] = torch.rand(1)
            scales = made["_scale"].float() / made["_global_scale"]
        return made, E2M1[codes.long()] * spread(scales, rows, cols, (1, group))

    return make


INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "num_bits": 8, "symmetric": True}
# name -> format, settings of the weights, codes and what they mean
CASES: dict[str, tuple[str, dict[str, Any], Callable[..., Made]]] = {
    "int4-group": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "group", "group_size": 16, "actorder": "static"},
        integers(4, (1, 16)),
    ),
    "int4-zeros": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        integers(4, (1, 32), False),
    ),
    "int4-row-zeros": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "channel", "symmetric": False},
        integers(4, (1, WHOLE), False),
    ),
    "int8-packed": (
        "pack-quantized",
        INT | {"num_bits": 8, "strategy": "channel", "symmetric": False},
        integers(8, (1, WHOLE), False),
    ),
    "int8": ("int-quantized", INT | {"num_bits": 8, "strategy": "channel"}, integers(8, (1, WHOLE), True, False)),
    "int8-whole-zeros": (
        "int-quantized",
        INT | {"num_bits": 8, "strategy": "tensor", "symmetric": False},
        integers(8, (WHOLE, WHOLE), False, False),
    ),
    "fp8-row": ("float-quantized", FLOAT | {"strategy": "channel"}, float8((1, WHOLE))),
    "fp8-whole": ("float-quantized", FLOAT | {"strategy": "tensor"}, float8((WHOLE, WHOLE))),
    "fp8-block": ("naive-quantized", FLOAT | {"strategy": "block", "block_structure": [48, 40]}, float8((48, 40))),
    "mxfp8": ("mxfp8-quantized", FLOAT | {"strategy": "group", "group_size": 32}, float8((1, 32), True)),
    "mxfp4": ("mxfp4-pack-quantized", FLOAT | {"num_bits": 4, "strategy": "group", "group_size": 32}, float4(32)),
    "nvfp4": (
        "nvfp4-pack-quantized",
        FLOAT | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
        float4(16),
    ),
}  # fmt: skip


def declare(folder: Path, form: str, *groups: dict[str, Any]) -> None:
    schemes = {
        f"group_{i}": {"format": form, "targets": ["Linear"], "weights": weights} for i, weights in enumerate(groups)
    }
    stated = {"quant_method": "compressed-tensors", "format": form, "config_groups": schemes, "sparsity_config": {}}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))


def quantized(folder: Path, case: str, **sizes: int) -> Tensors:
    """Save a small model whose layers are quantized; return what its tensors mean, in float32."""
    form, weights, make = CASES[case]
    save_small_hf("qwen3_moe", folder, dtype=torch.bfloat16, other_sizes=SIZES | sizes)
    torch.manual_seed(5)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for key, one in list(tensors.items()):
        meant[key] = one.float()
        if ".layers." in key and "_proj." in key:
            del tensors[key]
            made, meant[key] = make(*one.shape)
            inputs = made.pop("input_global_scale", None)
            tensors |= {key + end: part for end, part in made.items()}
            if inputs is not None:
                tensors[key.replace("weight", "input_global_scale")] = inputs
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    declare(folder, form, weights)
    return meant


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_what_codes_and_scales_say(case: str, tmp_path: Path) -> None:
    meant = quantized(tmp_path / "in", case)
    shutil.copytree(tmp_path / "in", tmp_path / "meant")
    save_file(meant, tmp_path / "meant" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "meant" / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    models = [automoe.from_hf(tmp_path / name).state_dict() for name in ("in", "meant")]
    assert not [key for key, one in models[1].items() if not torch.equal(models[0][key], one)]


def round_trip(path: Path, out: Path, mesh: MeshConfig) -> None:
    parts, _, _ = load_on_mesh(path, mesh)
    to_hf(parts, out, dtype="float32", verify=False)


@pytest.mark.parametrize(
    ("case", "width"),
    [("int4-row-zeros", 72), *(pytest.param(case, 96, marks=pytest.mark.exhaustive) for case in CASES)],
)
def test_shards_that_begin_inside_words_and_blocks(case: str, width: int, tmp_path: Path, ranks: RankPool) -> None:
    """Of 72 rows and columns, the second rank begins at the 36th: inside a word of codes and of zero points."""
    meant = quantized(tmp_path / "in", case, moe_intermediate_size=width)
    ranks.run(round_trip, 4, tmp_path / "in", tmp_path / "out", MeshConfig(dp_shard=4, ep_shard=2, etp=2))
    after = stored(tmp_path / "out")
    assert not [key for key, one in meant.items() if not torch.equal(after[key], one)]


@pytest.mark.parametrize(
    ("form", "groups", "says"),
    [
        ("mxfp6-pack-quantized", [FLOAT | {"num_bits": 6, "strategy": "group", "group_size": 32}], "num_bits=6"),
        ("marlin-24", [INT | {"num_bits": 4, "strategy": "channel"}], "format=marlin-24"),
        (
            "mixed-precision",
            [FLOAT | {"strategy": "channel"}, FLOAT | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}],
            r"groups with format, type and num_bits of \[\['mixed-precision', 'float', 8\]",
        ),
        ("nvfp4-pack-quantized", [CASES["nvfp4"][1] | {"symmetric": False}], "symmetric=False"),
    ],
)
def test_other_formats_are_refused_before_a_run(
    form: str, groups: list[dict[str, Any]], says: str, tmp_path: Path
) -> None:
    quantized(tmp_path / "in", "int8")
    declare(tmp_path / "in", form, *groups)
    with pytest.raises(CheckpointError, match=rf"compressed-tensors has .*{says}.*Train the bfloat16 checkpoint"):
        model_config_from_hf(tmp_path / "in")


@pytest.mark.parametrize(
    ("case", "end", "changed", "says"),
    [
        ("nvfp4", "_global_scale", None, "weight_global_scale is missing"),
        ("nvfp4", "_global_scale", torch.ones(2), r"and \[2\] F32, and nvfp4 needs"),
        ("int4-zeros", "_zero_point", torch.zeros(3, 2, dtype=torch.int32), r"and \[3, 2\] I32, and int4 needs"),
        ("fp8-row", "_scale", None, "their scales are missing"),
    ],
)
def test_third_tensors_are_checked(
    case: str, end: str, changed: torch.Tensor | None, says: str, tmp_path: Path
) -> None:
    quantized(tmp_path / "in", case)
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    key = f"model.layers.0.self_attn.q_proj.weight{end}"
    del tensors[key]
    save_file(tensors | ({} if changed is None else {key: changed}), file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        model_config_from_hf(tmp_path / "in")
