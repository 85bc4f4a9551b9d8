"""The indexer's choice and loss against a plain loop over their formulas (arXiv 2512.02556, equations 1, 3 and 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log, sqrt

import pytest
import torch

from automoe.comm.tokens import IGNORE, MicroBatch
from automoe.config.schema import AttentionConfig, ModelConfig, MoEConfig, RopeConfig, RouterConfig
from automoe.kernels import index_scores as module
from automoe.model.backend import BackendConfig
from automoe.model.decoder import Decoder
from automoe.model.indexer import Indexer
from automoe.model.init import default_dtype, initialize, reset_buffers
from automoe.passes.trace import training_pass

MODEL = ModelConfig(
    family="deepseek_v32",
    vocab_size=50,
    hidden_size=24,
    num_layers=2,
    first_k_dense=1,
    intermediate_size=20,
    num_experts=4,
    moe_intermediate_size=8,
    initializer_range=0.3,
    attention=AttentionConfig(
        kind="mla",
        num_heads=3,
        num_kv_heads=3,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=6,
        index_topk=4,
        index_n_heads=3,
        index_head_dim=10,
    ),
    rope=RopeConfig(theta=50.0, interleaved=True),
    router=RouterConfig(score="sigmoid", expert_bias=True),
)
ROWS, SEQ = 2, 14


def with_attention(**changes: object) -> ModelConfig:
    return replace(MODEL, attention=replace(MODEL.attention, **changes))


def decoder(config: ModelConfig = MODEL, warmup: bool = False) -> Decoder:
    backend = BackendConfig(indexer_warmup=warmup)
    with default_dtype(torch.float64):
        model = Decoder(config, MoEConfig(experts="loop"), backend=backend)
    reset_buffers(model)
    initialize(model, config.initializer_range, seed=3)
    return model.train()


def batch(vocab: int = 50, documents: bool = True) -> dict[str, torch.Tensor]:
    """Two rows: one of three documents and padding, one of two."""
    tokens = torch.randint(vocab, (ROWS, SEQ), generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[0] * 6 + [1] * 3 + [2] * 3 + [-1] * 2, [0] * 5 + [1] * 9])
    ids = ids if documents else torch.zeros_like(ids)
    index = torch.arange(SEQ).expand(ROWS, SEQ)
    starts = torch.cat((torch.ones(ROWS, 1, dtype=torch.bool), ids[:, 1:] != ids[:, :-1]), 1)
    positions = index - torch.where(starts, index, 0).cummax(1).values
    labels = tokens.roll(-1, 1).masked_fill(ids < 0, IGNORE)
    return {"tokens": tokens, "doc_ids": ids, "positions": positions, "labels": labels}


def turned(vector: torch.Tensor, position: int, config: ModelConfig) -> torch.Tensor:
    """The first dims of a vector of a query or key rotated, pair by pair."""
    width, out = config.attention.qk_rope_head_dim, [*vector.unbind()]
    for pair in range(width // 2):
        a, b = (2 * pair, 2 * pair + 1) if config.attention.index_interleaved else (pair, pair + width // 2)
        angle = position * (1 / config.rope.theta ** torch.tensor(2 * pair / width))  # in float32
        cos, sin = angle.cos().double(), angle.sin().double()
        out[a], out[b] = vector[a] * cos - vector[b] * sin, vector[b] * cos + vector[a] * sin
    return torch.stack(out)


def looped_loss(
    indexer: Indexer, seen: dict, given: dict[str, torch.Tensor], config: ModelConfig, dense: bool
) -> torch.Tensor:
    """The loss of one layer's indexer, one query, key and head at a time; the chosen keys must be a top-k."""
    a = config.attention
    x, latent, q_main, k_main, scale = (seen[name] for name in ("x", "latent", "q", "k", "scale"))
    wq_b, wk, weights = indexer.wq_b.weight, indexer.wk.weight, indexer.weights_proj.weight
    total, count = torch.zeros((), dtype=torch.float64), int((given["doc_ids"] >= 0).sum())
    for row in range(ROWS):
        keys = []
        for place in range(SEQ):
            raw = wk @ x[row, place]
            normed = (raw - raw.mean()) / (raw.var(unbiased=False) + 1e-6).sqrt()
            normed = normed * indexer.k_norm.weight + indexer.k_norm.bias
            keys.append(turned(normed, int(given["positions"][row, place]), config))
        for place in range(SEQ):
            queries = (wq_b @ latent[row, place]).view(a.index_n_heads, a.index_head_dim)
            queries = [turned(query, int(given["positions"][row, place]), config) for query in queries]
            per_head = weights @ x[row, place] / sqrt(a.index_n_heads)
            ids = given["doc_ids"][row]
            visible = [key for key in range(place + 1) if ids[key] == ids[place]]
            score = {
                key: sum(
                    per_head[head] * torch.relu(queries[head] @ keys[key] / sqrt(a.index_head_dim))
                    for head in range(a.index_n_heads)
                )
                for key in visible
            }
            kept = seen["chosen"][row, place].nonzero().flatten().tolist()
            left = [float(score[key].detach()) for key in visible if key not in kept]
            assert set(kept) <= set(visible)
            assert len(kept) == (len(visible) if dense else min(a.index_topk, len(visible)))
            assert not left or max(left) <= min(float(score[key].detach()) for key in kept)
            target = torch.zeros(len(kept), dtype=torch.float64)
            for head in range(a.num_heads):
                logits = torch.stack([q_main[row, place, head] @ k_main[row, key, head] * scale for key in kept])
                target += logits.softmax(0)
            target = (target / target.sum()).detach()
            shares = torch.stack([score[key] for key in kept]).softmax(0)
            if ids[place] >= 0:
                total = total + sum(t * (log(float(t)) - s.log()) for t, s in zip(target, shares, strict=True)) / count
    return total


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict]]:
    """What every indexer was given and has returned."""
    calls: list[dict] = []
    forward, loss = Indexer.forward, Indexer.loss

    def keep(self, x, latent, context):
        calls.append({"indexer": self, "x": x.detach(), "latent": latent.detach()})
        return forward(self, x, latent, context)

    def keep_loss(self, inputs, chosen, q, k, scale, context):
        calls[-1] |= {"chosen": chosen, "q": q.detach(), "k": k.detach(), "scale": scale}
        return loss(self, inputs, chosen, q, k, scale, context)

    monkeypatch.setattr(Indexer, "forward", keep)
    monkeypatch.setattr(Indexer, "loss", keep_loss)
    yield calls


