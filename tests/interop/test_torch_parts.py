"""An option whose private part of torch is gone is refused before ranks start, by the release."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path

import pytest

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, LoraConfig, MeshConfig, ParallelConfig
from automoe.errors import BackendError
from automoe.interop.torch_parts import missing_part, parts
from automoe.launch.hardware import check_backends
from tests.support.releases import PACKED, lacks, needs

MESH = MeshConfig(pp=2, dp_shard=2, cp=2, ep=2)


def chosen(base: str = "weights", **parallel: object) -> tuple[Config, object]:
    lora = LoraConfig(rank=4, base=base)
    return Config(mesh=MESH, parallel=ParallelConfig(**parallel), lora=lora), resolve_mesh(MESH, None)


def test_the_installed_torch_has_the_parts_of_every_option() -> None:
    config, shape = chosen(
        expert_wgrad="fused", schedule="ZBVZeroBubble", stages_per_rank=2, overlap_all_to_all=True, context="ring"
    )
    assert missing_part(config, shape, "1") == ""
    packed, shape = chosen("fp8", **asdict(config.parallel))
    assert all(row[0] for row in parts(packed, shape))
    missing = missing_part(packed, shape, "1")
    assert missing.startswith("lora.base=fp8 needs") if lacks(PACKED) else missing == ""


def test_one_rank_that_shards_nothing_needs_no_part_for_a_packed_base() -> None:
    config = Config(mesh=MeshConfig(dp_shard=1), lora=LoraConfig(rank=4, base="fp8"))
    assert missing_part(config, resolve_mesh(config.mesh, 1), "1") == ""


@pytest.fixture
def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of torch's files with private parts, found in torch's place."""
    config, shape = chosen()
    found = importlib.util.find_spec("torch")
    for _, _, _, file, _ in parts(config, shape):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(found.origin).parent / file, tmp_path / file)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(sys.modules["automoe.interop.torch_parts"].importlib.util, "find_spec", lambda name: spec)
    return tmp_path


SUMS = "fsdp/_fully_shard/_fsdp_param.py"


@pytest.mark.parametrize(
    ("file", "text", "options", "says"),
    [
        (SUMS, "class FSDPParam:\n    @property\n    def unsharded_accumulated_grad(self): ...",
         dict(expert_wgrad="fused"), "parallel.expert_wgrad=fused needs .*autograd"),
        (SUMS, "class FSDPParam: ...", dict(expert_wgrad="delayed"), "parallel.expert_wgrad=delayed needs"),
        (SUMS, "class FSDPParam:\n    unsharded_accumulated_grad: int", dict(schedule="ZBVZeroBubble", stages_per_rank=2),
         "parallel.schedule=ZBVZeroBubble (needs|runs) .*parallel.schedule=Interleaved1F1B"),
        ("pipelining/schedules.py", "def _wait_batch_p2p(): ...\ndef _add_unshard_reshard(): ...",
         dict(overlap_all_to_all=True), "parallel.overlap_all_to_all=true needs _Action"),
        pytest.param(SUMS, "class FSDPParam: ...", dict(base="nf4"), "lora.base=nf4 needs .*Set lora.base=weights",
                     marks=needs(PACKED)),
        ("pipelining/schedules.py", "", {}, "mesh.pp=2 needs _wait_batch_p2p"),
        ("tensor/experimental/_attention.py", "from . import context_parallel", dict(context="ring"), "context=ring needs"),
    ],
)  # fmt: skip
def test_an_option_without_its_part_is_refused(
    torch_folder: Path, file: str, text: str, options: dict[str, object], says: str
) -> None:
    config, shape = chosen(**options)
    assert missing_part(config, shape, version("torch")) == ""
    (torch_folder / "distributed" / file).write_text(text)
    with pytest.raises(BackendError, match=f"(?s){says}") as raised:
        check_backends(config, shape, "cpu")
    assert version("torch") in str(raised.value)


@pytest.mark.parametrize(
    "body",
    ["def __init__(self): ...\n    unsharded_accumulated_grad: int",
     "@property\n    def unsharded_accumulated_grad(self): ...\n    @unsharded_accumulated_grad.setter\n"
     "    def unsharded_accumulated_grad(self, one): ...",
     "@property\n    def unsharded_grad_dtype(self): ..."],
)  # fmt: skip
def test_what_can_be_set_or_has_the_later_form_serves(torch_folder: Path, body: str) -> None:
    (torch_folder / "distributed" / SUMS).write_text(f"class FSDPParam:\n    {body}")
    config, shape = chosen(expert_wgrad="fused")
    assert missing_part(config, shape, "1") == ""
