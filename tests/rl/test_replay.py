"""Routes of an engine: what readers refuse, what routers repeat, and shifted routes; ``test_failures`` has public failures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from automoe.comm.tokens import MicroBatch, Tokens
from automoe.config.schema import ModelConfig, MoEConfig, RouterConfig
from automoe.errors import ConfigError, DataError
from automoe.moe.router import Router, recorded_choices
from automoe.passes.trace import training_pass
from automoe.rl.routes import check_routes, read_sglang, read_vllm
from automoe.session import Sample, Session, losses, open_session
from automoe.verify.pool import RankPool
from tests.rl.test_session import SMALL
from tests.support.class_models import AllInFloat64, float64_of, save_class, tier_config
from tests.support.routes import all_layers, as_sglang, as_vllm

MODEL = ModelConfig(num_layers=4, first_k_dense=1, num_experts=8, num_experts_per_token=2, hidden_size=16)
N, L, K = 9, 3, 2  # tokens of the sample, MoE layers, top-k


def drawn(count: int = N - 1, layers: int = L, experts: int = 8, top_k: int = K, seed: int = 0) -> torch.Tensor:
    """Different experts for each token and layer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, layers, experts, generator=generator).argsort(-1)[..., :top_k]


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("start", [0, 3, N - 1])
@pytest.mark.parametrize("experts", [8, 256, 300])
def test_both_formats_are_read_to_the_same_lines(start: int, experts: int) -> None:
    lines, model = drawn(experts=experts), replace(MODEL, num_experts=experts)
    written = as_vllm(lines, model, start)
    assert written.dtype.itemsize == (1 if experts <= 256 else 2) and written.shape[1] == 4
    expected = lines.clone()
    expected[:start] = -1
    assert torch.equal(read_vllm(written, model, N, start).long(), expected)
    assert torch.equal(read_vllm(written[:, 1:].astype("i4"), model, N, start).long(), expected)  # MoE layers alone
    assert torch.equal(read_sglang(as_sglang(lines, model, start), model, N).long(), expected)


PAIRS = replace(
    MODEL,
    num_layers=6,
    first_k_dense=0,
    moe_shortcut=True,
    router=RouterConfig(num_zero_experts=4),
    shared_intermediate_size=8,
)


def test_every_other_layer_of_pairs_has_routes_and_ids_count_zero_experts() -> None:
    lines = drawn(experts=12)
    assert (lines >= 8).any()
    for read in (read_vllm(as_vllm(lines, PAIRS), PAIRS, N), read_sglang(as_sglang(lines, PAIRS), PAIRS, N)):
        assert torch.equal(read.long(), lines)
    assert torch.equal(read_vllm(lines.numpy(), PAIRS, N).long(), lines)  # layers with experts alone
    shifted = all_layers(lines, PAIRS)
    shifted[5, 3] = [1, 2]
    with pytest.raises(DataError, match="token 5 experts in layer 3, which is dense"):
        read_vllm(shifted, PAIRS, N)
    lines[7, 2] = torch.tensor([1, 12])
    with pytest.raises(DataError, match=r"token 7, layer 4: experts \[1, 12\]; .* 0 to 11"):
        read_vllm(all_layers(lines, PAIRS), PAIRS, N)


def changed(token: int, layer: int, ids: list[int]) -> torch.Tensor:
    lines = drawn()
    lines[token, layer] = torch.tensor(ids)
    return lines


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "repeated": (lambda: all_layers(changed(4, 1, [5, 5]), MODEL), r"token 4, layer 2: experts \[5, 5\]; a token has K different"),
    "a layer of zeros": (lambda: all_layers(drawn() * torch.tensor([1, 1, 0])[:, None], MODEL), r"token 0, layer 3: experts \[0, 0\]"),
    "beyond": (lambda: all_layers(changed(7, 2, [1, 8]), MODEL), r"token 7, layer 3: experts \[1, 8\]; .* 0 to 7: routes of another"),
    "half missing": (lambda: all_layers(changed(2, 0, [1, -1]), MODEL), r"token 2, layer 1: experts \[1, -1\]"),
    "layers": (lambda: drawn(layers=5).numpy(), "5 layers and K=2, and the model has 3 MoE layers and K=2: routes of another"),
    "top-k": (lambda: all_layers(drawn(top_k=3), MODEL), "3 layers and K=3"),
    "in a dense layer": (lambda: drawn(layers=4).numpy(), "experts in layer 0, which is dense: the layers are shifted"),
    "too few lines": (lambda: all_layers(drawn(N - 3), MODEL), r"\[6, 4, 2\]; 9 tokens from 0 on have integers \[8, layers, K\]"),
    "a line too many": (lambda: all_layers(drawn(N), MODEL), r"\[9, 4, 2\]; 9 tokens"),
    "floats": (lambda: all_layers(drawn(), MODEL) * 1.0, "routes are float64"),
    "no lines": (lambda: None, "routes are object"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_lines_that_are_no_routes_of_the_model_are_refused(wrong: str) -> None:
    make, said = WRONG[wrong]
    with pytest.raises(DataError, match=said):
        read_vllm(make(), MODEL, N)


@pytest.mark.parametrize(
    "meta", [{}, {"routed_experts": None}, {"routed_experts": "no"}, {"routed_experts": "AAAAAA=="}]
)
def test_what_is_no_base64_of_routes_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"not int32 \[8, layers, 2\] in base64"):
        read_sglang(meta, MODEL, N)


