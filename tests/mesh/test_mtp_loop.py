"""Multi-token prediction against a plain loop over ``transformers``' DeepSeek-V3 modules, in float64.

The loop takes one document at a time and cuts it shorter at every depth, as the paper's equations do: it has no mask,
no shifted labels and no padding to get wrong. ``transformers`` has no such modules, but all their parts.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mesh_cases import MODELS
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from automoe.comm.tokens import IGNORE, MicroBatch
from automoe.config.schema import ModelConfig, MoEConfig, RopeConfig
from automoe.model.backend import BackendConfig
from automoe.model.decoder import Decoder
from automoe.model.init import default_dtype, initialize, reset_buffers
from automoe.model.mtp import ENDED, shift_rows

WEIGHT, BALANCE, SEQ = 0.3, 0.05, 12
# Lengths of each row's documents, some shorter than a depth; the rest of a row is padding.
ROWS = ((5, 1, 2, 4), (12,), (3, 6), (1, 1))
MODEL = replace(
    MODELS["deepseek"], vocab_size=24, num_layers=2, rope=RopeConfig(interleaved=True), initializer_range=0.02
)


class Plain(nn.Module):
    """The decoder and its modules, with this project's names of parameters outside of experts and routers."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        a, hidden = model.attention, model.hidden_size
        config = DeepseekV3Config(
            vocab_size=model.vocab_size,
            hidden_size=hidden,
            num_hidden_layers=model.num_layers,
            first_k_dense_replace=model.first_k_dense,
            intermediate_size=model.intermediate_size,
            moe_intermediate_size=model.moe_intermediate_size,
            n_routed_experts=model.num_experts,
            num_experts_per_tok=model.num_experts_per_token,
            n_shared_experts=1,
            n_group=model.router.num_groups,
            topk_group=model.router.topk_groups,
            routed_scaling_factor=model.router.routed_scaling_factor,
            num_attention_heads=a.num_heads,
            num_key_value_heads=a.num_heads,
            q_lora_rank=a.q_lora_rank,
            kv_lora_rank=a.kv_lora_rank,
            qk_nope_head_dim=a.qk_nope_head_dim,
            qk_rope_head_dim=a.qk_rope_head_dim,
            v_head_dim=a.v_head_dim,
            rms_norm_eps=model.norm_eps,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        self.model = model
        self.embed_tokens = nn.Embedding(model.vocab_size, hidden)
        self.layers = nn.ModuleList(DeepseekV3DecoderLayer(config, layer) for layer in model.all_layers)
        self.norm = DeepseekV3RMSNorm(hidden, model.norm_eps)
        self.lm_head = None if model.tie_embeddings else nn.Linear(hidden, model.vocab_size, bias=False)
        for layer in self.layers[model.num_layers :]:
            layer.enorm, layer.hnorm = (DeepseekV3RMSNorm(hidden, model.norm_eps) for _ in range(2))
            layer.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
            layer.shared_head = nn.ModuleDict({"norm": DeepseekV3RMSNorm(hidden, model.norm_eps)})
        self.scores: dict[int, list[torch.Tensor]] = {}  # of each MoE layer, one tensor a document
        for number, layer in enumerate(self.layers):
            if number >= model.first_k_dense:
                keep = self.scores.setdefault(number, [])
                layer.mlp.gate.register_forward_hook(lambda _, inputs, out, keep=keep: keep.append(out[0].sigmoid()))

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        size, dim = len(x), self.model.attention.qk_rope_head_dim
        # Rotations are of float32 in both, as published checkpoints were trained.
        angles = torch.arange(size)[:, None] * (1 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        angles = torch.cat((angles, angles), -1)[None]
        mask = torch.full((size, size), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        return layer(x[None], attention_mask=mask, position_embeddings=(angles.cos().double(), angles.sin().double()))[
            0
        ]

    def depths(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Logits of a document at every depth, each depth one position shorter than the one before."""
        count, head = self.model.num_layers, (self.lm_head or self.embed_tokens).weight
        x = self.embed_tokens(tokens)
        for layer in self.layers[:count]:
            x = self.run(layer, x)
        states = [self.norm(x)]
        for k, layer in enumerate(self.layers[count:], start=1):
            if k >= len(tokens):
                break
            joined = (layer.enorm(self.embed_tokens(tokens[k:])), layer.hnorm(states[-1][: len(tokens) - k]))
            states.append(layer.shared_head["norm"](self.run(layer, layer.eh_proj(torch.cat(joined, -1)))))
        return [state @ head.T for state in states]

    def balance(self, documents: list[list[torch.Tensor]]) -> torch.Tensor:
        """Of one layer, given each row's scores: rows weighted by their tokens (arXiv 2412.19437, eq. 17 to 20)."""
        experts, top_k, total = self.model.num_experts, self.model.num_experts_per_token, 0.0
        tokens = sum(len(scores) for row in documents for scores in row)
        for row in filter(None, documents):
            scores = torch.cat(row)
            chosen = F.one_hot(scores.topk(top_k).indices, experts).sum(1).double()
            shares = scores / scores.sum(-1, keepdim=True)
            total = total + experts * (chosen.mean(0) / top_k * shares.mean(0)).sum() * len(scores) / tokens
        return BALANCE * total


def name_there(name: str) -> str:
    return name.replace(".mlp.router.weight", ".mlp.gate.weight")


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels, document ids and positions of packed rows."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(MODEL.vocab_size, (len(ROWS), SEQ), generator=generator)
    labels, doc_ids = torch.full_like(tokens, IGNORE), torch.full_like(tokens, -1)
    positions = torch.zeros_like(tokens)
    for row, lengths in enumerate(ROWS):
        start = 0
        for number, size in enumerate(lengths):
            here = slice(start, start + size)
            labels[row, start : start + size - 1] = tokens[row, start + 1 : start + size]
            doc_ids[row, here], positions[row, here] = number, torch.arange(size)
            start += size
    labels[0, :2] = labels[2, 4] = IGNORE  # as of a prompt
    return tokens, labels, doc_ids, positions


@pytest.mark.parametrize(("depths", "tied"), [(1, False), (2, True), (3, False)])
def test_losses_and_gradients_are_those_of_a_plain_loop(depths: int, tied: bool) -> None:
    model = replace(MODEL, num_mtp_layers=depths, tie_embeddings=tied)
    backend = BackendConfig(seed=0)
    with default_dtype(torch.float64):
        ours = Decoder(model, MoEConfig(experts="loop", seq_balance_coef=BALANCE), backend=backend)
        plain = Plain(model)
    ours.mtp_loss_weight = WEIGHT
    reset_buffers(ours)
    initialize(ours, 0.3, seed=1)
    theirs = dict(plain.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.dim() == 1:  # norms start from ones, which would hide a missing one
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter), dtype=torch.float64).roll(len(name)))
            there = theirs[name_there(name)]
            there.data = parameter.view_as(there).clone()  # float64: that of the router has its own dtype since 5.24
    tokens, labels, doc_ids, positions = batch()
    given, shifted = shift_rows(tokens, labels, doc_ids, depths)
    loss = ours(batch=MicroBatch(
        tokens, labels=labels, doc_ids=doc_ids, positions=positions, mtp_tokens=given, mtp_labels=shifted,
        not_padding=doc_ids >= 0,
    ))  # fmt: skip
    loss.sum().backward()

    losses, hits, counts = [[0.0] * (depths + 1) for _ in range(3)]
    seen: dict[int, list[list[torch.Tensor]]] = {layer: [[] for _ in ROWS] for layer in plain.scores}
    with mock.patch("torch.float32", torch.float64):  # transformers widens to float32, and here that would narrow
        for row, lengths in enumerate(ROWS):
            start = 0
            for size in lengths:
                for k, logits in enumerate(plain.depths(tokens[row, start : start + size])):
                    wanted = labels[row, start + k : start + size]
                    losses[k] += F.cross_entropy(logits, wanted, reduction="sum", ignore_index=IGNORE)
                    hits[k] += int((logits.argmax(-1) == wanted).sum())
                    counts[k] += int((wanted != IGNORE).sum())
                for layer, scores in plain.scores.items():
                    seen[layer][row] += scores
                    scores.clear()
                start += size
    means = [total / count for total, count in zip(losses, counts, strict=True)]
    assert all(count > 3 for count in counts) and sum(hits) > 0
    balance = sum(plain.balance(rows) for rows in seen.values())
    (means[0] + WEIGHT / depths * sum(means[1:]) + balance).backward()

    assert loss.item() == pytest.approx(means[0].item(), rel=1e-12)
    for k in range(1, depths + 1):
        assert float(ours.reported[f"mtp_loss.{k}"]) == pytest.approx(means[k].item(), rel=1e-12)
        assert float(ours.reported[f"mtp_acceptance.{k}"]) == pytest.approx(hits[k] / counts[k], rel=1e-12)
    assert ours.reported.keys() == set(ours.metrics)
    for name, parameter in ours.named_parameters():
        wanted = theirs[name_there(name)].grad.view_as(parameter)
        assert wanted.norm() > 1e-6, name
        assert (parameter.grad - wanted).norm() <= 1e-12 * wanted.norm(), name


def test_shifts_end_with_their_document() -> None:
    tokens, labels, doc_ids, _ = batch()
    given, shifted = shift_rows(tokens, labels, doc_ids, SEQ + 2)
    for row, lengths in enumerate(ROWS):
        end = 0
        for size in lengths:
            start, end = end, end + size
            for i in range(start, end):
                later = tokens[row, i + 1 : end].tolist()
                assert given[row, i].tolist() == later + [ENDED] * (SEQ + 2 - len(later))
                of_labels = labels[row, i + 1 : end].tolist()
                assert shifted[row, i].tolist() == of_labels + [IGNORE] * (SEQ + 2 - len(of_labels))
        assert (given[row, end:] == ENDED).all() and (shifted[row, end:] == IGNORE).all()


def test_a_depth_that_no_document_reaches_costs_nothing() -> None:
    """Documents of two tokens have nothing to say at depth 2: a loss of zero and finite gradients."""
    model = replace(MODEL, num_mtp_layers=2)
    with default_dtype(torch.float64):
        ours = Decoder(model, MoEConfig(experts="loop", seq_balance_coef=BALANCE))
    reset_buffers(ours)
    initialize(ours, 0.3, seed=1)
    tokens = torch.arange(8).view(2, 4)
    doc_ids = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    labels = torch.where(torch.arange(4) % 2 == 0, tokens + 1, IGNORE)
    given, shifted = shift_rows(tokens, labels, doc_ids, 2)
    loss = ours(batch=MicroBatch(tokens, labels=labels, doc_ids=doc_ids, mtp_tokens=given, mtp_labels=shifted))
    loss.sum().backward()
    assert float(ours.reported["mtp_loss.2"]) == 0 == float(ours.reported["mtp_acceptance.2"])
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())
    deepest = (p.grad for name, p in ours.named_parameters() if name.startswith("layers.3."))
    assert all(not gradient.any() for gradient in deepest)


def test_nothing_but_losses_needs_the_modules() -> None:
    """Logits, and losses without shifted tokens, are those of the model without modules."""
    tokens, labels, doc_ids, positions = batch()
    found = []
    for depths in (0, 2):
        with default_dtype(torch.float64):
            ours = Decoder(replace(MODEL, num_mtp_layers=depths), MoEConfig(experts="loop"))
        reset_buffers(ours)
        initialize(ours, 0.3, seed=1)
        given = dict(doc_ids=doc_ids, positions=positions)
        with torch.no_grad():
            found.append(
                (ours(batch=MicroBatch(tokens, **given)), ours(batch=MicroBatch(tokens, labels=labels, **given)))
            )
    assert all(torch.equal(without, beside) for without, beside in zip(*found, strict=True))
