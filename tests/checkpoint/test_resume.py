"""A resumed run is the run that was never interrupted: bit for bit on its mesh, at 1e-10 on any other."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import Run, Tensors, build_state, config, on_mesh, open_store, refusal, run

from automoe.checkpoint.folder import start_over
from automoe.checkpoint.manifest import changed_settings, check_model
from automoe.config.convert import config_to_dict
from automoe.config.mesh_shape import resolve_mesh, stays_unsharded
from automoe.config.schema import Config
from automoe.data.loader import Loader
from automoe.errors import CheckpointError
from automoe.verify.pool import RankPool

PP2_DP2_EP2 = dict(pp=2, dp_shard=2, ep=2)
TOLERANCE = 1e-10


def assert_equal_bits(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def assert_close(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        # The bias moves by signs: a relative error of one part in 1e10 has nothing to be relative to.
        assert (got[name] - tensor).norm() <= TOLERANCE * max(tensor.norm(), 1e-6), name


def assert_everything_moved(before: Run, step: int) -> None:
    """State that is still at its first values would be restored by not saving it at all."""
    start, later = before.states[0], before.states[step]
    assert {"model", "optimizer"} == {name.split(".")[0] for name in later}
    assert any(name.endswith("expert_bias") for name in later)
    assert any(name.endswith("load_fractions") for name in later)
    assert [name for name in later if torch.equal(start[name], later[name])] == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["muon", "bfloat16, stochastic, bfloat16", "float32", "bfloat16"], ids=str)
def test_same_mesh_to_the_bit(ranks: RankPool, text: Path, tmp_path: Path, dtype: str) -> None:
    dtype, *kept = dtype.split(", ")
    settings = config(text, "float32" if dtype == "muon" else dtype, **PP2_DP2_EP2)
    settings.optim.algorithm = "muon" if dtype == "muon" else "adamw"
    if kept:
        settings.optim.master_weights, settings.optim.moments = kept
    straight = run(ranks, settings, tmp_path / "run", until=6, save_at=[3])
    assert_everything_moved(straight, 3)
    resumed = run(ranks, settings, tmp_path / "run", until=6)
    assert (straight.resumed_at, resumed.resumed_at) == (None, 3)
    assert_equal_bits(resumed.states[3], straight.states[3])
    assert resumed.losses == straight.losses[3:]
    assert_equal_bits(resumed.states[6], straight.states[6])
    assert resumed.counters == {step: straight.counters[step] for step in (3, 6)}
    assert straight.counters[6]["loader"]["consumed_rows"] == 48


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six steps of one rank that nobody interrupts, and its states after 2, 4 and 6."""
    return run(ranks, config(text), tmp_path_factory.mktemp("one") / "run", until=6, save_at=[2, 4])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(dict(dp_shard=4, ep=4), id="dp4 x ep4"),
        pytest.param({}, id="one rank"),
        pytest.param(dict(cp=2, dp_shard=2), id="cp2 x dp2"),
        pytest.param(dict(tp=2), id="tp2"),
    ],
)
def test_to_another_mesh_and_back(
    ranks: RankPool, text: Path, tmp_path: Path, one_rank: Run, other: dict[str, int]
) -> None:
    """pp2 x dp2 x ep2 saves at step 2, the other mesh at 4, the first goes on to 6: as one rank from the start."""
    settings = config(text, **PP2_DP2_EP2)
    first = run(ranks, settings, tmp_path / "run", until=2, save_at=[2])
    second = run(ranks, on_mesh(settings, **other), tmp_path / "run", until=4, save_at=[4])
    third = run(ranks, settings, tmp_path / "run", until=6)

    assert (second.resumed_at, third.resumed_at) == (2, 4)
    assert_equal_bits(second.states[2], first.states[2])
    assert_equal_bits(third.states[4], second.states[4])
    for step, part in ((2, first), (4, second), (6, third)):
        assert_close(part.states[step], one_rank.states[step])
        assert part.counters[step] == one_rank.counters[step]
    losses = first.losses + second.losses + third.losses
    assert losses == pytest.approx(one_rank.losses, rel=TOLERANCE)


