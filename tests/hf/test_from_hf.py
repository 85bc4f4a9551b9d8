"""``automoe.from_hf``: a model for other people's loops, on one rank or on a mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import automoe
from automoe.config.schema import MeshConfig
from automoe.errors import ConfigError
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.read import load_hf
from automoe.model.decoder import Decoder
from automoe.verify.pool import RankPool
from tests.support.hf_models import save_small_hf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_small_hf("dsv3", tmp_path / "source")
    return tmp_path / "source"


def forward_on_mesh(path: Path, out: Path, tokens: torch.Tensor, mesh: MeshConfig) -> torch.Tensor:
    model = automoe.from_hf(path, mesh=mesh)
    rows = tokens.chunk(mesh.dp_shard)[torch.distributed.get_rank() // (mesh.tp or 1)]
    with torch.no_grad():
        logits = model(rows)
    automoe.to_hf(model, out)  # straight after a forward, while whole weights are still about
    return logits


def test_from_hf_and_to_hf_on_a_mesh(source: Path, tmp_path: Path, ranks: RankPool) -> None:
    tokens = torch.randint(96, (4, 20), generator=torch.Generator().manual_seed(3))
    whole = automoe.from_hf(source)
    with torch.no_grad():
        wanted = whole(tokens)
    mesh = MeshConfig(dp_shard=2, ep=2)
    logits = torch.cat(ranks.run(forward_on_mesh, 2, source, tmp_path / "out", tokens, mesh))
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    again = automoe.from_hf(tmp_path / "out")
    for (name, one), (_, other) in zip(whole.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.exhaustive
def test_from_hf_with_tensor_parallelism_gives_whole_logits(source: Path, tmp_path: Path, ranks: RankPool) -> None:
    tokens = torch.randint(96, (4, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = automoe.from_hf(source)(tokens)
    mesh = MeshConfig(dp_shard=2, tp=2, ep=2, etp=2)
    logits = ranks.run(forward_on_mesh, 4, source, tmp_path / "out", tokens, mesh)
    for rank, found in enumerate(logits):
        torch.testing.assert_close(found, wanted.chunk(2)[rank // 2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "numbers"),
    [
        (MeshConfig(dp_shard=1, tp=2), "101 % 2 = 1"),  # rows of the embedding
        (MeshConfig(dp_shard=4, ep=4), "6 % 4 = 2"),
        (MeshConfig(dp_shard=8, ep=1, ep_shard=8), "20 % 8 = 4"),
    ],
)
def test_from_hf_refuses_a_mesh_that_does_not_divide_the_model(mesh: MeshConfig, numbers: str, tmp_path: Path) -> None:
    save_small_hf("dsv3_odd", tmp_path)
    with pytest.raises(ConfigError, match=numbers):
        automoe.from_hf(tmp_path, mesh=mesh)


def logits_of_an_odd_row(path: Path) -> str:
    model = automoe.from_hf(path, mesh=MeshConfig(dp_shard=1, tp=2))
    with pytest.raises(ConfigError) as caught:
        model(torch.zeros(2, 7, dtype=torch.int64))
    return str(caught.value)


def test_from_hf_says_which_rows_tp_can_cut(source: Path, ranks: RankPool) -> None:
    for message in ranks.run(logits_of_an_odd_row, 2, source):
        assert "tokens=[2, 7]" in message and "7 % 2 = 1. Add 1 tokens to the end" in message


def whole_on_the_first_rank(path: Path) -> int:
    return len(list(automoe.from_hf(path).parameters())) if torch.distributed.get_rank() == 0 else 0


def test_from_hf_without_a_mesh_asks_no_other_rank(source: Path, ranks: RankPool) -> None:
    assert ranks.run(whole_on_the_first_rank, 2, source)[0] > 0


def test_from_hf_cuts_experts_to_rows_that_grouped_mm_does_not_take(tmp_path: Path, ranks: RankPool) -> None:
    """20 numbers are whole blocks of 16 bytes in float32, 10 are not."""
    save_small_hf("dsv3_odd", tmp_path / "in")
    tokens = torch.arange(40).view(4, 10)
    mesh = MeshConfig(dp_shard=2, etp=2)
    logits = torch.cat(ranks.run(forward_on_mesh, 2, tmp_path / "in", tmp_path / "out", tokens, mesh))
    with torch.no_grad():
        wanted = automoe.from_hf(tmp_path / "in")(tokens)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_from_hf_refuses_meshes_whose_ranks_do_not_see_logits_of_rows(axis: str, source: Path) -> None:
    with pytest.raises(ConfigError, match=rf"mesh\.{axis}=2"):
        automoe.from_hf(source, mesh=MeshConfig(dp_shard=1, **{axis: 2}))


def test_from_hf_dtypes(source: Path) -> None:
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        logits = {
            dtype: automoe.from_hf(source, dtype=dtype)(tokens)
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
        }
    for dtype, value in logits.items():
        assert value.dtype == dtype and value.shape == (1, 20, 96)
    assert (logits[torch.float32] - logits[torch.float64]).norm() < 1e-5 * logits[torch.float64].norm()
    assert (logits[torch.bfloat16] - logits[torch.float64]).norm() < 0.1 * logits[torch.float64].norm()
    with pytest.raises(ConfigError, match="dtype"):
        automoe.from_hf(source, dtype=torch.int8)


def test_models_decoder_is_whole(source: Path) -> None:
    model = automoe.from_hf(source)
    assert isinstance(model, Decoder) and not model.training
    assert model.config == model_config_from_hf(source)
    load_hf(model, source)  # a second time over the first is fine