def test_one_expert_a_token_may_be_expert_zero_and_a_hole_is_a_line_of_minus_one() -> None:
    assert check_routes(torch.zeros(N - 1, L, 1, dtype=torch.int64), replace(MODEL, num_experts_per_token=1)) is None
    assert check_routes(changed(3, 1, [-1, -1]), MODEL) is None


# ---------------------------------------------------------------- the router


@pytest.mark.usefixtures("trains")
@pytest.mark.parametrize(
    "config", [RouterConfig(), RouterConfig(score="sigmoid", expert_bias=True, num_groups=4, topk_groups=2)]
)
def test_tokens_are_forced_one_by_one_within_a_layer(config: RouterConfig) -> None:
    """Weights of forced experts come from live scores; plain top-k, and tokens with -1, are the router's own."""
    router = Router(replace(MODEL, router=config), MoEConfig(), moe_index=1)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))
    index = torch.arange(6).expand(2, 6)
    valid = index < torch.tensor([[6], [4]])
    tokens = Tokens(index, index, None, torch.tensor(10), not_padding=valid)
    own = router(x, tokens)
    router.load.reset_buffers()
    forced = torch.stack([drawn(6, seed=seed) for seed in range(2)]).unsqueeze(3).to(torch.int16)
    forced[:, ::2, 1] = -1
    routing = router(x, replace(tokens, forced_ids=forced))
    assert torch.equal(routing.topk_expert_ids[:, ::2], own.topk_expert_ids[:, ::2])
    assert torch.equal(routing.topk_probs[:, ::2], own.topk_probs[:, ::2])
    assert torch.equal(routing.topk_expert_ids[:, 1::2], forced[:, 1::2, 1, 0].long())
    assert torch.equal(routing.plain_ids, own.plain_ids)
    scores = router.score(x, None).choice
    assert torch.equal(routing.topk_probs, router.topk_probs(scores, routing.topk_expert_ids))
    lacking = sum(
        len({*forced[b, s, 1, 0].tolist()} - {*own.topk_expert_ids[b, s].tolist()})
        for b in range(2)
        for s in range(1, 6, 2)
        if valid[b, s]
    )
    assert router.load.totals[-2:].tolist() == [2 * int(valid[:, 1::2].sum()), lacking] and lacking
    beyond = router(x, replace(tokens, forced_ids=forced[:, :, :1]))  # as a module for multi-token prediction
    assert torch.equal(beyond.topk_expert_ids, own.topk_expert_ids) and beyond.differing is None


# ---------------------------------------------------------------- classes of transformers

CLASSES = ["qwen3_5_moe_text", "minimax_m2", "glm4_moe_lite", "granitemoe", "gpt_oss", "mixtral"]


def losses_of_class(folder: Path) -> None:
    """Natural routes change no bit of a class's loss and gradients; foreign ones are what experts compute."""
    model, _ = float64_of(tier_config(folder))
    config, rows = model.config, torch.randint(300, (2, 13), generator=torch.Generator().manual_seed(2))
    layers = config.num_moe_layers

    def run(forced: torch.Tensor | None = None) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        model.zero_grad()
        for _, layer in model.moe_layers():
            layer.router.load.reset_buffers()
        batch = MicroBatch(rows[:, :-1].contiguous(), labels=rows[:, 1:].contiguous(), forced_ids=forced)
        with training_pass(), recorded_choices(model) as choices:
            loss = model(batch=batch).sum()
            loss.backward()
        totals = torch.stack([layer.router.load.totals for _, layer in model.moe_layers()])
        return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)], choices(), totals

    natural, choices, _ = run()
    repeated, same, totals = run(choices[:, :, :, :1].to(torch.int16))
    assert torch.equal(choices, same) and totals[:, -2:].tolist() == [[48, 0]] * layers
    assert all(map(torch.equal, natural, repeated))
    foreign = torch.stack([drawn(12, layers, seed=seed) for seed in range(2)]).unsqueeze(3)
    foreign[:, 5] = -1
    other, taken, totals = run(foreign)
    forced = foreign[:, :, :, 0] >= 0
    assert torch.equal(taken[:, :, :, 0][forced], foreign[:, :, :, 0][forced])
    assert (totals[:, -2] == 44).all() and (totals[:, -1] > 10).all()
    assert abs(float(other[0] - natural[0])) > 1e-6


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name == "glm4_moe_lite" else pytest.mark.exhaustive) for name in CLASSES],
)
def test_classes_of_transformers_repeat_routes(tmp_path: Path, model_type: str) -> None:
    save_class(model_type, tmp_path)
    with AllInFloat64():
        losses_of_class(tmp_path)


