"""Weights of a model in training: what leaves as a stream is the verified export, and takes a bucket of memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from automoe.comm.local_shard import local_shard
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, LoraConfig, MeshConfig, MoEConfig, TrainConfig
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.peft import WEIGHTS_FILE, adapter_tensors, to_peft
from automoe.hf.read import load_hf
from automoe.hf.shards import Parts
from automoe.hf.write import to_hf
from automoe.model.lora import fill_adapters
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import allocate, build_parts
from automoe.rl.weights import WeightStream
from automoe.verify.pool import RankPool
from tests.support.hf_models import save_small_hf
from tests.support.memory import Allocator
from tests.support.wrappers import save_wrapper

BUCKET = 60_000  # bytes; the small models have some 400 kB


def loaded(source: Path, mesh: MeshConfig, lora: LoraConfig | None) -> Parts:
    """This rank's parts of a checkpoint's model, with adapters that add something."""
    config = Config(
        mesh=mesh,
        model=model_config_from_hf(source),
        moe=MoEConfig(experts="loop"),
        train=TrainConfig(seq_len=16, global_batch_size=8, micro_batch_size=1, dtype="float32"),
        data=DataConfig(tokenizer="byte"),
        lora=lora or LoraConfig(),
    )
    parts = build_parts(config, build_meshes(resolve_mesh(mesh, None), torch.device("cpu")))
    allocate(parts, torch.device("cpu"))
    load_hf(parts, source)
    with torch.no_grad():
        for part in parts.values():
            fill_adapters(part)
            for name, parameter in part.named_parameters():
                if ".lora.B" in name:
                    local_shard(parameter).fill_(0.01)
    return parts


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {key: one for file in folder.glob("*.safetensors") for key, one in load_file(file).items()}


def streamed(buckets: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


def stream_and_export(source: Path, out: Path, mesh: MeshConfig, options: dict[str, Any], lora: Any) -> list[str]:
    """On a rank: stream, update, stream, export, and compare; returns names in the order of the stream."""
    parts = loaded(source, mesh, lora)
    stream = WeightStream(parts, BUCKET, **options)
    before = streamed(stream)
    lent = {name: tensor.clone() for bucket in stream.lent() for name, tensor in bucket.items()}
    change(parts)
    after = streamed(stream)
    assert list(before) == list(lent) == list(after) == list(stream.contents)
    assert all(map(equal_bytes, before.values(), lent.values())), "a tensor of the stream is the model's own"
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before)
    to_hf(parts, out, verify=False, **options)  # merges adapters: the stream above had not
    exported = stored(out)
    assert exported.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == exported[name].dtype and tensor.shape == exported[name].shape, name
        assert equal_bytes(tensor, exported[name]), name
    return list(after)


def equal_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


def change(parts: Parts) -> None:
    """As an update would; every rank its own shard, so copies stay equal."""
    with torch.no_grad():
        for part in parts.values():
            for parameter in part.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.25)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("family", "mesh", "options"),
    [
        ("qwen3_moe", {"dp_shard": 1}, {"dtype": "float32"}),  # not converted: lent tensors are the model's
        ("dsv3", {"pp": 2, "dp_shard": 2, "ep": 2}, {"dtype": "bfloat16"}),
        ("gpt_oss", {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}, {}),
        ("dsv3_odd", {"dp_shard": 4, "ep": 2, "ep_shard": 2}, {"encoding": "fp8"}),
        ("qwen3_moe_tied", {"pp": 2, "dp_shard": 1}, {"encoding": "fp8"}),
        pytest.param("gpt_oss", {"dp_shard": 2, "ep": 2}, {"encoding": "mxfp4"}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5_moe", {"dp_shard": 2, "ep": 2}, {}, marks=pytest.mark.exhaustive),
        pytest.param("mixtral", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_stream_is_the_export(
    family: str, mesh: dict[str, int], options: dict[str, Any], tmp_path: Path, ranks: RankPool
) -> None:
    scaled = {"hidden_size": 64, "intermediate_size": 96} if options.get("encoding") == "mxfp4" else {}  # by 32 numbers
    save_small_hf(family, tmp_path / "source", dtype=torch.bfloat16, other_sizes=scaled)
    on_mesh = MeshConfig(**mesh)
    results = ranks.run(
        stream_and_export, world(on_mesh), tmp_path / "source", tmp_path / "out", on_mesh, options, None
    )
    assert all(names == results[0] for names in results)
    numbers = [int(name.split(".")[2]) for name in results[0] if name.startswith("model.layers.")]
    assert numbers == sorted(numbers)  # a layer's tensors stand together


@pytest.mark.parametrize(
    ("family", "mesh"), [("dsv3", {"dp_shard": 2, "ep": 2}), ("gpt_oss", {"pp": 2, "dp_shard": 1})]
)
def test_adapters_are_added_on_the_way_and_stay(
    family: str, mesh: dict[str, int], tmp_path: Path, ranks: RankPool
) -> None:
    save_small_hf(family, tmp_path / "source", dtype=torch.bfloat16)
    lora = LoraConfig(rank=4, alpha=8.0)
    ranks.run(stream_and_export, 2, tmp_path / "source", tmp_path / "out", MeshConfig(**mesh), {}, lora)


@pytest.mark.parametrize("mesh", [{"pp": 2, "dp_shard": 1}, {"dp_shard": 2, "ep": 2}])
def test_an_adapter_leaves_alone_as_peft_reads_it(mesh: dict[str, int], tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf("dsv3", tmp_path / "source")
    ranks.run(adapter_and_file, 2, tmp_path / "source", tmp_path / "adapter", MeshConfig(**mesh))


def adapter_and_file(source: Path, folder: Path, mesh: MeshConfig) -> None:
    lora = LoraConfig(rank=4, alpha=8.0)
    parts = loaded(source, mesh, lora)
    alone = adapter_tensors(parts)
    to_peft(parts, folder, lora, layout="published")
    written = load_file(folder / WEIGHTS_FILE)
    assert alone.keys() == written.keys() and all(torch.equal(alone[name], one) for name, one in written.items())


def test_parts_that_are_not_trained_are_in_the_stream(tmp_path: Path, ranks: RankPool) -> None:
    """A server needs the vision tower too."""
    save_wrapper("qwen3_vl_moe", tmp_path / "source")
    mesh = MeshConfig(dp_shard=2, ep=2)
    names = ranks.run(stream_and_export, 2, tmp_path / "source", tmp_path / "out", mesh, {}, None)[0]
    assert any("visual" in name for name in names)


def world(mesh: MeshConfig) -> int:
    return resolve_mesh(mesh, None).world_size


def most_memory(source: Path, mesh: MeshConfig, library: Path, bucket: int, encoding: Any) -> tuple[int, int]:
    parts = loaded(source, mesh, None)
    stream = WeightStream(parts, bucket, encoding=encoding)
    allocator = Allocator(library)
    allocator.forget()
    before = allocator.alive()
    count = sum(1 for _ in stream)
    return allocator.most() - before, count


@pytest.mark.parametrize("encoding", ["plain", "fp8"])
def test_an_iteration_takes_a_bucket_of_memory(encoding: str, tmp_path: Path, ranks: RankPool, allocator: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 16, "vocab_size": 256}
    save_small_hf("dsv3", tmp_path / "source", dtype=torch.bfloat16, other_sizes=sizes)
    bucket = 2 << 20
    for mesh in (MeshConfig(dp_shard=1), MeshConfig(pp=2, dp_shard=2, ep=2)):
        for most, count in ranks.run(most_memory, world(mesh), tmp_path / "source", mesh, allocator, bucket, encoding):
            assert count > 2 and most <= bucket, (mesh, most, count)
