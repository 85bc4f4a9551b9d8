"""Rules of context parallelism, each with its numbers and a remedy that passes."""

from __future__ import annotations

import pytest

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import check_rows
from automoe.config.validate import mesh_rows
from automoe.errors import ConfigError
from tests.support.configurations import quick_config

GQA = ("model=small_qwen3_moe",)
GPT_OSS = ("model=small_gpt_oss",)
DELTA = ("model=small_qwen3_next",)
MLA = ("model=small_dsv3",)
ULYSSES = "parallel.context=ulysses"
WINDOW = ("model.attention.sliding_window=8", "model.attention.full_attention_interval=2")
RING = "parallel.context=ring"
BARE = "data.document_mask=false"


def check(ranks: int, *overrides: str, device: str = "cpu") -> None:
    config = quick_config(overrides=["mesh=fsdp", *overrides])
    shape = resolve_mesh(config.mesh, ranks)
    check_rows(config, mesh_rows(config, shape, device), shape)


def heads(query: int, keys: int) -> tuple[str, str]:
    return f"model.attention.num_heads={query}", f"model.attention.num_kv_heads={keys}"


@pytest.mark.parametrize(
    ("ranks", "overrides", "key", "said"),
    [
        (3, (*MLA, "mesh.cp=3", "train.seq_len=96", ULYSSES, *heads(4, 4)), "parallel.context", "4 / 1 = 4 (4 % 3 = 1"),
        (4, (*GQA, "mesh.cp=2", "mesh.tp=2", ULYSSES, *heads(6, 2)), "parallel.context", "6 / 2 = 3 (3 % 2 = 1"),
        (4, (*GQA, "mesh.cp=4", ULYSSES, *heads(12, 3)), "parallel.context", "3 / 1 = 3 (3 % 4 = 3"),
        (4, (*GQA, "mesh.cp=4", "train.seq_len=100"), "train.seq_len", "100 % 8 = 4"),
        (8, (*DELTA, "mesh.cp=8"), "mesh.cp", "4 / 1 = 4 (4 % 8 = 4"),
        (4, (*DELTA, "mesh.cp=4", "mesh.tp=2"), "mesh.cp", "4 / 2 = 2 (2 % 4 = 2"),
        (2, (*GPT_OSS, "mesh.cp=2", RING, BARE), "parallel.context", "sinks=true"),
        (2, (*GQA, "mesh.cp=2", RING, *WINDOW), "parallel.context", "sliding_window=8"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_what_does_not_divide_is_refused_with_its_numbers(
    ranks: int, overrides: tuple[str, ...], key: str, said: str
) -> None:
    ranks = 8 if "mesh.cp=4" in overrides and "mesh.tp=2" in overrides else ranks
    with pytest.raises(ConfigError) as caught:
        check(ranks, *overrides)
    assert caught.value.key == key and said in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (3, (*MLA, "mesh.cp=3", "train.seq_len=96", ULYSSES, *heads(6, 6))),
        (4, (*GQA, "mesh.cp=4", ULYSSES, *heads(8, 2))),  # two ranks share a key head
        (4, (*GQA, "mesh.cp=2", "mesh.tp=2", ULYSSES, *heads(4, 1))),
        (4, (*GPT_OSS, "mesh.cp=2", ULYSSES)),
        (4, (*DELTA, "mesh.cp=4")),
        (4, (*GQA, "mesh.cp=4", RING)),
        (4, (*MLA, "mesh.cp=2", "mesh.tp=2", RING, BARE)),
        (1, (*GQA, ULYSSES, *heads(3, 1))),  # without a context axis nothing is exchanged
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_what_divides_passes(ranks: int, overrides: tuple[str, ...]) -> None:
    check(ranks, *overrides)


def test_whole_rows_of_heads_leave_kernels_their_causality() -> None:
    """cp masks keys by their position where they are gathered, which kernels without a mask cannot do."""
    flash = (*GQA, "mesh.cp=2", "kernels.attention=flash", "train.dtype=bfloat16", BARE)
    with pytest.raises(ConfigError, match="keys are masked by their position.*parallel.context=ulysses"):
        check(2, *flash, device="cuda")
    check(2, *flash, ULYSSES, device="cuda")
    with pytest.raises(ConfigError, match="keys are masked by their position") as raised:
        check(2, *flash, *heads(3, 1), device="cuda")
    assert "ulysses" not in str(raised.value)  # of three heads two ranks have not the same number