@pytest.mark.exhaustive
def test_another_kind_of_context_parallelism_goes_on(
    ranks: RankPool, text: Path, tmp_path: Path, one_rank: Run
) -> None:
    settings = config(text, cp=2, ep=2)
    losses: list[float] = []
    for step, context in ((2, "gather"), (4, "ulysses"), (6, "gather")):
        other = replace(settings, parallel=replace(settings.parallel, context=context))
        part = run(ranks, other, tmp_path / "run", until=step, save_at=[step])
        assert part.resumed_at == (step - 2 or None)
        assert_close(part.states[step], one_rank.states[step])
        losses += part.losses
    assert losses == pytest.approx(one_rank.losses, rel=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", [{}, dict(dp_shard=2, tp=2, etp=2)], ids=str)
def test_muons_momentum_moves_to_another_mesh(
    ranks: RankPool, text: Path, tmp_path: Path, other: dict[str, int]
) -> None:
    settings = config(text, **PP2_DP2_EP2)
    settings.optim.algorithm = "muon"
    straight = run(ranks, settings, tmp_path / "straight", until=4)
    first = run(ranks, settings, tmp_path / "run", until=2, save_at=[2])
    second = run(ranks, on_mesh(settings, **other), tmp_path / "run", until=4)
    assert second.resumed_at == 2
    assert_equal_bits(second.states[2], first.states[2])
    assert_close(second.states[4], straight.states[4])


@pytest.mark.exhaustive
def test_sharded_experts_and_replicas(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """Experts cut by rows (ep_shard) and replicas (HSDP) are written once and come back whole."""
    settings = config(text, dp_replicate=2, dp_shard=2, ep=2)
    saved = run(ranks, settings, tmp_path / "run", until=1, save_at=[1])
    loaded = run(ranks, on_mesh(settings, dp_shard=2), tmp_path / "run", until=1)
    assert loaded.resumed_at == 1
    assert_equal_bits(loaded.states[1], saved.states[1])


@pytest.mark.exhaustive
def test_with_and_without_fsdp(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """One rank without FSDP saves; with it, to sum micro-batches or over two ranks, the state is the same, and back."""
    summed = config(text, "bfloat16")
    optim = replace(summed.optim, master_weights="stochastic", moments="bfloat16")
    summed = replace(summed, optim=optim)
    bare = replace(summed, train=replace(summed.train, micro_batch_size=8))
    shape = resolve_mesh(bare.mesh, None)
    assert stays_unsharded(bare, shape) and not stays_unsharded(summed, shape)

    first = run(ranks, bare, tmp_path / "run", until=1, save_at=[1])
    assert_everything_moved(first, 1)
    one = run(ranks, summed, tmp_path / "run", until=2)
    two = run(ranks, on_mesh(summed, dp_shard=2), tmp_path / "run", until=2, save_at=[2])
    last = run(ranks, bare, tmp_path / "run", until=3)
    assert (one.resumed_at, two.resumed_at, last.resumed_at) == (1, 1, 2)
    for resumed in (one, two):
        assert_equal_bits(resumed.states[1], first.states[1])
        assert resumed.counters[1] == first.counters[1]
    assert_equal_bits(last.states[2], two.states[2])


def test_exports_that_the_next_start_reads_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "adapter", "checkpoints"):
        (tmp_path / name).mkdir()
    start_over(tmp_path / "checkpoints", [None, "./hf", "byte"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter.1", "checkpoints", "hf"]


def test_resume_never_starts_over_beside_what_is_there(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = config(text)
    straight = run(ranks, settings, tmp_path / "run", until=2, save_at=[2])
    never = replace(settings, checkpoint=replace(settings.checkpoint, resume="never"))
    for name in ("hf", "adapter"):
        (tmp_path / "run" / name).mkdir()
    again = run(ranks, replace(never, train=replace(never.train, seed=1)), tmp_path / "run", until=2, save_at=[2])
    assert again.resumed_at is None
    assert len(again.losses) == 2 and again.losses != straight.losses
    assert (tmp_path / "run" / "checkpoints.1" / "step-2").is_dir()
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"hf.1", "adapter.1"} <= there and not {"hf", "adapter"} & there, "no command may take them for new ones"
    resumed = run(ranks, replace(settings, train=replace(settings.train, seed=1)), tmp_path / "run", until=2)
    assert_equal_bits(resumed.states[2], again.states[2])


@pytest.mark.exhaustive
def test_another_dtype_is_said(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = config(text, "float32", dp_shard=2)
    first = run(ranks, settings, tmp_path / "run", until=1, save_at=[1])
    same = run(ranks, settings, tmp_path / "run", until=1)
    assert (same.resumed_at, first.said, same.said) == (1, "", "")
    other = replace(settings, train=replace(settings.train, dtype="bfloat16"))
    resumed = run(ranks, other, tmp_path / "run", until=1)
    assert resumed.resumed_at == 1
    assert "trained with train.dtype=float32" in resumed.said and "train.dtype=bfloat16" in resumed.said
    assert resumed.said.count("warning") == 1


def draws() -> list[float]:
    """Of every generator, a normal deviate last, of which Python's and NumPy's make two at a time."""
    uniform = [*torch.rand(2).tolist(), random.random(), *np.random.rand(2).tolist()]
    return [*uniform, random.gauss(0, 1), np.random.randn()]


def save_and_draw(settings: Config, run_dir: Path) -> list[float]:
    state, _, _ = build_state(settings, run_dir)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(10 + dist.get_rank())
    draws()
    open_store(settings, run_dir).save(state)
    return draws()


def load_and_draw(settings: Config, run_dir: Path) -> list[float]:
    state, _, _ = build_state(settings, run_dir)
    assert open_store(settings, run_dir).load_latest(state)
    return draws()


def test_random_generators_go_on_where_they_were(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """Training needs none of them; a recipe of one's own may."""
    settings = config(text, dp_shard=2)
    expected = ranks.run(save_and_draw, 2, settings, tmp_path / "run")
    assert expected[0] != expected[1]
    assert ranks.run(load_and_draw, 2, settings, tmp_path / "run") == expected
    (alone,) = ranks.run(load_and_draw, 1, on_mesh(settings), tmp_path / "run")
    assert alone not in expected, "on another mesh there is no such rank"


@pytest.mark.exhaustive
def test_at_the_end_of_an_epoch(ranks: RankPool, tmp_path: Path) -> None:
    """A global batch is the whole text: each step ends an epoch, and the next has another order."""
    text = tmp_path / "short.txt"
    text.write_text("\n".join(f"{n} squared is {n * n}." for n in range(11)))
    settings = config(text, dp_shard=2)
    rows = Loader(settings, 0, 1, cache_dir=tmp_path / "cache").rows_per_epoch
    assert rows % 2 == 0 and rows > 8
    settings = replace(settings, train=replace(settings.train, global_batch_size=rows))
    straight = run(ranks, settings, tmp_path / "straight" / "run", until=3, save_at=[1])
    resumed = run(ranks, settings, tmp_path / "straight" / "run", until=3)
    assert resumed.counters[1]["loader"]["consumed_rows"] == rows
    assert resumed.losses == straight.losses[1:]
    assert_equal_bits(resumed.states[3], straight.states[3])


def test_data_that_changed_is_refused(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    own = tmp_path / "text.txt"
    own.write_bytes(text.read_bytes())
    settings = config(own, dp_shard=2)
    run(ranks, settings, tmp_path / "run", until=1, save_at=[1])
    own.write_text(own.read_text().replace("squared", "sqared", 1))
    messages = ranks.run(refusal, 2, settings, tmp_path / "run")
    assert len(set(messages)) == 1
    assert "The data changed since the checkpoint" in messages[0]
    assert "content was" in messages[0] and "text_bytes was" in messages[0]


def test_settings_that_change_the_numbers_are_said(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    settings = config(text)
    settings.optim.ema_decay = 0.0
    run(ranks, settings, tmp_path / "run", until=1, save_at=[1])
    rows = replace(settings, train=replace(settings.train, micro_batch_size=2))
    assert run(ranks, rows, tmp_path / "run", until=1).said == ""
    moe = replace(settings.moe, dispatch_dtype="fp8")
    faster = replace(settings, moe=moe, optim=replace(settings.optim, lr=0.02, ema_decay=0.5))
    resumed = run(ranks, faster, tmp_path / "run", until=1)
    changed, begun = resumed.said.splitlines()
    then, now = (
        f"moe.dispatch_dtype={dtype}, optim.lr={lr}, optim.ema_decay={decay}"
        for dtype, lr, decay in (("auto", 0.01, 0.0), ("fp8", 0.02, 0.5))
    )
    assert changed.endswith(f"step-1 was trained with {then}; it goes on with {now}")
    assert begun.endswith("step-1 has no averages of weights (optim.ema_decay): they begin with its weights")
    tensors = resumed.states[1]
    averages = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer.ema.")}
    assert len(averages) == sum(name.startswith("optimizer.step.") for name in tensors)
    assert all(torch.equal(a, tensors[name.replace("optimizer.ema", "model")]) for name, a in averages.items())


def test_a_field_that_came_later_had_its_default(text: Path) -> None:
    saved = config_to_dict(config(text))
    del saved["model"]["attention"]["qk_norm"], saved["optim"]["eps"]
    check_model(Path("step-1"), saved, config(text))
    assert changed_settings(saved, config(text)) == ([], [])
    other = config(text)
    other = replace(other, model=replace(other.model, attention=replace(other.model.attention, qk_norm=True)))
    with pytest.raises(CheckpointError, match="model.attention.qk_norm was False, is True"):
        check_model(Path("step-1"), saved, other)