def test_a_class_that_does_not_choose_by_topk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_class("mixtral", tmp_path)
    monkeypatch.setattr(torch, "topk", lambda x, k, dim=-1: tuple(one[..., :k] for one in x.sort(dim, descending=True)))
    with pytest.raises(ConfigError, match="chooses experts by other means than topk"), AllInFloat64():
        losses_of_class(tmp_path)


# ---------------------------------------------------------------- sessions: shifted routes


def natural_routes(session: Session, tokens: list[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Routes of a sample that runs alone, as an engine would compute them."""
    part = session.state.model_parts[0]
    part = part if dtype is None else copy.deepcopy(part).to(dtype)
    with recorded_choices(part) as choices, torch.no_grad():
        part(batch=MicroBatch(torch.tensor([tokens[:-1]])))
    return choices()[0, :, :, 0]


def shifted(routes: list[torch.Tensor], how: str) -> list[torch.Tensor]:
    if how == "token":
        return [one.roll(1, 0) for one in routes]
    if how == "layer":
        return [one.roll(1, 1) for one in routes]
    if how == "sample":
        return [*routes[1:], routes[0]]
    if how == "second turn":
        return [torch.cat((one[:12], one[11:-1])) for one in routes]
    return routes


OVERRIDES = [
    *SMALL,
    "model.num_experts=16",
    "model.num_layers=4",
    "model.initializer_range=0.2",
    "model.vocab_size=128",
]


def drive(folder: str) -> dict[str, Any]:
    """On one rank: what a session says to natural and to shifted routes, and what it leaves as it was."""
    session = open_session([*OVERRIDES, f"run_dir={folder}"])
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(128, (25,), generator=generator).tolist() for _ in range(12)]

    def batch(routes: list[Any]) -> list[Sample]:
        pairs = zip(rows, routes, strict=True)
        return [
            Sample.of_answer(row[:4], row[4:], one, advantages=1.0, old_log_probs=[-4.8] * 21) for row, one in pairs
        ]

    def gradients(routes: list[Any]) -> tuple[torch.Tensor, dict[str, float]]:
        session.zero_grad()
        metrics = session.forward_backward(batch(routes), losses.grpo).metrics
        parameters = session.state.model_parts[0].parameters()
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), metrics

    said: dict[str, Any] = {}
    none = [None] * len(rows)
    natural = [natural_routes(session, row) for row in rows]
    free, metrics = gradients(none)
    said["free"] = "routes_differ" in metrics
    again, metrics = gradients(natural)
    said["natural"] = metrics["routes_differ"], float((again - free).norm() / free.norm())
    rounded = [natural_routes(session, row, torch.bfloat16) for row in rows]
    said["rounded"] = gradients(rounded)[1]["routes_differ"]
    for how in ("token", "layer", "sample", "second turn"):
        try:
            gradients(shifted(rounded, how))
        except DataError as error:
            said[how] = str(error)
    session.max_routes_differ = 2.0
    for how in ("token", "layer", "sample", "second turn"):
        said[f"share {how}"] = gradients(shifted(rounded, how))[1]["routes_differ"]
    foreign = [drawn(24, 4, 16, seed=seed) for seed in range(len(rows))]
    some = [one if number % 2 else None for number, one in enumerate(foreign)]
    packed, _ = gradients(some)
    session.config = replace(session.config, train=replace(session.config.train, micro_batch_size=1, seq_len=24))
    alone, metrics = gradients(some)  # a sample a row, a row a micro-batch
    said["alone"] = float((alone - packed).norm() / packed.norm()), metrics["routes_differ"]
    routers = [layer.router for _, layer in session.state.model_parts[0].moe_layers()]
    before = [router.load_fractions.clone() for router in routers]
    session.optim_step(lr=0.0)
    said["still"] = all(torch.equal(router.load_fractions, one) for router, one in zip(routers, before, strict=True))
    said["after"] = torch.equal(gradients(none)[0], gradients(none)[0])
    return said


def test_shifted_routes_are_refused_with_the_share_that_differs(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(drive, 1, str(tmp_path))[0]
    assert not said["free"] and said["natural"][0] == 0 and said["natural"][1] < 1e-6
    assert 0 < said["rounded"] < 0.03
    for how, least in {"token": 0.5, "layer": 0.8, "sample": 0.8}.items():  # neighbours choose alike
        assert said[f"share {how}"] > least, how
        assert f"{said[f'share {how}']:.1%} of the repeated choices of all MoE layers are not the router's" in said[how]
    assert 0.2 < said["share second turn"] < 0.4
    assert said["alone"][0] < 1e-5 and said["alone"][1] > 0.75
    assert said["still"] and said["after"]
