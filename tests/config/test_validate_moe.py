"""Rules of routing and dropping: what is refused, and that the remedy is a way out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from automoe.config import rules_model
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import check_rows
from automoe.config.rules import number_rows
from automoe.config.rules_model import model_rows, moe_rows
from automoe.config.schema import ClusterConfig, Config, MeshConfig, ModelConfig, MoEConfig, RouterConfig, TrainConfig
from automoe.errors import ConfigError


def config(router: dict[str, Any] | None = None, experts: int = 8, top_k: int = 2, **moe: Any) -> Config:
    model = ModelConfig(num_experts=experts, num_experts_per_token=top_k, router=RouterConfig(**(router or {})))
    return Config(model=model, moe=MoEConfig(**moe))


@pytest.mark.parametrize(
    ("broken", "key", "said"),
    [
        (config(capacity_factor=-1.0), "moe.capacity_factor", "at least 0"),
        (config(z_loss_coef=float("nan")), "moe.z_loss_coef", "must be a finite number"),
        (config(micro_batch_balance_coef=float("inf")), "moe.micro_batch_balance_coef", "a finite number"),
        (config(router_jitter=1.0), "moe.router_jitter", "above 0"),
        (
            config(router=dict(score="sigmoid", softmax_after_topk=True)),
            "model.router.softmax_after_topk",
            "score=sigmoid",
        ),
        (
            config(router=dict(norm_topk_prob=False, softmax_after_topk=True)),
            "model.router.softmax_after_topk",
            "norm_topk_prob=false",
        ),
        (config(top_k=8, gate="empty"), "moe.gate", "8 of 7"),
        (config(pad_to_capacity=True), "moe.pad_to_capacity", "dropless"),
        (config(dispatcher="of a plugin", dispatch_dtype="fp8"), "moe.dispatch_dtype", "in its own format"),
        (config(replay_routing="/nonexistent"), "moe.replay_routing", "no recorded steps"),
        (config(replay_routing="a", gate="zipf"), "moe.replay_routing", "gate=zipf"),
        (config(replay_routing="a", record_routing="./a"), "moe.record_routing", "same directory"),
    ],
    ids=lambda value: value if isinstance(value, str) and "moe" in value else "",
)
def test_a_broken_rule_is_named(broken: Config, key: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_model, "registered_names", lambda _: ("of a plugin",))
    with pytest.raises(ConfigError, match=said) as error:
        check_rows(broken, number_rows(broken))
        check_rows(broken, moe_rows(broken))
    assert error.value.key == key
    assert error.value.remedy.startswith(("Set ", "Name "))


@pytest.mark.parametrize(
    ("mesh", "gpus", "per_node"),
    [
        (dict(ep=8), 4, 4),
        (dict(ep=8), 8, 8),
        (dict(ep=2), 8, 2),
        (dict(ep=8, etp=2), 8, 4),
        (dict(ep=4, etp=4), 2, 1),
        (dict(ep=8), 6, 0),
        (dict(ep=4), 6, 0),
    ],
    ids=str,
)
def test_nodes_cut_every_expert_group_alike_or_are_refused(mesh: dict[str, int], gpus: int, per_node: int) -> None:
    hierarchical = replace(config(dispatcher="hierarchical"), cluster=ClusterConfig(gpus_per_node=gpus))
    shape = resolve_mesh(MeshConfig(dp_shard=16, **mesh), None)
    assert shape.ep_per_node(gpus) == per_node
    if per_node:
        check_rows(hierarchical, model_rows(hierarchical, shape), shape)
        return
    with pytest.raises(ConfigError, match=rf"nodes of {gpus}, .* consecutive ranks") as error:
        check_rows(hierarchical, model_rows(hierarchical, shape), shape)
    assert error.value.key == "cluster.gpus_per_node"
    nearest = int(error.value.remedy.partition("=")[2].partition(",")[0])
    assert shape.ep_per_node(nearest)


@pytest.mark.parametrize(
    "fine",
    [
        config(),
        config(router=dict(softmax_after_topk=True)),
        config(router=dict(score="sqrt_softplus", norm_topk_prob=False)),
        config(capacity_factor=1.0, pad_to_capacity=True, drop_scope="sequence"),
        config(top_k=7, gate="empty"),
        config(router_jitter=0.01, z_loss_coef=1e-3, micro_batch_balance_coef=1e-2),
    ],
)
def test_what_is_legal_passes(fine: Config) -> None:
    check_rows(fine, moe_rows(fine))


def test_a_recording_is_found(tmp_path: Path) -> None:
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "rank-0.npz").touch()
    recording = MoEConfig(replay_routing=str(tmp_path), record_routing=str(tmp_path / "b"))
    for replays in (config(replay_routing=str(tmp_path)), replace(config(), moe=recording)):
        check_rows(replays, moe_rows(replays))


def test_rows_hold_whole_weights_that_travel_behind_them() -> None:
    """Only where rows travel, and are narrower than a weight."""
    for hidden, dtype, ep, broken in ((31, "bfloat16", 2, True), (31, "float32", 2, False), (31, "bfloat16", 1, False)):
        odd = Config(mesh=MeshConfig(dp_shard=2, ep=ep), train=TrainConfig(dtype=dtype))
        odd.model.hidden_size = hidden
        shape = resolve_mesh(odd.mesh, None)
        odd_rows = [row for row in model_rows(odd, shape) if row[0] == "model.hidden_size" and row[1]]
        assert any("float32 weights" in rule for _, _, rule, _ in odd_rows) == broken