VARIANTS = {
    "sparse": (MODEL, False),
    "warm-up": (MODEL, True),
    "pairs, one head": (with_attention(index_interleaved=True, index_n_heads=1, index_topk=3), False),
    "all keys": (with_attention(index_topk=99), False),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_those_of_a_loop_over_the_formula(
    name: str, watched: list[dict], monkeypatch: pytest.MonkeyPatch, trains: None
) -> None:
    config, warmup = VARIANTS[name]
    monkeypatch.setattr(module, "CHUNK", 5)  # three chunks, the last of them shorter
    model, given = decoder(config, warmup), batch()
    model(batch=MicroBatch(**given)).sum().backward()
    dense = warmup or config.attention.index_topk > SEQ
    assert len(watched) == config.num_layers
    for seen in watched:
        indexer = seen["indexer"]
        names, own = zip(*indexer.named_parameters(), strict=True)
        loss = looped_loss(indexer, seen, given, config, dense)
        assert float(loss) > 1e-3 and abs(float(indexer.loss_sum) - float(loss)) < 1e-12 * float(loss)
        for which, parameter, wanted in zip(names, own, torch.autograd.grad(loss, own), strict=True):
            assert wanted.norm() > 1e-6, which
            assert (parameter.grad - wanted).norm() < 1e-12 * wanted.norm(), which


def gradients(model: Decoder, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(batch=MicroBatch(**given)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_each_side_learns_from_its_own_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the indexers' loss the others' gradients are the same; without labels trained, the indexers' are."""
    given = batch()
    both = gradients(decoder(), **given)
    frozen = decoder()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(".indexer." not in name)
    main = gradients(frozen, **given)
    assert main.keys() == {name for name in both if ".indexer." not in name}
    assert all(torch.equal(main[name], both[name]) for name in main)
    unlabelled = gradients(decoder(), **given | {"labels": torch.full_like(given["labels"], IGNORE)})
    for name, gradient in both.items():
        found = unlabelled[name]
        assert torch.equal(found, gradient) if ".indexer." in name else not found.any(), name


def test_a_warm_up_attends_to_all_keys_and_trains_indexers_alone() -> None:
    given = batch()
    dense = replace(MODEL, attention=replace(MODEL.attention, index_topk=0))
    plain = decoder(dense)
    model = decoder(warmup=True)
    own = model.state_dict()
    plain.load_state_dict({name: own[name] for name in plain.state_dict()})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)
    with torch.no_grad():
        assert torch.equal(model.eval()(given["tokens"]), plain.eval()(given["tokens"]))
        assert not torch.equal(model(given["tokens"]), decoder().eval()(given["tokens"]))
    found = gradients(model.train(), **given)
    assert found.keys() == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert all(gradient.norm() > 0 for gradient in found.values())


@pytest.mark.parametrize("shared", [[], [1]])
def test_documents_of_a_row_are_apart(shared: list[int]) -> None:
    """Other tokens in one document change neither the choice nor the logits of the others, ties or not."""
    config = with_attention(index_n_heads=1, index_topk=2, index_shared_layers=shared)
    model, given = decoder(config).eval(), batch()
    tokens, ids = given["tokens"], given["doc_ids"]
    given = {name: given[name] for name in ("doc_ids", "positions")}
    other = torch.where(ids == 1, (tokens + 7) % 50, tokens)
    with torch.no_grad():
        one, two = model(batch=MicroBatch(tokens, **given)), model(batch=MicroBatch(other, **given))
        assert torch.equal(one[ids != 1], two[ids != 1]) and not torch.equal(one, two)
        # In a row of its own a document is the same if no scores tie: torch's top-k breaks ties by place.
        model = decoder(with_attention(index_n_heads=12, index_topk=2, index_shared_layers=shared)).eval()
        packed, alone = model(batch=MicroBatch(tokens, **given))[1:, 5:], model(tokens[1:, 5:])
    assert (alone - packed).abs().max() < 1e-12 * packed.abs().max()


def test_nothing_is_counted_or_learnt_outside_training() -> None:
    model, given = decoder(), batch()
    with torch.no_grad():
        model(batch=MicroBatch(**given))
    model.eval()(batch=MicroBatch(**given))
    model.train()(batch=MicroBatch(**given))  # not in a step
    assert not any(float(part.loss_sum) for part in model.modules() if isinstance(part, Indexer))
    with training_pass():
        model(batch=MicroBatch(**given))
    first = [float(part.loss_sum) for part in model.modules() if isinstance(part, Indexer)]
    assert len(first) == 2 and min(first) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers(dtype: torch.dtype) -> None:
    """Scores and loss are at least float32 in bfloat16 as well."""
    model, given = decoder(), batch()
    with torch.no_grad():
        wide = model.eval()(given["tokens"])
    model.train().to(dtype)
    reset_buffers(model)
    model(batch=MicroBatch(**given)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.dtype == dtype
    with torch.no_grad():
        found = model.eval()(given["tokens"]).double()
    if dtype == torch.float32:
        assert (found - wide).norm() < 1e-5 * wide.norm()
