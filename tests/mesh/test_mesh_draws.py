"""Random draws of the mesh suite: repeatable, legal, and spread over all axes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mesh_draws import DRAWS, draw_cases
from mesh_mappings import CORE, MORE

from automoe.config.schema import CheckpointConfig, Config
from automoe.config.validate import validate

SEEDS = range(20)


def checked(config: Config, run_dir: Path) -> Config:
    """The case's own config, but for a vocabulary that a tokenizer has, and nothing written."""
    model = replace(config.model, vocab_size=48 * 6)
    return replace(config, model=model, run_dir=str(run_dir), checkpoint=CheckpointConfig(export_hf=False))


def test_every_draw_is_accepted_by_validate(tmp_path: Path) -> None:
    for seed in SEEDS:
        for case in draw_cases(seed):
            shape = validate(checked(case.config, tmp_path), None, "cpu")
            assert shape.world_size == case.world_size, case


def test_every_listed_case_is_accepted_by_validate(tmp_path: Path) -> None:
    for case in CORE + MORE:
        validate(checked(case.config, tmp_path), None, "cpu")


def test_a_seed_draws_the_same_again_and_another_one_others() -> None:
    names = [[str(case) for case in draw_cases(seed)] for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2]
    assert len(set(names[0])) == DRAWS
    assert all(name.startswith("seed=1-") for name in names[0])


def test_draws_reach_every_axis_and_every_option() -> None:
    drawn = [case for seed in SEEDS for case in draw_cases(seed)]
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep_replicate", "ep", "etp"):
        assert sum(axis in case.mesh for case in drawn) > len(drawn) / 20, axis
    for key in ("recompute", "schedule", "reshard"):
        assert sum(key in case.parallel for case in drawn) > len(drawn) / 20, key
    exchanging = [case for case in drawn if "cp" in case.mesh and "context" in case.parallel]
    delta_nets = [case for case in drawn if "cp" in case.mesh and case.config.model.attention.linear_num_key_heads]
    assert len(exchanging) > len(drawn) / 20 and len(delta_nets) > len(drawn) / 100
    for key in ("capacity_factor", "router_jitter", "pad_to_capacity", "dispatch_dtype"):
        assert sum(key in case.moe for case in drawn) > len(drawn) / 20, key
    assert sum(bool(case.optim) for case in drawn) > len(drawn) / 20
    evaluated = [case for case in drawn if case.train]
    assert sum("qk_clip" in case.optim and "pp" in case.mesh for case in evaluated) > len(drawn) / 50
    assert sum(case.config.model.num_mtp_layers > 0 for case in drawn) > len(drawn) / 20
    layouts = [str(case.parallel["layout"]) for case in drawn if "layout" in case.parallel]
    assert sum("m" in layout[: layout.rindex("|")] for layout in layouts) > len(drawn) / 150
