"""``config.json`` means what ``transformers`` takes it to mean: every field, with other values, of every family."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers
from config_variants import ABSENT, BASES, base, class_fields, outcome, variants

from automoe.hf.families.registry import FAMILIES
from tests.support.sampling import sample_seed

OUTCOMES = ("equal", "refused", "reference fails")
PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def test_every_family_is_walked() -> None:
    assert list(BASES) == list(FAMILIES)


YARN = {"rope_type": "yarn", "factor": 4.0}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.5}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"rope_scaling": YARN}, "equal"),  # beside rope_parameters
        ("qwen3", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16}, "equal"),
        ("llama", {"rope_parameters": YARN | {"beta_fast": 1, "beta_slow": 32, "truncate": None}}, "equal"),
        ("llama", {"rope_parameters": YARN | MSCALES}, "equal"),
        ("llama", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "equal"),
        ("llama", {"rope_parameters": YARN | {"original_max_position_embeddings": 20.5}}, "refused"),
        ("llama", {"rope_parameters": YARN | {"factor": None, "original_max_position_embeddings": 16}}, "equal"),
        ("llama", {"is_causal": False}, "refused"),
        ("gpt_oss", {"rope_parameters": {}}, "equal"),
        ("gpt_oss", {"hidden_act": "gelu"}, "equal"),
        ("deepseek_v3", {"rope_parameters": LLAMA3 | MSCALES | {"original_max_position_embeddings": 16}}, "equal"),
        ("deepseek_v3", {"head_dim": 2}, "refused"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.75}, "equal"),
        ("qwen2_moe", {"num_experts": ABSENT, "num_local_experts": 8, "vocab_size": 41}, "equal"),  # 60: the default
        ("qwen2_moe", {"shared_expert_intermediate_size": 20, "hidden_act": "swish"}, "equal"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4}, "equal"),  # in none of the layers
        ("qwen3_moe", {"decoder_sparse_step": 2}, "equal"),  # of two layers, the first is dense
    ],
)
def test_what_was_once_read_otherwise(family: str, changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    config = {key: value for key, value in (base(family) | changes).items() if value is not ABSENT}
    assert outcome(config, tmp_path) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_of_all_variants_that_changes_with_the_day(family: str, tmp_path: Path) -> None:
    every = 100
    for number, variant in enumerate(variants(family)):
        if (number + sample_seed()) % every == 0:
            found = outcome(variant.config, tmp_path)
            assert found in OUTCOMES, f"{family}, {variant.name}: {found}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_every_variant(family: str, tmp_path: Path) -> None:
    count: Counter[str] = Counter()
    wrong = []
    fields = set(class_fields(family))
    for variant in variants(family):
        found = outcome(variant.config, tmp_path)
        count[found] += 1
        fields.discard(variant.name.partition("=")[0])
        if found not in OUTCOMES:
            wrong.append(f"{variant.name}: {found}")
    assert not wrong, "\n".join(wrong)
    assert not fields, "fields of the class that were not changed"
    row, release = documented(family)
    if release == transformers.__version__:
        assert row == [count.total(), *(count[kind] for kind in OUTCOMES)]


def documented(family: str) -> tuple[list[int], str]:
    """Figures of the walk in docs/huggingface.md, and the release of transformers that it names."""
    text = PAGE.read_text()
    row = re.search(rf"^\| `{family}` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    release = re.search(r"transformers (\d+\.\d+\.\d+)", text)
    assert row and release
    return [int(figure.replace(",", "")) for figure in row.groups()], release[1]
