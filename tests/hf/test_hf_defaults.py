"""What a config.json leaves out means what transformers takes it to mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from automoe.errors import ConfigError
from automoe.hf.families.family import REQUIRED
from automoe.hf.families.registry import FAMILIES

# Absent, it is a head for each query head here, and a number of the family's own in transformers. Weights of another
# shape are refused, so nobody trains with the wrong one.
SEEN_BY_SHAPES = ("num_key_value_heads",)
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def written_by_transformers(family: str) -> dict[str, Any]:
    """config.json with every default of transformers spelled out."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family).to_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_is_transformers_default(family: str) -> None:
    known, full = FAMILIES[family], written_by_transformers(family)
    expected = known.read_config(full, "")
    optional = [field for field in known.fields.values() if field.default is not REQUIRED]
    assert optional
    for field in optional:
        names = {field.key, *field.aliases}
        if not names & full.keys() or field.key in SEEN_BY_SHAPES:
            continue  # the first: newer than this release of transformers
        shorter = {key: value for key, value in full.items() if key not in names}
        try:
            found = known.read_config(shorter, "")
        except ConfigError as error:
            raise AssertionError(f"{family} without {field.key}: {error}") from error
        assert found == expected, f"{family} without {field.key}"


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_rotary_keys_are_transformers_default(family: str) -> None:
    known, full = FAMILIES[family], written_by_transformers(family)
    shorter = {key: value for key, value in full.items() if key not in ROPE}
    expected, found = known.read_config(full, "").rope, known.read_config(shorter, "").rope
    assert replace(found, original_seq_len=expected.original_seq_len) == expected
    assert found.scaling != "none" or found.original_seq_len == expected.original_seq_len
